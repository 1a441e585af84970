"""Batches for engines that cannot let anybody join: collect, then run to the end.

A request joins the open batch while it fits. Three things flush the batch, that is, close it so that it runs next: it
is full, somebody comes who does not fit (and opens the next one), or the wait window of one of its members ends. While
the engine is busy with the batch before, the end of a window flushes nothing: nobody would start sooner, and more can
join.

Two bounds in tokens hold, both against `tokens_max`. The prompts and one token for each member: what the engine
computes when it reads the batch in and then takes a first step. And the estimated cost, prompts and `alpha` times the
longest answers: what the batch will have computed at its end. Longest answers are rarely used up, so they count in part.
"""

from collections import deque
from typing import Literal

import msgspec

from headrace.bounds import BATCH_COST_ALPHA_MAX, BATCH_COST_ALPHA_MIN

FlushReason = Literal["full", "does_not_fit", "window"]


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one batch may hold."""

    tokens_max: int
    """Bounds the prompts with one token for each member, and the estimated cost."""
    size_max: int
    """Most members."""
    alpha: float
    """How much of a longest answer counts, 0.3 to 1."""

    def __post_init__(self) -> None:
        assert self.tokens_max >= 1 and self.size_max >= 1
        assert BATCH_COST_ALPHA_MIN <= self.alpha <= BATCH_COST_ALPHA_MAX


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a batch sees it. Sizes in tokens, times in microseconds."""

    key: str
    prompt_tokens: int
    output_tokens_max: int
    arrived_us: int
    wait_us: int | None = None
    """Its own wait window; None: the window of all."""


class Batch(msgspec.Struct, kw_only=True):
    """Members in order of arrival. `reason` is None while it is open."""

    members: list[Member]
    reason: FlushReason | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(member.prompt_tokens for member in self.members)

    @property
    def output_tokens_max(self) -> int:
        return sum(member.output_tokens_max for member in self.members)

    def estimated_cost(self, alpha: float) -> float:
        return self.prompt_tokens + alpha * self.output_tokens_max


class StaticBatcher:
    """Collects members into batches. Its caller asks for the next one whenever the engine is free.

    Holds what its caller has put in and not taken or removed: the bound is the caller's.
    """

    def __init__(self, limits: BatchLimits, *, wait_us: int) -> None:
        self._limits = limits
        self._wait_us = wait_us
        self._is_hurrying = False
        self._batches: deque[Batch] = deque()
        """In order; only the last one can be open, none is empty."""

    def __len__(self) -> int:
        return sum(len(batch.members) for batch in self._batches)

    def add(self, member: Member) -> None:
        """Join the open batch, or flush it and open the next. Whoever exceeds the bounds alone gets a batch alone."""
        batch = self._batches[-1] if self._batches else None
        if batch is None or batch.reason is not None:
            batch = self._open()
        elif not self._fits(batch, member.prompt_tokens, member.output_tokens_max):
            batch.reason = "does_not_fit"
            batch = self._open()
        batch.members.append(member)
        if not self._fits(batch, 1, 1):
            batch.reason = "full"  # not even the smallest request could join

    def remove(self, key: str) -> bool:
        """Take out somebody who gave up. False if nobody of that name waits here. What is flushed stays flushed."""
        for batch in self._batches:
            for at, member in enumerate(batch.members):
                if member.key == key:
                    del batch.members[at]
                    if not batch.members:
                        self._batches.remove(batch)
                    return True
        return False

    def take(self, now_us: int) -> Batch | None:
        """The batch to run now that the engine is free; None while its members still wait for company."""
        if not self._batches:
            return None
        batch = self._batches[0]
        if batch.reason is None:
            if now_us < self._window_end_us(batch):
                return None
            batch.reason = "window"
        return self._batches.popleft()

    def due_us(self) -> int | None:
        """From when on `take` gives a batch, should nobody come any more; None while nobody waits."""
        if not self._batches:
            return None
        batch = self._batches[0]
        return self._window_end_us(batch) if batch.reason is None else batch.members[0].arrived_us

    def set_wait(self, wait_us: int) -> None:
        """From now on, for those who wait already as well, unless they brought a window of their own."""
        self._wait_us = wait_us

    def hurry(self) -> None:
        """Nobody comes any more: from now on all windows are over."""
        self._is_hurrying = True

    def set_limits(self, limits: BatchLimits) -> None:
        """Sort those who wait into batches anew, in the same order."""
        if limits == self._limits:
            return
        self._limits = limits
        waiting = [member for batch in self._batches for member in batch.members]
        self._batches.clear()
        for member in waiting:
            self.add(member)

    def _open(self) -> Batch:
        batch = Batch(members=[])
        self._batches.append(batch)
        return batch

    def _fits(self, batch: Batch, prompt_tokens: int, output_tokens_max: int) -> bool:
        limits = self._limits
        prompts = batch.prompt_tokens + prompt_tokens
        cost = prompts + limits.alpha * (batch.output_tokens_max + output_tokens_max)
        num_members = len(batch.members) + 1
        return (
            num_members <= limits.size_max
            and prompts + num_members <= limits.tokens_max
            and cost <= limits.tokens_max
        )

    def _window_end_us(self, batch: Batch) -> int:
        """When the first of its members has waited long enough."""
        if self._is_hurrying:
            return batch.members[0].arrived_us
        return min(
            member.arrived_us + (self._wait_us if member.wait_us is None else member.wait_us)
            for member in batch.members
        )
