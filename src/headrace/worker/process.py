"""A worker process from its first line to its last: load, warm up, serve, drain.

It gets its orders as one JSON line on standard input and answers with one JSON line on standard
output: `Ready` or `Failed`. The end of standard input means that whoever started it is gone; then it
stops, leaving its progress file to be read by the next one.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry, start_http_server

from headrace.bounds import MIB
from headrace.clock import Clock, SystemClock
from headrace.config.settings import EngineSettings
from headrace.engine.loading import load_engine
from headrace.engine.protocol import Engine, Span
from headrace.errors import EngineFault, ModelError, SetupError
from headrace.request.sampling import Sampling
from headrace.scheduling.steps import StepLimits
from headrace.telemetry.logs import configure_logs
from headrace.telemetry.process import add_process_metrics
from headrace.worker.gate import gate_for
from headrace.worker.loop import EngineLoop, LoopNews
from headrace.worker.parking import Parking
from headrace.worker.progress import ProgressFile
from headrace.worker.prompt import PromptBuilder
from headrace.worker.server import WorkerServer
from headrace.worker.slots import EngineSlots
from headrace.worker.stats import StepStats

ENGINE_STOP_SECONDS_MAX: Final = 5.0
"""How long a worker that ends waits for its engine's step, then it leaves without. A start of the server
waits longer than this for the workers of an earlier life."""

REPRODUCIBLE_CHUNK_TOKENS: Final = 64
"""In reproducible mode prompts are computed in multiples of this: the rows of a tile of llama.cpp's flash attention."""

_log = structlog.get_logger()


class WorkerOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker process is told."""

    worker_id: str
    model_path: str | None
    engine: EngineSettings
    socket: str
    progress: str
    parking: str
    """Directory for KV memory put aside."""
    cache: str
    """Directory for converted weights."""
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "json"
    is_child: bool = True
    """Stop at the end of standard input."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker listens and is warm."""

    pid: int
    metrics_port: int
    resident_bytes: int
    """Memory of the process after warm-up: the baseline that later figures are compared with."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker cannot start; nothing but a change of settings or machine will help if `is_final`."""

    kind: str
    message: str
    is_final: bool


def run_worker(orders: WorkerOrders) -> int:
    """Run until stopped. Returns the exit status: 0 drained, 1 engine failed, 2 could not start."""
    configure_logs(level=orders.log_level, fmt=orders.log_format, process=orders.worker_id)
    clock = SystemClock()
    try:
        began_us = clock.monotonic_us()
        template = _read_template(orders.engine.chat_template)
        engine = load_engine(orders.model_path, orders.engine, cache=Path(orders.cache))
        prompts = PromptBuilder(
            engine.vocabulary,
            template=template,
            is_whitespace_normalized=orders.engine.normalize_whitespace,
        )
        loaded_us = clock.monotonic_us()
        warmed = _warm_up(engine)
        warm_us = clock.monotonic_us()
    except (SetupError, EngineFault) as error:
        _say(Failed(kind=type(error).__name__, message=str(error), is_final=isinstance(error, SetupError)))
        return 2
    _log.info(
        "engine_ready",
        load_ms=(loaded_us - began_us) // 1000,
        warm_up_ms=(warm_us - loaded_us) // 1000,
        **msgspec.to_builtins(engine.info),
    )
    start = _Start(load_us=loaded_us - began_us, warm_up_us=warm_us - loaded_us, warmed=warmed)
    return asyncio.run(_serve(orders, engine, prompts, clock, start))


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's start took."""

    load_us: int
    warm_up_us: int
    warmed: tuple[int, float]
    """What `_warm_up` said."""


class _Parts:
    """What a worker is put together from. Belongs to the network thread's loop."""

    def __init__(
        self,
        orders: WorkerOrders,
        engine: Engine,
        prompts: PromptBuilder,
        clock: Clock,
        start: "_Start",
    ) -> None:
        registry = CollectorRegistry()
        add_process_metrics(registry)
        stats = StepStats(registry, kv_bytes_per_token=engine.info.kv_bytes_per_token)
        self._engine = engine
        self._metrics, _ = start_http_server(orders.metrics_port, addr=orders.metrics_host, registry=registry)
        self._progress = ProgressFile(Path(orders.progress))
        chunk_tokens = REPRODUCIBLE_CHUNK_TOKENS if orders.engine.reproducible else None
        slots = EngineSlots(
            engine, clock=clock, stats=stats, parking=_parking(orders, engine), grain=chunk_tokens or 1
        )
        self.server = WorkerServer(
            worker_id=orders.worker_id,
            info=engine.info,
            prompts=prompts,
            progress=self._progress,
            stats=stats,
            clock=clock,
            load_us=start.load_us,
            warm_up_us=start.warm_up_us,
            is_caching=orders.engine.prefix_cache,
            sessions=slots.adopted_sessions,
        )
        network = asyncio.get_running_loop()

        def on_news(news: LoopNews) -> None:
            network.call_soon_threadsafe(self.server.publish, news)

        self.loop = EngineLoop(
            engine,
            limits=_step_limits(orders.engine, engine),
            clock=clock,
            progress=self._progress,
            on_news=on_news,
            stats=stats,
            slots=slots,
            chunk_tokens=chunk_tokens,
            gate=gate_for(orders.engine, stats),
        )
        self.loop.warmed_up(start.warmed)
        self.engine_thread = _EngineThread(self.loop, network)

    @property
    def metrics_port(self) -> int:
        return self._metrics.server_port

    async def stop(self) -> None:
        """After the engine thread has ended."""
        await self.server.stop()
        self._progress.close()
        self._metrics.shutdown()
        self._engine.shutdown()


async def _serve(
    orders: WorkerOrders, engine: Engine, prompts: PromptBuilder, clock: Clock, start: "_Start"
) -> int:
    parts = _Parts(orders, engine, prompts, clock, start)
    network = asyncio.get_running_loop()
    server, engine_thread = parts.server, parts.engine_thread
    engine_thread.start()
    try:
        await server.start(Path(orders.socket), parts.loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            network.add_signal_handler(number, server.drain)
        parent = network.create_task(_parent_gone() if orders.is_child else _for_ever())
        _say(Ready(pid=os.getpid(), metrics_port=parts.metrics_port, resident_bytes=_resident_bytes()))
        await _first_of(engine_thread.ended, server.drained, parent)
        parent.cancel()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            network.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # it is ending; a second request to do so says nothing new
        parts.loop.stop()
        await asyncio.to_thread(engine_thread.join, ENGINE_STOP_SECONDS_MAX)
        if engine_thread.is_alive():
            # Nothing can interrupt it. What it has computed is in the progress file, for whoever comes next.
            _log.error("engine_hangs", waited_s=ENGINE_STOP_SECONDS_MAX)
            os._exit(1)
        await parts.stop()
    _log.info("worker_stopped", status=engine_thread.status)
    return engine_thread.status


class _EngineThread(threading.Thread):
    """Runs the loop. However it ends, the process ends with it: a worker that cannot compute is no use."""

    def __init__(self, loop: EngineLoop, network: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="engine")
        self._loop = loop
        self._network = network
        self.ended = asyncio.Event()
        self.status = 1
        """Exit status of the process; 0 once the loop has been stopped in order."""

    def run(self) -> None:
        try:
            self._loop.run()
            self.status = 0
        except EngineFault as fault:
            _log.error("engine_given_up", error=str(fault))
        except OSError as error:
            _log.error("progress_file_failed", error=str(error))
        finally:
            self._network.call_soon_threadsafe(self.ended.set)


async def _first_of(*things: asyncio.Event | asyncio.Task[None]) -> None:
    """Return when one of them has happened."""
    tasks = [one if isinstance(one, asyncio.Task) else asyncio.create_task(_wait(one)) for one in things]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _parent_gone() -> None:
    """Return at the end of standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.read(4096):
        pass


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _warm_up(engine: Engine) -> tuple[int, float]:
    """Run every shape once, so that no client pays for first-time allocations and page faults.

    Returns how many tokens of a prompt were computed, and in how many seconds once everything was warm.
    """
    info = engine.info
    token = next(one for one in range(info.vocabulary) if not engine.vocabulary.is_end(one))
    length = min(64, info.request_tokens_max // 2, info.batch_tokens)
    rows = min(info.sequences, info.batch_tokens, info.kv_tokens - length)
    for slot in range(rows):
        engine.open(slot, Sampling(temperature=0.0))
    engine.forward([Span(0, 0, [token] * length, True)])
    engine.forward([Span(slot, length if slot == 0 else 0, [token], True) for slot in range(rows)])
    for slot in range(rows):
        engine.close(slot)
    engine.open(0, Sampling(temperature=0.0))
    done = engine.forward([Span(0, 0, [token] * length, True)])
    engine.close(0)
    return length, done.compute_s


def _step_limits(settings: EngineSettings, engine: Engine) -> StepLimits:
    return StepLimits(
        batch_tokens_max=settings.max_batch_tokens,
        target_step_ms=settings.target_step_ms,
        idle_step_ms=max(settings.idle_step_ms, settings.target_step_ms),
        grain=engine.info.portion_grain,
        context_cost=engine.info.context_cost,
    )


def _parking(orders: WorkerOrders, engine: Engine) -> Parking | None:
    settings = orders.engine
    if not settings.parking_mib or not settings.prefix_cache:
        return None
    return Parking(
        Path(orders.parking), state_key=engine.info.state_key, bytes_max=settings.parking_mib * MIB
    )


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {path} cannot be read: {error}") from None


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _say(message: Ready | Failed) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more; standard input says so as well
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()
