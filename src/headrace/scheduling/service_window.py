"""What each tenant got of a model lately, and how evenly those who wanted more were served. Pure.

Service is cost (`TokenPrices`) of what was computed: of requests that ended as they were settled, of those that run as far
as they are. It is looked at about once a second; between two looks lies one slice of the window.

How even: the Jain index over the tenants that had something waiting at both ends of a slice, so for those slices asked
for more than they got; of each its service by weight in a second of them. Who asks for little is served in full and says
nothing about fairness. A tenant counts once it has wanted more for `BACKLOG_US_MIN` of the window.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.scheduling.fairness import jain_index

WINDOW_US: Final = 60_000_000
BACKLOG_US_MIN: Final = 5_000_000
SLICE_US_MIN: Final = 900_000
"""Looks that come sooner after the last one are left out."""
SLICE_US_MAX: Final = 5_000_000
"""After a longer time between two looks nobody knows who waited meanwhile."""
FLOWS_MAX: Final = 10_000
"""Tenants whose service is remembered. Of more, those that come first count."""


class _Slice(msgspec.Struct, frozen=True, gc=False):
    """From one look to the next."""

    end_us: int
    length_us: int
    service: dict[str, float]
    """Cost, by flow."""
    wanting: dict[str, float]
    """Weight of each flow that had requests waiting at both ends."""


class ServiceWindow:
    """The last minute of one model. A flow is a tenant, or several that share a queue."""

    def __init__(self) -> None:
        self._settled: dict[str, float] = {}
        """Cost settled since the last look."""
        self._running: dict[str, float] = {}
        """Cost of what ran at the last look, as far as it was."""
        self._waiting: dict[str, float] = {}
        self._looked_us = 0
        self._slices: deque[_Slice] = deque()

    def settled(self, flow: str, cost: float) -> None:
        """A request has ended and did cost so much."""
        settled = self._settled
        before = settled.get(flow)
        if before is not None:
            settled[flow] = before + cost
        elif len(settled) < FLOWS_MAX:
            settled[flow] = cost

    def look(self, now_us: int, *, running: Mapping[str, float], waiting: Mapping[str, float]) -> None:
        """Once a second. `running`: cost so far of what runs, by flow; `waiting`: weights of who has requests waiting."""
        length_us = now_us - self._looked_us
        if length_us < SLICE_US_MIN:
            return
        is_known = length_us <= SLICE_US_MAX
        flows = {*self._settled, *running, *self._running}
        # One that was stopped and waits takes away here what it brings back when it goes on.
        service = {
            flow: cost
            for flow in flows
            if (cost := self._settled.get(flow, 0.0) + running.get(flow, 0.0) - self._running.get(flow, 0.0))
        }
        wanting = {flow: weight for flow, weight in waiting.items() if flow in self._waiting}
        self._slices.append(_Slice(now_us, length_us, service, wanting if is_known else {}))
        while self._slices[0].end_us <= now_us - WINDOW_US:
            self._slices.popleft()
        self._settled = {}
        self._running = dict(running)
        self._waiting = dict(waiting)
        self._looked_us = now_us

    def received(self, now_us: int) -> dict[str, float]:
        """Cost of what each flow got in the last minute, up to the last look."""
        total: dict[str, float] = {}
        for one in self._slices:
            if one.end_us > now_us - WINDOW_US:
                for flow, cost in one.service.items():
                    total[flow] = total.get(flow, 0.0) + cost
        return {flow: cost for flow, cost in total.items() if cost > 0}

    def received_by(self, flow: str, now_us: int) -> float:
        """Cost of what one flow got in the last minute, up to the last look."""
        slices = (one for one in self._slices if one.end_us > now_us - WINDOW_US)
        return max(0.0, sum(one.service.get(flow, 0.0) for one in slices))

    def jain(self, now_us: int) -> float:
        """1 if all who wanted more got service in proportion to their weights, 1/n if one of n got everything; 1 also
        where fewer than two wanted more. May be asked from another thread."""
        wanted_us: dict[str, int] = {}
        got: dict[str, float] = {}
        for one in list(self._slices):  # a copy is one step for the interpreter: another thread may ask
            if one.end_us <= now_us - WINDOW_US:
                continue
            for flow, weight in one.wanting.items():
                wanted_us[flow] = wanted_us.get(flow, 0) + one.length_us
                got[flow] = got.get(flow, 0.0) + one.service.get(flow, 0.0) / weight
        return jain_index(
            max(0.0, got[flow]) / length_us
            for flow, length_us in wanted_us.items()
            if length_us >= BACKLOG_US_MIN
        )
