"""The books of cells against the plainest model: each slot is a list of cells, shared ones are the same object."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.caching.cells import CellBook

SLOTS, SLOT_CELLS = 4, 40


def book(*, is_shared: bool, num_cells: int = SLOTS * SLOT_CELLS) -> CellBook:
    return CellBook(
        SLOTS,
        num_cells=num_cells,
        slot_cells_max=SLOT_CELLS,
        pool_cells=num_cells if is_shared else None,
    )


class Model:
    def __init__(self) -> None:
        self.slots: list[list[object]] = [[] for _ in range(SLOTS)]
        self.running = [False] * SLOTS

    def used(self, slots: Any = range(SLOTS)) -> int:
        return len({id(cell) for slot in slots for cell in self.slots[slot]})


@given(
    is_shared=st.booleans(),
    script=st.lists(
        st.tuples(
            st.sampled_from(("grow", "cut", "copy", "start", "stop")),
            st.integers(0, SLOTS - 1),
            st.integers(0, SLOTS - 1),
            st.integers(0, SLOT_CELLS),
        ),
        max_size=80,
    ),
)
def test_the_books_say_what_is_there(is_shared: bool, script: list[tuple[str, int, int, int]]) -> None:
    cells, model = book(is_shared=is_shared), Model()
    for action, slot, other, number in script:
        held = model.slots[slot]
        match action:
            case "grow" if len(held) < SLOT_CELLS:
                number = min(number, SLOT_CELLS - len(held))
                cells.grew(slot, number)
                held += [object() for _ in range(number)]
            case "cut":
                number = min(number, len(held))
                cells.cut(slot, number)
                del held[number:]
            case "copy" if slot != other and not model.running[other]:
                number = min(number, len(held))
                cells.copied(slot, other, number)
                model.slots[other] = held[:number] if is_shared else [object() for _ in range(number)]
            case "start" if not model.running[slot]:
                cells.started(slot)
                model.running[slot] = True
            case "stop" if model.running[slot]:
                cells.stopped(slot)
                model.running[slot] = False
        assert list(cells.lengths) == [len(one) for one in model.slots]
        assert cells.used == model.used()
        assert cells.used_running == model.used([slot for slot in range(SLOTS) if model.running[slot]])
        assert cells.kept == cells.used - cells.used_running
        assert cells.free == cells.num_cells - cells.used
        assert 0 <= cells.fragmentation <= 1
    for slot in range(SLOTS):
        cells.cut(slot, 0)
    assert (cells.used, cells.used_running, cells.fragmentation) == (0, 0, 0)


def test_fragmentation_of_a_pool_is_what_lies_outside_the_longest_free_stretch() -> None:
    cells = book(is_shared=True, num_cells=100)
    assert cells.fragmentation == 0
    for slot in range(3):
        cells.grew(slot, 20)
    assert cells.fragmentation == 0, "40 free cells in one piece"
    cells.cut(1, 0)
    assert cells.fragmentation == pytest.approx(20 / 60)
    cells.grew(3, 25)
    assert cells.fragmentation == 0, "the hole is filled first"
    cells.grew(1, 35)
    assert (cells.free, cells.fragmentation) == (0, 0)


def test_sequences_that_grow_together_leave_holes_in_a_pool() -> None:
    cells = book(is_shared=True, num_cells=40)
    for _ in range(20):
        cells.grew(0, 1)
        cells.grew(1, 1)
    cells.cut(0, 0)
    assert cells.fragmentation == pytest.approx(19 / 20)


def test_fragmentation_of_slots_is_what_lies_idle_in_them() -> None:
    cells = book(is_shared=False)
    assert cells.fragmentation == 0
    cells.grew(0, 10)
    assert cells.fragmentation == pytest.approx(30 / 40)
    cells.grew(1, 40)
    assert cells.fragmentation == pytest.approx(30 / 80)


def test_what_was_shared_stays_as_long_as_one_holds_it() -> None:
    cells = book(is_shared=True)
    cells.grew(0, 30)
    cells.copied(0, 1, 20)
    cells.grew(1, 5)
    assert cells.used == 35
    cells.cut(0, 0)
    assert cells.used == 25
    cells.cut(1, 10)
    assert cells.used == 10
