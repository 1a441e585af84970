"""Refusals on their way into the ledger: recorded without being waited for, summed up when there are many."""

import asyncio

from headrace.clock import Clock
from headrace.core.metrics import CoreMetrics
from headrace.errors import Refusal
from headrace.ledger.closing import NOTHING, close, ending_of
from headrace.ledger.records import Reservation
from headrace.ledger.refusals import RefusalSummary
from headrace.store.journal import Journal

FLUSH_SECONDS = 1.0


class RefusalLog:
    """What was refused before it held anything."""

    def __init__(self, journal: Journal, clock: Clock, metrics: CoreMetrics, *, per_s: int) -> None:
        self._journal = journal
        self._clock = clock
        self._metrics = metrics
        self._sums = RefusalSummary(singles_per_s=per_s)
        self._timer: asyncio.TimerHandle | None = None

    def record(self, reservation: Reservation, refusal: Refusal) -> None:
        """Note a refusal; beyond a rate it becomes part of a sum that is written a second later."""
        record = close(reservation, ending_of(refusal), NOTHING, worker_id=None, end_ts=self._clock.wall_us())
        self._metrics.settled(record)
        if self._sums.take(record, self._clock.monotonic_us()):
            self._journal.refuse(record)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def stop(self) -> None:
        """Write what is still summed up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for record in self._sums.drain():
            self._journal.refuse(record)

    def _flush(self) -> None:
        self._timer = None
        for record in self._sums.due(self._clock.monotonic_us()):
            self._journal.refuse(record)
        if self._sums.num_sums:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
