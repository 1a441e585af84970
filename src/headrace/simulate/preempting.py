"""For whom a running request is stopped: asks the production queue, for those who are furthest behind."""

from collections.abc import Callable
from typing import Final

from headrace.admission.entry import Entry
from headrace.scheduling.fair import FairQueue

TENANTS_ASKED_MAX: Final = 8
"""Of those that wait, lowest counters first. Whoever is not among them has had more than these."""


class Preempting:
    """Which requests wait, by tenant, and which running one should give way.

    Asked for are interactive requests of tenants with low counters, the oldest of each. `may_ask` leaves out those that
    a place alone would not help.
    """

    def __init__(self, queue: FairQueue[Entry], may_ask: Callable[[Entry], bool]) -> None:
        self._queue = queue
        self._may_ask = may_ask
        self._waiting: dict[str, dict[str, Entry]] = {}
        self._favoured: Entry | None = None
        """Somebody was stopped for it, and it still waits: for memory. Until it has a place nobody else asks."""

    def enters(self, entry: Entry) -> None:
        """It waits, and may ask."""
        if self._may_ask(entry):
            self._waiting.setdefault(entry.tenant_id, {})[entry.request_id] = entry

    def leaves(self, entry: Entry) -> None:
        """It waits no more."""
        waiting = self._waiting.get(entry.tenant_id)
        if waiting is not None and waiting.pop(entry.request_id, None) is not None and not waiting:
            del self._waiting[entry.tenant_id]
        if self._favoured is entry:
            self._favoured = None

    def choose(self) -> tuple[Entry, Entry, str] | None:
        """(for whom, who should be stopped, its replica), or None if nobody should."""
        if self._favoured is not None:
            return self._ask(self._favoured)
        counters = [one for one in self._queue.counters.waiting() if one.tenant in self._waiting]
        counters.sort(key=lambda one: one.value)
        for counter in counters[:TENANTS_ASKED_MAX]:
            found = self._ask(next(iter(self._waiting[counter.tenant].values())))
            if found is not None:
                return found
        return None

    def favour(self, entry: Entry) -> None:
        """Somebody was stopped for it."""
        self._favoured = entry

    def _ask(self, entry: Entry) -> tuple[Entry, Entry, str] | None:
        chosen = self._queue.preempt_for(entry)
        return None if chosen is None else (entry, *chosen)
