"""KV memory in the engine loop: carries out the rules of `headrace.scheduling.memory` and checks the books."""

import os
from collections.abc import Sequence as Many
from typing import Final

from headrace.config.settings import DEBUG_CELLS
from headrace.scheduling.memory import RunningMax, choose_victim, has_room, outstanding
from headrace.worker.memory_stats import MemoryStats
from headrace.worker.sequence import Sequence
from headrace.worker.slots import EngineSlots

TELL_STEPS: Final = 32
"""Tenants' gauges are set when somebody comes or goes, and after so many steps."""


class KvMemory:
    """The memory of one engine's slots. Belongs to the engine thread."""

    def __init__(
        self, slots: EngineSlots, *, stats: MemoryStats, running_max: int, debug: bool | None = None
    ) -> None:
        self._slots = slots
        self._cells = slots.cells
        self._stats = stats
        self._running_max = RunningMax(running_max)
        self._is_checked = os.environ.get(DEBUG_CELLS) == "1" if debug is None else debug
        self._told = (0, 0, 0)
        """Sequences and kept tokens when the tenants' gauges were set, and how many steps ago."""
        stats.watch_fragmentation(lambda: self._cells.fragmentation)

    @property
    def running_max(self) -> int:
        """Most sequences to run at once now."""
        return self._running_max.value

    def configure(self, running_max: int) -> None:
        self._running_max.configure(running_max)

    def has_room(self, one: Sequence, beside: Many[Sequence]) -> bool:
        """Whether a sequence may have a slot beside these."""
        cells = self._cells
        if not cells.is_short:
            return True
        free = cells.num_cells - cells.used_running
        if has_room(one, beside, free=free):
            return True
        shared = self._slots.shared_with_running(one)
        return shared > 0 and has_room(one, beside, free=free, shared=shared)

    def can_end(self, one: Sequence) -> bool:
        """Whether a sequence could come to its end if it were alone."""
        return not self._cells.is_short or one.outstanding + one.growth_max <= self._cells.num_cells

    def next_victim(self, running: Many[Sequence]) -> Sequence | None:
        """Make room for what running sequences are sure to need. Returns one that has to leave its slot for that; None once
        there is room.
        """
        cells = self._cells
        if not cells.is_short:
            return None
        needed = outstanding(running)
        if self._slots.make_room(needed):
            return None
        victim = choose_victim(running)
        assert victim is not None, "one alone always has room"
        self._running_max.preempted(len(running) - 1)
        return victim

    def stepped(self, running: Many[Sequence]) -> None:
        """A step is over."""
        self._running_max.stepped()
        cells = self._cells
        self._stats.holds(
            running=cells.used_running, kept=cells.kept, free=cells.free, running_max=self._running_max.value
        )
        num_running, kept, num_steps = self._told
        if num_running != len(running) or kept != cells.kept or num_steps >= TELL_STEPS:
            self._told = (len(running), cells.kept, 0)
            self._stats.tenants_hold(self._held_by_tenant(running))
        else:
            self._told = (num_running, kept, num_steps + 1)
        if self._is_checked:
            self.check(running)

    def _held_by_tenant(self, running: Many[Sequence]) -> dict[str, int]:
        tenants: dict[str, int] = {}
        for one in running:
            tenants[one.tenant_id] = tenants.get(one.tenant_id, 0) + one.held
        for tenant, tokens in self._slots.book.kept_by_tenant():
            tenants[tenant] = tenants.get(tenant, 0) + tokens
        return tenants

    def check(self, running: Many[Sequence]) -> None:
        """Compare sequences, books and engine; an `AssertionError` where they differ."""
        cells = self._cells
        lengths = list(cells.lengths)
        for one in running:
            assert one.held == lengths[one.slot], (
                f"{one.attempt_id}: {one.held} of {lengths[one.slot]} tokens"
            )
        for holding in self._slots.book.kept():
            held = lengths[holding.slot]
            assert holding.num_valid == held, (
                f"slot {holding.slot} keeps {holding.num_valid} of {held} tokens"
            )
        assert cells.used <= cells.num_cells, f"{cells.used} of {cells.num_cells} cells"
        found = self._slots.engine_holds()
        assert found == (lengths, cells.used), (
            f"the engine holds {found}, the books say {lengths, cells.used}"
        )
        slots = {one.slot for one in running} | {holding.slot for holding in self._slots.book.kept()}
        lost = [slot for slot, length in enumerate(lengths) if length and slot not in slots]
        assert not lost, f"slots {lost} hold tokens of nobody"
