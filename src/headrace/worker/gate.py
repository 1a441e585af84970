"""Who of the waiting attempts may get a slot now: the difference between continuous and static batching.

The engine loop reports who comes and who leaves, and asks. Whoever is let in is so for good: an attempt that goes back
to the queue before it has left the loop is let in again.
"""

from typing import Protocol

from headrace.config.settings import EngineSettings
from headrace.scheduling.static_batch import BatchLimits, Member, StaticBatcher
from headrace.worker.sequence import Sequence
from headrace.worker.stats import StepStats


class Gate(Protocol):
    """Belongs to the engine thread. Times in microseconds of the monotonic clock."""

    can_preempt: bool
    """Whether one that has left its slot before its end may wait for another."""

    def arrived(self, one: Sequence) -> None:
        """An attempt waits from now on."""

    def left(self, one: Sequence) -> None:
        """An attempt is over, wherever it was."""

    def turn(self, now_us: int) -> None:
        """A step begins."""

    def lets_in(self, one: Sequence) -> bool:
        """Whether this one may get a slot in this step. Asked in order of arrival; the first no holds for all behind."""
        ...

    def opens_us(self) -> int | None:
        """When somebody is let in, should nobody come or leave; None: there is nobody for whom to wait."""
        ...

    def adjust(self, *, wait_ms: float | None, tokens_max: int, size_max: int) -> None:
        """Work by these from now on. `wait_ms` None: the window that was configured."""

    def hurry(self) -> None:
        """Nobody comes any more: wait for nobody."""


class ContinuousGate:
    """Lets everybody in, but for a wait after idle time, so that the first step has company."""

    can_preempt = True

    def __init__(self, *, wait_ms: float = 0.0) -> None:
        self._configured_ms = self._wait_ms = wait_ms
        self._num_here = 0
        self._opens_us: int | None = None
        """Closed until then; None while it is open."""
        self._is_hurrying = False

    def arrived(self, one: Sequence) -> None:
        self._num_here += 1
        if self._num_here > 1 and self._opens_us is None:
            return
        wait_ms = self._wait_ms if one.batch_wait_ms is None else one.batch_wait_ms
        ends_us = one.arrived_us + (0 if self._is_hurrying else _us(wait_ms))
        self._opens_us = ends_us if self._opens_us is None else min(self._opens_us, ends_us)

    def left(self, one: Sequence) -> None:
        self._num_here -= 1
        if not self._num_here:
            self._opens_us = None

    def turn(self, now_us: int) -> None:
        if self._opens_us is not None and now_us >= self._opens_us:
            self._opens_us = None

    def lets_in(self, one: Sequence) -> bool:
        return self._opens_us is None

    def opens_us(self) -> int | None:
        return self._opens_us

    def adjust(self, *, wait_ms: float | None, tokens_max: int, size_max: int) -> None:
        self._wait_ms = self._configured_ms if wait_ms is None else wait_ms

    def hurry(self) -> None:
        self._is_hurrying = True
        self._opens_us = None


class StaticGate:
    """Lets a whole batch in at once, and nobody else before all of it has left. The next is collected meanwhile."""

    can_preempt = False

    def __init__(self, limits: BatchLimits, *, wait_ms: float, stats: StepStats) -> None:
        self._configured_ms = wait_ms
        self._alpha = limits.alpha
        self._stats = stats
        self._collected = StaticBatcher(limits, wait_us=_us(wait_ms))
        self._running: set[str] = set()
        """Of the batch that was let in, those that have not left yet."""

    def arrived(self, one: Sequence) -> None:
        self._collected.add(
            Member(
                key=one.attempt_id,
                prompt_tokens=len(one.prompt),
                output_tokens_max=one.max_tokens,
                arrived_us=one.arrived_us,
                wait_us=None if one.batch_wait_ms is None else _us(one.batch_wait_ms),
            )
        )

    def left(self, one: Sequence) -> None:
        if one.attempt_id in self._running:
            self._running.remove(one.attempt_id)
        else:
            self._collected.remove(one.attempt_id)

    def turn(self, now_us: int) -> None:
        if self._running:
            return
        batch = self._collected.take(now_us)
        if batch is not None:
            assert batch.reason is not None
            self._running.update(member.key for member in batch.members)
            self._stats.flushed(batch.reason)

    def lets_in(self, one: Sequence) -> bool:
        return one.attempt_id in self._running

    def opens_us(self) -> int | None:
        return None if self._running else self._collected.due_us()

    def adjust(self, *, wait_ms: float | None, tokens_max: int, size_max: int) -> None:
        self._collected.set_wait(_us(self._configured_ms if wait_ms is None else wait_ms))
        self._collected.set_limits(BatchLimits(tokens_max=tokens_max, size_max=size_max, alpha=self._alpha))

    def hurry(self) -> None:
        self._collected.hurry()


def gate_for(settings: EngineSettings, stats: StepStats) -> Gate:
    """The gate that an engine's settings ask for."""
    if settings.batching == "continuous":
        return ContinuousGate(wait_ms=settings.batch_wait_ms)
    limits = BatchLimits(
        tokens_max=settings.max_batch_tokens,
        size_max=settings.max_batch_size,
        alpha=settings.batch_cost_alpha,
    )
    return StaticGate(limits, wait_ms=settings.batch_wait_ms, stats=stats)


def _us(milliseconds: float) -> int:
    return round(milliseconds * 1000)
