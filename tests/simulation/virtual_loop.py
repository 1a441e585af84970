"""An asyncio event loop on which time passes only when nothing is left to do at this moment.

It waits for nothing: as soon as no callback is ready, the clock jumps to the next timer. Everything that
asks for the loop's time, sleeps, sets timeouts or uses an executor runs unchanged, in virtual time.

A `Process` is what dies together. It is a context variable, so every callback, timer and task knows whose
it is; killing a process takes its callbacks out of the loop and lets none in again. Nothing of it is
cleaned up: no `finally`, no `close`, as `kill -9` has it.
"""

import asyncio
import contextlib
import contextvars
import inspect
import warnings
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Any

EXECUTOR_SECONDS = 0.0004
"""What a call in an executor takes."""
TURNS_MAX = 200_000
"""Turns of the loop without any time passing: something runs in circles."""

_current: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class Stalled(Exception):
    """Nothing is ready and no timer is set: whatever is awaited never comes."""


class Process:
    """A set of tasks, timers and callbacks that live and die together."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.is_alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.context = contextvars.copy_context()
        self.context.run(_current.set, self)
        self._loop = loop
        loop.processes.append(self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run this as a task of the process."""
        return self._loop.create_task(work, context=self.context.copy())

    def kill(self) -> None:
        """From here on nothing of it runs."""
        self.is_alive = False
        for handle in chain(self._loop._ready, self._loop._scheduled):  # type: ignore[attr-defined]
            if handle._context.get(_current) is self:
                handle.cancel()

    def bury(self) -> None:
        """After the world has ended: take its coroutines apart, so that they say nothing when collected."""
        self.is_alive = False
        for task in self.tasks:
            _take_apart(task)


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. It is its own selector."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._turns = 0
        self._selector = self
        self.processes: list[Process] = []
        self.world = Process(self, "world")
        self.on_error: Callable[[str], None] = _fail
        self.has_ended = False
        """The world is over; what still stirs is taken apart."""
        self.set_exception_handler(self._handle_exception)

    def time(self) -> float:
        return self._now_s

    def run_world(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to the end of `work`. What it leaves behind is buried."""
        try:
            self.run_until_complete(self.world.spawn(work))
        finally:
            self.has_ended = True
            self.on_error = _ignore
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for process in self.processes:
                    process.bury()
                self._ready.clear()  # type: ignore[attr-defined]
                self._scheduled.clear()  # type: ignore[attr-defined]
                self.close()

    def call_next(self, callback: Callable[[], None]) -> None:
        """Run this right after the callback that runs now, before any other that is ready."""
        handle = asyncio.Handle(callback, (), self, self.world.context)
        self._ready.appendleft(handle)  # type: ignore[attr-defined]

    # --- asyncio's side -------------------------------------------------------------------------

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stalled
        if timeout > 0:
            self._now_s = max(self._now_s, self._scheduled[0]._when)  # type: ignore[attr-defined]
            self._turns = 0
        else:
            self._turns += 1
            if self._turns > TURNS_MAX:
                raise Stalled
        return []

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""

    def close(self) -> None:
        self._selector = None  # type: ignore[assignment]
        super().close()

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if context is None:
            context = contextvars.copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        process = context.get(_current)
        if process is None or process.is_alive:
            self._ready.append(handle)  # type: ignore[attr-defined]
        else:
            handle.cancel()
        return handle

    call_soon_threadsafe = call_soon

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        if context is None:
            context = contextvars.copy_context()
        process = context.get(_current)
        timer = super().call_at(when, callback, *args, context=context)
        if process is not None and not process.is_alive:
            timer.cancel()
        return timer

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        process = _current.get() if context is None else context.get(_current)
        task = super().create_task(coro, **options)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(lambda done: process.tasks.pop(done, None))
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """On the loop itself, a little later."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(EXECUTOR_SECONDS, run)
        return future

    def _handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = context["message"]
        if message.startswith("Future exception was never"):
            return
        self.on_error(f"{message}: {context.get('exception')!r}")


def _fail(message: str) -> None:
    raise AssertionError(message)


def _ignore(message: str) -> None:
    """The world has ended."""


def _take_apart(task: asyncio.Task[Any]) -> None:
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    assert inspect.iscoroutine(coroutine)
    for _ in range(20):
        if inspect.getcoroutinestate(coroutine) in (inspect.CORO_CLOSED, inspect.CORO_RUNNING):
            return
        with contextlib.suppress(BaseException):
            coroutine.close()


class VirtualClock:
    """headrace's clock, read from the loop. `offset_us` is how far a step under way has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, epoch_us: int = 1_700_000_000_000_000) -> None:
        self._loop = loop
        self._epoch_us = epoch_us
        self.offset_us = 0

    def monotonic_us(self) -> int:
        return round(self._loop.time() * 1e6) + self.offset_us

    def wall_us(self) -> int:
        return self._epoch_us + self.monotonic_us()
