"""A simulated worker process: the production parts of `headrace.worker.process`, without a process.

The engine thread is a task: it makes a step at once and then lets the time pass that the step took. What
the step said leaves when that time has passed.
"""

import asyncio
import contextlib
import os
import random
import signal
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from headrace.engine.stub import StubVocabulary
from headrace.errors import EngineFault
from headrace.runtime.child import Child
from headrace.scheduling.steps import StepLimits
from headrace.worker.gate import gate_for
from headrace.worker.loop import LoopNews
from headrace.worker.process import ENGINE_STOP_SECONDS_MAX, Failed, Ready, WorkerOrders
from headrace.worker.prompt import PromptBuilder
from headrace.worker.server import WorkerServer
from headrace.worker.stats import StepStats
from tests.simulation.observed import Died, DyingProgressFile, ObservedEngine, ObservedLoop
from tests.simulation.virtual_loop import Process, VirtualClock

PREEMPTIONS_PER_STEP = 0.03
"""How often a worker is told to put one of its attempts aside for a while."""


class SimulatedWorker:
    """One life. It looks to `headrace.runtime.child.Child` like an `asyncio.subprocess.Process`."""

    def __init__(self, world: Any, orders: WorkerOrders) -> None:
        self.orders = orders
        self.name = Path(orders.progress).stem
        self.returncode: int | None = None
        self.pid = world.next_pid()
        self.stdin = None
        self.stdout = self
        self.slowness = 1.0
        self.engine: ObservedEngine | None = None
        self._world = world
        self._line: asyncio.Future[bytes] = world.loop.create_future()
        self._exit: asyncio.Future[int] = world.loop.create_future()
        self._process = Process(world.loop, self.name)
        self._server: WorkerServer | None = None
        self._engine_loop: ObservedLoop | None = None
        self.progress: DyingProgressFile | None = None
        self._is_work_waiting = asyncio.Event()
        self._parent_gone = asyncio.Event()
        self._muted: dict[str, None] = {}
        self._clock = VirtualClock(world.loop)
        self._process.spawn(self._main())

    # --- what a parent process can do -----------------------------------------------------------

    async def readline(self) -> bytes:
        return await asyncio.shield(self._line)

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    def send_signal(self, number: signal.Signals) -> None:
        self._world.note("signal", self.name, number.name)
        if number == signal.SIGKILL:
            self.kill()
        elif self._server is not None:
            self._world.loop.call_soon(self._server.drain, context=self._process.context.copy())

    def mute(self) -> str | None:
        """Let the network thread forget an attempt that the engine goes on with. Which one; None if none is here."""
        if self._server is None or not self._server._attempts:
            return None
        attempt_id = self._world.rng.choice(list(self._server._attempts))
        del self._server._attempts[attempt_id]
        self._muted[attempt_id] = None
        self._world.truth.finished(attempt_id)  # nobody can count it any more
        return attempt_id

    def parent_gone(self) -> None:
        """The end of standard input."""
        self._parent_gone.set()

    # --- life and death ---------------------------------------------------------------------------

    def kill(self) -> None:
        """`kill -9`: the kernel closes its files and connections, nothing else happens."""
        if self.returncode is not None:
            return
        self._process.kill()
        self._world.network.lose(self._process)
        self.let_go()
        self._ended(-9)

    def let_go(self) -> None:
        """What the kernel does with a dead process's files."""
        if self.progress is not None and self.progress._file >= 0:
            os.close(self.progress._file)
            self.progress._file = -1

    def _ended(self, status: int) -> None:
        self._world.note("worker ended", self.name, status)
        self.returncode = status
        if self._engine_loop is not None:
            for attempt_id in self._engine_loop.here:
                self._world.truth.finished(attempt_id)
        if not self._line.done():
            self._line.set_result(b"")
        self._exit.set_result(status)
        self._world.workers.remove(self)

    async def _main(self) -> None:
        rng = self._world.rng
        await asyncio.sleep(rng.uniform(0.02, 0.3))
        if rng.random() < self._world.scenario.bad_starts:
            if rng.random() < 0.5:
                self._say(Failed(kind="EngineFault", message="out of luck", is_final=False))
            self._leave(2)
            return
        orders = self.orders
        engine = self.engine = ObservedEngine(orders.engine, sleep=self._pass_time)
        engine.observe(self._world.truth)
        registry = CollectorRegistry()
        stats = StepStats(registry, kv_bytes_per_token=engine.info.kv_bytes_per_token)
        try:
            self.progress = progress = DyingProgressFile(Path(orders.progress))
        except FileExistsError:  # an orphan of an earlier life was still loading; the supervisor tries again
            self._world.note("name taken", self.name)
            self._leave(1)
            return
        server = self._server = WorkerServer(
            worker_id=orders.worker_id,
            info=engine.info,
            prompts=prompts(),
            progress=progress,
            stats=stats,
            clock=VirtualClock(self._world.loop),
            load_us=0,
            warm_up_us=0,
        )
        loop = self._engine_loop = ObservedLoop(
            engine,
            limits=StepLimits(
                batch_tokens_max=orders.engine.max_batch_tokens,
                target_step_ms=orders.engine.target_step_ms,
                idle_step_ms=orders.engine.idle_step_ms,
            ),
            clock=self._clock,
            progress=progress,
            on_news=self._on_news,
            stats=stats,
            gate=gate_for(orders.engine, stats),
        )
        loop.truth = self._world.truth
        loop.here = {}
        loop.on_work = self._is_work_waiting.set
        engine_thread = asyncio.ensure_future(self._engine_thread(loop, stats))
        await server.start(Path(orders.socket), loop)
        self._say(Ready(pid=self.pid, metrics_port=1, resident_bytes=1))
        ends = [
            engine_thread,
            asyncio.ensure_future(server.drained.wait()),
            asyncio.ensure_future(self._parent_gone.wait()),
        ]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        loop.stop()
        await asyncio.wait((engine_thread,), timeout=ENGINE_STOP_SECONDS_MAX)
        if not engine_thread.done():
            self.kill()  # as `os._exit` has it
            return
        status = engine_thread.result()
        await server.stop()
        progress.close()
        progress._file = -1
        self._leave(status)

    def _leave(self, status: int) -> None:
        """The end of the process, once what it does now is done."""
        self._process.kill()
        self._world.network.lose(self._process)
        self._ended(status)

    def _say(self, message: Ready | Failed) -> None:
        self._line.set_result(msgspec.json.encode(message) + b"\n")

    # --- the engine thread --------------------------------------------------------------------------

    async def _engine_thread(self, loop: ObservedLoop, stats: StepStats) -> int:
        clock = self._clock
        # Of its own, so that the world's misfortunes stay what they are.
        rng = random.Random(self.name)
        try:
            while not loop._is_stopping:
                began_us = clock.monotonic_us()
                if loop.here and rng.random() < PREEMPTIONS_PER_STEP:
                    attempt_id = rng.choice(list(loop.here))
                    self._world.note("preempted", self.name, attempt_id)
                    loop.preempt(attempt_id)
                    self._world.loop.call_later(rng.uniform(0, 0.3), loop.resume, attempt_id)
                loop.step()
                spent_us, clock.offset_us = clock.offset_us, 0
                if spent_us:
                    self._world.note("step", self.name, loop.num_running, loop.num_waiting)
                    stats.step_began(began_us)  # for the heartbeat: it is still under way
                    await asyncio.sleep(spent_us / 1e6)
                    stats.step_began(0)
                idle_s = loop.idle_s()
                if idle_s != 0:
                    self._is_work_waiting.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._is_work_waiting.wait(), idle_s)
                elif not spent_us:
                    await asyncio.sleep(0)
            loop.run()  # it is stopping: ends what is still here
        except EngineFault:
            clock.offset_us = 0
            return 1
        except Died:
            assert self.engine is not None and self.progress is not None
            if self.progress.writes_left == 0:
                self.engine.is_unsure()
            self.kill()
            return -9
        return 0

    def _pass_time(self, seconds: float) -> None:
        self._clock.offset_us += round(seconds * 1e6 * self.slowness)

    def _on_news(self, news: LoopNews) -> None:
        """Told when the step has come so far; then the attempts that ended have left the worker."""
        assert self._server is not None
        assert self._engine_loop is not None
        muted = self._muted
        news.pieces = [one for one in news.pieces if one[1].attempt_id not in muted]
        for _, record in news.records:
            self._engine_loop.here.pop(record.attempt_id)
            self._world.truth.finished(record.attempt_id)
        news.records = [one for one in news.records if one[1].attempt_id not in muted]
        self._world.loop.call_later(self._clock.offset_us / 1e6, self._server.publish, news)


@lru_cache(1)
def prompts() -> PromptBuilder:
    """Compiling the template takes longer than many a world."""
    return PromptBuilder(StubVocabulary())


def child_of(worker: SimulatedWorker) -> Child:
    """The production wrapper around it."""
    return Child(worker)  # type: ignore[arg-type]
