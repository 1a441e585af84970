"""Who is next among some lanes: the lowest that may start, or one close to it whose prefix is warm."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from headrace.scheduling.jobs import Job
from headrace.scheduling.lanes import Lane, Row
from headrace.scheduling.lazy_heap import Entry

Ticket = TypeVar("Ticket", bound=Hashable)
MayStart = Callable[[Ticket], bool]


class Found:
    """Rows that were taken out of their lanes while looking, to be put back where they were."""

    def __init__(self) -> None:
        self._taken: list[tuple[Lane[Any], Entry]] = []

    def take(self, lane: Lane[Any]) -> Row[Any]:
        entry = lane.order.take()
        assert entry is not None
        self._taken.append((lane, entry))
        row: Row[Any] = entry[3]
        return row

    def restore(self) -> None:
        for lane, entry in self._taken:
            lane.order.restore(entry)


def first(
    lanes: Sequence[Lane[Ticket]],
    *,
    may_start: MayStart[Ticket] | None,
    is_warm: Callable[[Job[Ticket]], bool] | None = None,
    quantum: float = 0.0,
    candidates_max: int = 0,
) -> Job[Ticket] | None:
    """The job to grant, or None if none may start. Looks only; changes nothing. May ask about one twice.

    With `is_warm` the ranks must be counters: of the tenants at most `quantum` above the lowest that may
    start, the first of `candidates_max` whose next job is warm goes first.
    """
    if is_warm is None or quantum <= 0:
        lane = _lowest(lanes)
        row = None if lane is None else lane.order.peek()
        job = None if row is None else row.first()
        # Nearly always the very first may start, and nothing has to be taken out to see further.
        if job is None or may_start is None or may_start(job.ticket):
            return job
    found = Found()
    try:
        candidates = _startable(lanes, found, may_start)
        best = next(candidates, None)
        if best is None or is_warm is None or quantum <= 0 or is_warm(best):
            return best
        limit = best.counter.value + quantum
        for _ in range(candidates_max - 1):
            other = next(candidates, None)
            if other is None or other.counter.value > limit:
                break
            if is_warm(other):
                return other
        return best
    finally:
        found.restore()


def first_of_each(
    lanes: Sequence[Lane[Ticket]], *, may_start: MayStart[Ticket] | None, tenants_max: int
) -> list[Job[Ticket]]:
    """Of each of the first tenants the first job that may start, next one first. Looks only; changes nothing.

    `tenants_max` counts those without such a job, too, and a tenant once for each of its lanes.
    """
    jobs: list[Job[Ticket]] = []
    found = Found()
    try:
        for _ in range(tenants_max):
            lane = _lowest(lanes)
            if lane is None:
                break
            job = _first_of(found.take(lane), may_start)
            if job is not None:
                jobs.append(job)
    finally:
        found.restore()
    return jobs


def _startable(
    lanes: Sequence[Lane[Ticket]], found: Found, may_start: MayStart[Ticket] | None
) -> Iterator[Job[Ticket]]:
    """For each tenant with a job that may start, its first one; tenants in order, over all lanes together."""
    while True:
        best = _lowest(lanes)
        if best is None:
            return
        job = _first_of(found.take(best), may_start)
        if job is not None:
            yield job


def _lowest(lanes: Sequence[Lane[Ticket]]) -> Lane[Ticket] | None:
    """The lane whose first row is the first of all."""
    if len(lanes) == 1:
        return lanes[0] if len(lanes[0].order) else None
    best: Lane[Ticket] | None = None
    best_key: Any = None
    for lane in lanes:
        if len(lane.order):
            key = lane.order.key()
            if best is None or key < best_key:
                best, best_key = lane, key
    return best


def _first_of(row: Row[Ticket], may_start: MayStart[Ticket] | None) -> Job[Ticket] | None:
    for flow in row.in_order():
        job = flow.first()
        if may_start is None or may_start(job.ticket):
            return job
    return None
