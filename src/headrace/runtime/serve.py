"""`headrace serve`: everything of one machine, started in order and stopped in the opposite one.

this process          gateway + core (data port, metrics port)
├── worker processes  one for each replica of an embedded model
└── admin process     admin API on its own port
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
from prometheus_client import CollectorRegistry, start_http_server

from headrace.clock import SystemClock
from headrace.config.settings import Settings
from headrace.core.control import ControlServer
from headrace.core.controls import ModelControls
from headrace.core.core import Core
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.core.metrics import CoreMetrics
from headrace.core.refunds import Refunds
from headrace.errors import SetupError
from headrace.gateway.app import Gateway
from headrace.gateway.identify import Identifier
from headrace.http import HttpServer
from headrace.identity import TENANT_KEY, KeyVerifier
from headrace.runtime.admin import AdminProcess
from headrace.runtime.data_directory import DataDirectory, RunningServer
from headrace.runtime.fleet import Fleet
from headrace.runtime.recovery import recover
from headrace.runtime.workers import PROGRESS_SUFFIX
from headrace.store.journal import Journal
from headrace.telemetry.process import add_process_metrics, quieten_garbage_collection
from headrace.telemetry.request_log import RequestLog

DEFAULT_TENANT = "default"
BOOTSTRAP_KEY_SECONDS = 30 * 86_400
"""Life of the keys that a start prints. Keys for applications are made with `headrace keys create`."""
ACTOR = "serve"
SETTLE_SECONDS = 5.0
"""After the drain, for records that are on their way."""

_log = structlog.get_logger()


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What `serve` says once it is ready; `--json` prints it as one line."""

    url: str
    admin_url: str
    metrics_url: str
    key: str
    admin_key: str
    tenant: str
    model: str
    pid: int


async def serve(settings: Settings, *, builtin_model: Path, announce: Callable[[Announcement], None]) -> None:
    """Run until SIGINT or SIGTERM, then drain. Raises `SetupError` if it cannot start."""
    with DataDirectory(Path(settings.data)) as data:
        await _Server(settings, data, builtin_model, announce).run()


class _Server:
    """The parts of a running server."""

    def __init__(
        self,
        settings: Settings,
        data: DataDirectory,
        builtin_model: Path,
        announce: Callable[[Announcement], None],
    ) -> None:
        self._settings = settings
        self._data = data
        self._announce = announce
        self._clock = SystemClock()
        registry = CollectorRegistry()
        add_process_metrics(registry)
        self._metrics = CoreMetrics(registry)
        self._directory = Directory.open(data.path, self._clock)
        self._journal = Journal(data.path / "ledger.db", self._clock, durability=settings.ledger.durability)
        self._core = Core(
            settings,
            directory=self._directory,
            journal=self._journal,
            clock=self._clock,
            metrics=self._metrics,
        )
        verifier = KeyVerifier(self._directory.keyring.public_keys, TENANT_KEY)
        identifier = Identifier(verifier, self._directory, self._clock, self._metrics)
        request_log = RequestLog(
            self._clock, level=settings.log.level, fmt=settings.log.format, process="gateway"
        )
        gateway = Gateway(self._core, identifier, settings, self._clock, request_log)
        self._http = HttpServer(
            gateway.handle,
            render_refusal=gateway.render_refusal,
            on_error=gateway.on_error,
            check_head=gateway.check_head,
        )
        self._fleet = Fleet(settings, self._core, self._clock, data, builtin_model)
        self._stop = asyncio.Event()
        self._watch_server()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop_asked)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close_stores)
            await self._recover()
            # Listening first: a port in use is said before a model is loaded, and early requests wait.
            await self._http.start(self._settings.host, self._settings.port)
            stack.push_async_callback(self._stop_serving)
            metrics = self._start_metrics(stack)
            control = await self._start_control(stack)
            started = asyncio.ensure_future(self._start_children(stack, control))
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                self._ready(metrics, admin_port=started.result())
                await stopped
            started.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await started
            stopped.cancel()
        _log.info("server_stopped")

    # --- start -----------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Close what an earlier life left open."""
        await recover(self._core, self._data.progress_files(PROGRESS_SUFFIX))

    def _start_metrics(self, stack: contextlib.AsyncExitStack) -> int:
        settings = self._settings
        try:
            server, _ = start_http_server(
                settings.metrics_port, addr=settings.metrics_host, registry=self._metrics.registry
            )
        except OSError as error:
            raise SetupError(
                f"cannot serve metrics on {settings.metrics_host}, port {settings.metrics_port}: "
                f"{error.strerror}"
            ) from error
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        return server.server_port

    async def _start_control(self, stack: contextlib.AsyncExitStack) -> Path:
        path = self._data.sockets / "core.sock"
        controls = ModelControls(self._core, self._directory)
        control = ControlServer(
            self._directory,
            list_workers=self._fleet.views,
            list_models=controls.views,
            update_model=controls.update,
            list_queues=self._core.queues.views,
            flush_ledger=self._journal.flush,
            refund=Refunds(self._journal, self._directory, self._clock).refund,
        )
        await control.start(path)
        stack.push_async_callback(control.stop)
        return path

    async def _start_children(self, stack: contextlib.AsyncExitStack, control: Path) -> int:
        """Start admin process and workers side by side. Returns the admin port."""
        settings = self._settings
        admin = AdminProcess(
            {
                "host": settings.admin_host,
                "port": settings.admin_port,
                "core_socket": str(control),
                "ledger_path": str(self._data.path / "ledger.db"),
                "public_keys": self._directory.keyring.encoded_public_keys(),
                "log_level": settings.log.level,
                "log_format": settings.log.format,
            }
        )
        running = asyncio.ensure_future(admin.run())
        stack.callback(running.cancel)
        stack.push_async_callback(admin.stop, 5.0)
        await self._fleet.start()
        await asyncio.gather(admin.started, self._fleet.started())
        return admin.started.result()

    def _ready(self, metrics_port: int, *, admin_port: int) -> None:
        settings = self._settings
        key, admin_key = self._bootstrap_keys()
        announcement = Announcement(
            url=f"http://{_shown(settings.host)}:{self._http.port}",
            admin_url=f"http://{_shown(settings.admin_host)}:{admin_port}",
            metrics_url=f"http://{_shown(settings.metrics_host)}:{metrics_port}/metrics",
            key=key,
            admin_key=admin_key,
            tenant=DEFAULT_TENANT,
            model=next(iter(self._core.models)),
            pid=os.getpid(),
        )
        self._data.announce(
            RunningServer(
                url=announcement.url,
                admin_url=announcement.admin_url,
                metrics_url=announcement.metrics_url,
                pid=announcement.pid,
                started_ts=self._clock.wall_us(),
            ),
            admin_key=admin_key,
        )
        quieten_garbage_collection()
        _log.info("server_ready", url=announcement.url, admin_url=announcement.admin_url)
        self._announce(announcement)

    def _bootstrap_keys(self) -> tuple[str, str]:
        """A tenant to begin with, and a key for each side."""
        directory = self._directory
        try:
            directory.get_tenant(DEFAULT_TENANT)
        except ControlFailure:
            directory.create_tenant(DEFAULT_TENANT, "made by the first start", actor=ACTOR)
        key = directory.create_key(
            tenant=DEFAULT_TENANT, name="printed at start", expires_in_s=BOOTSTRAP_KEY_SECONDS, actor=ACTOR
        )
        admin_key = directory.create_admin_key(
            name="printed at start", expires_in_s=BOOTSTRAP_KEY_SECONDS, actor=ACTOR
        )
        return key.key, admin_key.key

    # --- stop ------------------------------------------------------------------------------------

    def _stop_asked(self) -> None:
        """The first signal drains, the second does not wait."""
        if self._stop.is_set():
            _log.warning("server_stops_at_once")
            self._fleet.kill()
            self._data.remove_traces()
            os._exit(130)
        running = sum(
            model.queue.num_running + model.queue.num_waiting for model in self._core.models.values()
        )
        say = _log.warning if running else _log.info
        say(
            "server_drains",
            requests=running,
            at_most_s=self._settings.drain_s,
            hint="a second signal stops at once",
        )
        self._stop.set()

    async def _stop_serving(self) -> None:
        self._core.begin_stop(drain_s=self._settings.drain_s)
        cancelled = await self._http.drain(self._settings.drain_s)
        if cancelled:
            _log.warning("requests_cut", count=cancelled)
        await self._core.settle_open(seconds=SETTLE_SECONDS)
        # What a worker still holds is settled from its progress file once it is gone, so workers first.
        await self._fleet.stop()
        await self._core.stop()

    async def _close_stores(self) -> None:
        await self._journal.close()
        self._directory.close()
        if not self._journal.open_reservations():
            for file in self._data.progress_files(PROGRESS_SUFFIX):
                file.unlink()

    def _watch_server(self) -> None:
        queues = self._core.queues
        self._metrics.watch_queues(waiting=queues.num_waiting, jain_index=queues.jain_indexes)
        self._metrics.watch_memory(held=queues.memory_held, throttled=queues.num_throttled)
        http, journal, models = self._http, self._journal, self._core.models
        self._metrics.watch(
            {
                "headrace_http_connections_open": lambda: http.num_connections_open,
                "headrace_http_requests_refused": lambda: http.num_refusals,
                "headrace_ledger_pending": lambda: journal.num_pending,
                "headrace_ledger_healthy": lambda: float(journal.is_healthy),
                "headrace_queue_length": lambda: sum(one.queue.num_waiting for one in models.values()),
                "headrace_running": lambda: sum(one.queue.num_running for one in models.values()),
            }
        )


def _shown(host: str) -> str:
    """The address a person on this machine can use."""
    if host in ("0.0.0.0", "", "::"):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
