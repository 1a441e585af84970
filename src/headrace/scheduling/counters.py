"""The virtual counter of every tenant: what it was given, in cost, divided by its weight.

The tenant with the lowest counter is served next. A tenant that comes back from having nothing waiting is
lifted to the lowest counter of those who wait: it gets its share from now on and nothing for the time it
was away. It is never lowered: whoever had more than its share still has, however long it stays away.

A tenant without requests is remembered only while its counter is above what a newcomer would start with.
Forgetting raises that start (`base`) to the forgotten counter, so that nobody owes less for having been
forgotten.

After "Fairness in Serving Large Language Models" (OSDI 2024), with the expected output charged at the start.
"""

import heapq

from headrace.scheduling.lazy_heap import SLACK, Entry, LazyHeap


class TenantCounter:
    """One tenant's counter and how many of its requests there are."""

    __slots__ = (
        "entry",
        "has_changed",
        "idle_serial",
        "num_granted",
        "num_waiting",
        "tenant",
        "value",
        "weight",
    )

    def __init__(self, tenant: str, value: float, weight: float) -> None:
        self.tenant = tenant
        self.value = value
        self.weight = weight
        self.num_waiting = 0
        self.num_granted = 0
        self.entry: Entry | None = None
        """While it has requests waiting: in the order of those who have."""
        self.has_changed = False
        """Its place in that order is not up to date."""
        self.idle_serial = 0
        """While it is one of `IdleTenants`: which of their entries stands for it."""


class IdleTenants:
    """Counters of tenants without requests, lowest first, of equals who has been there for longest.

    Their values must not change. Who leaves leaves a dead entry behind; they are swept out when they outnumber the
    living.
    """

    __slots__ = ("_heap", "_length", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TenantCounter]] = []
        self._length = 0
        self._serial = 0

    def __len__(self) -> int:
        return self._length

    def add(self, counter: TenantCounter) -> None:
        self._serial += 1
        self._length += 1
        counter.idle_serial = self._serial
        heap = self._heap
        heapq.heappush(heap, (counter.value, self._serial, counter))
        if len(heap) > 2 * self._length + SLACK:
            self._heap = [entry for entry in heap if entry[2].idle_serial == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, counter: TenantCounter) -> None:
        if counter.idle_serial:
            counter.idle_serial = 0
            self._length -= 1

    def lowest(self) -> TenantCounter | None:
        heap = self._heap
        while heap:
            _, serial, counter = heap[0]
            if counter.idle_serial == serial:
                return counter
            heapq.heappop(heap)
        return None


class TenantCounters:
    """All tenants that have requests, or that had more than their share."""

    def __init__(self, *, idle_max: int) -> None:
        self.idle_max = idle_max
        self.base = 0.0
        """No newcomer starts below this: the highest counter that was ever forgotten."""
        self._last = 0.0
        """The start of a newcomer while nobody waits: the counter of the last one granted, before its charge."""
        self._last_counter: TenantCounter | None = None
        """Whose it was. Its open charges may turn out too high; then newcomers must not be held to them."""
        self._counters: dict[str, TenantCounter] = {}
        self._waiting: LazyHeap[TenantCounter] = LazyHeap()
        self._changed: set[TenantCounter] = set()
        """Waiting ones whose place in `_waiting` is not up to date: it is only needed when somebody comes or goes."""
        self._idle = IdleTenants()
        self.num_with_several = 0
        """Tenants with more than one granted request."""

    def __len__(self) -> int:
        return len(self._counters)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def get(self, tenant: str) -> TenantCounter | None:
        return self._counters.get(tenant)

    def all(self) -> list[TenantCounter]:
        """In no order. To read."""
        return list(self._counters.values())

    def waiting(self) -> list[TenantCounter]:
        """Those who have requests waiting, in no order."""
        return [counter for counter in self._counters.values() if counter.num_waiting]

    def start(self) -> float:
        """What a tenant that was never seen would start with now."""
        if self._changed:
            for counter in self._changed:
                counter.has_changed = False
                self._waiting.set(counter, counter.value)
            self._changed.clear()
        lowest: float = self._waiting.rank() if len(self._waiting) else self._last_start()
        return max(self.base, lowest)

    def enter(self, tenant: str, weight: float) -> TenantCounter:
        """A request of this tenant begins to wait."""
        counter = self._counters.get(tenant)
        if counter is None:
            counter = self._counters[tenant] = TenantCounter(tenant, self.start(), weight)
        elif counter.num_waiting == 0:
            counter.value = max(counter.value, self.start())
            self._idle.discard(counter)
        counter.weight = weight
        counter.num_waiting += 1
        if counter.num_waiting == 1:
            self._change(counter)
        return counter

    def leave(self, counter: TenantCounter) -> None:
        """A waiting request is gone without having been granted."""
        self._stop_waiting(counter)
        self._rest(counter)

    def grant(self, counter: TenantCounter, charge: float) -> None:
        """A waiting request starts. `charge` is in cost by weight."""
        if counter.value >= self._last_start():
            self._last, self._last_counter = counter.value, counter
        counter.value += charge
        counter.num_granted += 1
        if counter.num_granted == 2:
            self.num_with_several += 1
        self._stop_waiting(counter)

    def put_back(self, counter: TenantCounter, refund: float) -> None:
        """A granted request waits again."""
        counter.value -= refund
        self._one_less(counter)
        counter.num_waiting += 1
        self._change(counter)

    def correct(self, counter: TenantCounter, charge: float) -> None:
        """What a granted request costs is more (or less) than it was charged."""
        counter.value += charge
        if counter.num_waiting:
            self._change(counter)

    def finish(self, counter: TenantCounter) -> None:
        """A granted request has ended, and is charged what it did cost."""
        self._one_less(counter)
        self._rest(counter)

    def charge_late(self, tenant: str, charge: float) -> None:
        """Charge a tenant for a request that was thought to have ended already."""
        counter = self._counters.get(tenant)
        if counter is None:
            counter = self._counters[tenant] = TenantCounter(tenant, self.start(), 1.0)
        if charge:
            self._idle.discard(counter)
        self.correct(counter, charge)
        self._rest(counter)

    def _change(self, counter: TenantCounter) -> None:
        """A look at the counter first: nearly always it is one of many that changed, and a set of many is slow."""
        if not counter.has_changed:
            counter.has_changed = True
            self._changed.add(counter)

    def _one_less(self, counter: TenantCounter) -> None:
        counter.num_granted -= 1
        if counter.num_granted == 1:
            self.num_with_several -= 1

    def _last_start(self) -> float:
        return self._last if self._last_counter is None else min(self._last, self._last_counter.value)

    def _stop_waiting(self, counter: TenantCounter) -> None:
        counter.num_waiting -= 1
        assert counter.num_waiting >= 0
        if counter.num_waiting:
            self._change(counter)
        else:
            counter.has_changed = False
            self._changed.discard(counter)
            self._waiting.discard(counter)

    def _rest(self, counter: TenantCounter) -> None:
        if counter.num_waiting or counter.num_granted:
            return
        start = self.start()
        idle = self._idle
        if counter.value <= start:
            self._forget(counter)
        elif not counter.idle_serial:
            idle.add(counter)
        lowest = idle.lowest()
        while lowest is not None and (lowest.value <= start or len(idle) > self.idle_max):
            self._forget(lowest)
            lowest = idle.lowest()

    def _forget(self, counter: TenantCounter) -> None:
        self._idle.discard(counter)
        self.base = max(self.base, counter.value)
        del self._counters[counter.tenant]
