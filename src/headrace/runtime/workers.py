"""Keeps the embedded workers running: start, watch, read what a dead one left, start again."""

import asyncio
import contextlib
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from headrace.clock import Clock
from headrace.config.settings import BUILTIN_MODEL, BUILTIN_PATH, ModelSettings, Settings
from headrace.core.core import Core
from headrace.core.embedded import EmbeddedReplica
from headrace.core.messages import WorkerView
from headrace.engine.loading import PROCESS_ENVIRONMENT
from headrace.errors import ProtocolError, SetupError
from headrace.runtime.child import Child, ChildDied
from headrace.store.errors import StoreUnavailable
from headrace.worker.link import WorkerLink
from headrace.worker.process import Failed, Ready, WorkerOrders
from headrace.worker.progress import read_records

RESTART_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the first, second, … restart in a row."""
DOWN_SECONDS = 10.0
"""A worker that was ready once, and then says that it cannot start like this, is tried again after so long: somebody may
have put right what it lacked."""
START_ATTEMPTS_MAX = 3
"""A worker that has never been ready is given up after so many tries."""
STABLE_SECONDS = 60.0
"""A worker that ran so long starts the row anew."""
HELLO_SECONDS_MAX = 10.0
STOP_SECONDS = 5.0
CHECK_SECONDS = 1.0
HEARTBEAT_SECONDS_MAX = 15.0
"""A worker's network thread that is silent for longer is taken for dead."""

PROGRESS_SUFFIX = ".progress"

_log = structlog.get_logger()
_answer = msgspec.json.Decoder(Ready | Failed).decode


class StartChild(Protocol):
    """How a child process is started: `Child.start`, or a simulation's own."""

    async def __call__(
        self, role: str, orders: bytes, *, environment: dict[str, str] | None = None
    ) -> Child: ...


class Worker:
    """One supervised worker: a name that lives on while processes come and go."""

    def __init__(
        self,
        *,
        worker_id: str,
        model: ModelSettings,
        model_path: Path | None,
        settings: Settings,
        core: Core,
        clock: Clock,
        sockets: Path,
        data: Path,
        start_child: StartChild = Child.start,
    ) -> None:
        self.worker_id = worker_id
        self._start_child = start_child
        self._model = model
        self._model_path = model_path
        self._settings = settings
        self._core = core
        self._clock = clock
        self._sockets = sockets
        self._data = data
        self._life = 0
        self._oldest_life = 1
        """The first one whose progress file may still be there."""
        self._child: Child | None = None
        self._replica: EmbeddedReplica | None = None
        self._is_stopping = False
        self._failures = 0
        self._status = "starting"
        self._last_error: str | None = None
        self._ready: Ready | None = None
        self._ready_ts: int | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has been ready for the first time; fails if it never can be."""
        self._core.expect_replica(model.id, self._replica_id(1))

    async def run(self) -> None:
        """Run one process after the other until stopped, or until the first one says that none can work."""
        while not self._is_stopping:
            began_us = self._clock.monotonic_us()
            is_final = await self._live()
            if self._is_stopping:
                break
            lived_s = (self._clock.monotonic_us() - began_us) / 1e6
            self._failures = 1 if lived_s > STABLE_SECONDS else self._failures + 1
            if not self.started.done() and self._failures >= START_ATTEMPTS_MAX:
                self.started.set_exception(SetupError(f"worker {self.worker_id}: {self._last_error}"))
            if self.started.done() and (self.started.cancelled() or self.started.exception() is not None):
                break
            if is_final:
                self._status = "down"
                _log.error("worker_down", worker=self.worker_id, pause_s=DOWN_SECONDS, error=self._last_error)
                await asyncio.sleep(DOWN_SECONDS)
                continue
            self._status = "starting"
            pause_s = RESTART_SECONDS[min(self._failures - 1, len(RESTART_SECONDS) - 1)]
            _log.warning("worker_restarts", worker=self.worker_id, pause_s=pause_s, error=self._last_error)
            await asyncio.sleep(pause_s)
        self._status = "down"

    async def drain(self, timeout_s: float) -> None:
        """Let running attempts finish, then stop the process."""
        self._is_stopping = True
        self._status = "draining"
        if self._child is not None:
            await self._child.stop(timeout_s)

    def kill(self) -> None:
        """Stop at once; what it was doing is settled from its progress file."""
        self._is_stopping = True
        if self._child is not None:
            self._child.kill()

    def view(self) -> WorkerView:
        engine = None if self._replica is None else msgspec.to_builtins(self._replica.engine)
        metrics_url = None
        if self._ready is not None:
            metrics_url = f"http://{self._settings.metrics_host}:{self._ready.metrics_port}/metrics"
        return WorkerView(
            id=self.worker_id,
            model=self._model.id,
            kind="embedded",
            status=self._status,
            address=str(self._socket()),
            pid=self._child.pid if self._child and not self._child.has_ended else None,
            slots=self._model.engine.max_batch_size,
            running=self._core.running_on(self._model.id, self._replica_id(self._life)),
            restarts=max(0, self._life - 1),
            ready_ts=self._ready_ts,
            last_error=self._last_error,
            metrics_url=metrics_url,
            engine=engine,
        )

    async def _live(self) -> bool:
        """One process from start to end. True if there is no use in starting another."""
        self._life += 1
        self._progress(self._life).parent.mkdir(exist_ok=True)  # somebody may have cleaned up
        replica_id = self._replica_id(self._life)
        child = self._child = await self._start_child(
            "worker", msgspec.json.encode(self._orders()), environment=PROCESS_ENVIRONMENT
        )
        link: WorkerLink | None = None
        is_final = False
        try:
            link = await self._connect(child, replica_id)
            await self._watch(child, link)
        except _FailedForGood as failure:
            is_final = True
            self._last_error = str(failure)
            if not self.started.done():
                self.started.set_exception(SetupError(f"worker {self.worker_id}: {failure}"))
        except TimeoutError:
            self._last_error = "the process hung while it was starting"
        except (ChildDied, OSError, ProtocolError, msgspec.DecodeError) as error:
            self._last_error = str(error)
        finally:
            self._replica = None
            self._ready = None
            self._ready_ts = None
            # A worker that was told to stop ends by itself, right after its connection.
            status = await child.stop(STOP_SECONDS) if self._is_stopping else await child.end()
            self._core.remove_replica(self._model.id, replica_id, successor_id=self._successor(is_final))
            self._hand_in(link)
            _log.info("worker_ended", worker=self.worker_id, pid=child.pid, status=status)
        if self._last_error is None or link is not None:
            self._last_error = f"the process ended with status {status}"
        return is_final

    async def _connect(self, child: Child, replica_id: str) -> WorkerLink:
        async with asyncio.timeout(self._settings.worker_start_timeout_s):
            answer = _answer(await child.answer())
        if isinstance(answer, Failed):
            if answer.is_final:
                raise _FailedForGood(answer.message)
            raise ProtocolError(answer.message)
        async with asyncio.timeout(HELLO_SECONDS_MAX):
            link, hello = await WorkerLink.connect(self._socket(), self._clock)
        self._replica = EmbeddedReplica(
            replica_id=replica_id,
            worker_id=self.worker_id,
            link=link,
            hello=hello,
            settings=self._model.engine,
        )
        self._ready = answer
        self._ready_ts = self._clock.wall_us()
        self._status = "ready"
        self._last_error = None
        _log.info(
            "worker_ready",
            worker=self.worker_id,
            pid=child.pid,
            load_ms=hello.load_us // 1000,
            warm_up_ms=hello.warm_up_us // 1000,
            resident_mb=answer.resident_bytes // 1_000_000,
        )
        self._core.add_replica(
            self._model.id, self._replica, capacity=hello.engine.sequences, sessions=hello.sessions
        )
        if not self.started.done():
            self.started.set_result(None)
        return link

    async def _watch(self, child: Child, link: WorkerLink) -> None:
        """Return when the process has ended, its connection is lost, or it is stuck."""
        ended = asyncio.ensure_future(child.wait())
        lost = asyncio.ensure_future(link.lost.wait())
        try:
            while True:
                done, _ = await asyncio.wait(
                    (ended, lost), timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    return
                if link.is_stuck(
                    step_s_max=self._settings.worker_step_timeout_s, silence_s_max=HEARTBEAT_SECONDS_MAX
                ):
                    _log.error("worker_stuck", worker=self.worker_id, pid=child.pid)
                    return
        finally:
            ended.cancel()
            lost.cancel()

    def _hand_in(self, link: WorkerLink | None) -> None:
        """Settle what the dead process was doing from what it noted."""
        if link is not None:
            link.break_off()
            link.deliver(read_records(self._progress(self._life)))
        self._socket().unlink(missing_ok=True)
        self._core.spawn(self._remove_files(self._life - 1))

    async def _remove_files(self, last_life: int) -> None:
        """Remove the files of lives up to this one, as far as the ledger has all they say.

        Should the server die before that, its next start reads them again. An operation may stay open long
        after its worker's death, for example while its client takes in slowly what there is of the answer.
        """
        journal = self._core.journal
        is_open = {reservation.request_id for reservation in journal.open_reservations()}
        with contextlib.suppress(StoreUnavailable):
            await journal.flush()
            for life in range(self._oldest_life, last_life + 1):
                file = self._progress(life)
                if any(record.attempt_id.rpartition(".")[0] in is_open for record in read_records(file)):
                    return
                file.unlink(missing_ok=True)
                self._oldest_life = life + 1

    def _successor(self, is_final: bool) -> str | None:
        return None if is_final or self._is_stopping else self._replica_id(self._life + 1)

    def _orders(self) -> WorkerOrders:
        settings = self._settings
        return WorkerOrders(
            worker_id=self.worker_id,
            model_path=str(self._model_path) if self._model_path else None,
            engine=self._model.engine,
            socket=str(self._socket()),
            progress=str(self._progress(self._life)),
            parking=str(self._data / "kv" / self.worker_id.replace("/", "_")),
            cache=str(self._data / "models"),
            metrics_host=settings.metrics_host,
            drain_s=settings.drain_s,
            log_level=settings.log.level,
            log_format=settings.log.format,
        )

    def _replica_id(self, life: int) -> str:
        return f"{self.worker_id}.{life}"

    def _socket(self) -> Path:
        return self._sockets / f"w{self._life}-{self.worker_id[-40:].replace('/', '_')}.sock"

    def _progress(self, life: int) -> Path:
        return self._data / "progress" / f"{self.worker_id.replace('/', '_')}.{life}{PROGRESS_SUFFIX}"


class _FailedForGood(Exception):
    """The worker said that starting it again cannot help."""


def model_path(model: ModelSettings, builtin: Path) -> Path | None:
    """The file a model's workers load; None for a stub."""
    if model.engine.stub is not None:
        return None
    assert model.path is not None
    return builtin if model.path == BUILTIN_PATH else Path(model.path)


def default_model() -> ModelSettings:
    """What is served when nothing else is set."""
    return ModelSettings(id=BUILTIN_MODEL, path=BUILTIN_PATH)
