"""The parts of the fair queue by themselves."""

import heapq

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.fairness import (
    accumulated_difference,
    jain_index,
    percentile,
    service_difference,
    wait_percentiles,
)
from headrace.scheduling.lazy_heap import Entry, LazyHeap


class Item:
    def __init__(self, name: int) -> None:
        self.name = name
        self.entry: Entry | None = None

    def __lt__(self, other: "Item") -> bool:
        return self.name < other.name


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "discard", "take", "restore"]), st.integers(0, 5), st.integers(0, 3)
        )
    )
)
def test_the_heap_is_like_a_sorted_dictionary(steps: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[Item] = LazyHeap()
    items = [Item(name) for name in range(6)]
    ranks: dict[Item, tuple[int, int]] = {}
    taken = []
    for serial, (what, name, rank) in enumerate(steps):
        item = items[name]
        if what == "set" and item not in [entry[3] for entry, _ in taken]:
            heap.set(item, rank)
            if item not in ranks or ranks[item][0] != rank:
                ranks[item] = (rank, serial)
        elif what == "discard":
            heap.discard(item)
            ranks.pop(item, None)
            assert item.entry is None
        elif what == "take":
            entry = heap.take()
            first = min(ranks, key=lambda one: ranks[one], default=None)
            assert (None if entry is None else entry[3]) == first
            if entry is not None and first is not None:
                taken.append((entry, ranks.pop(first)))
        elif taken:
            entry, place = taken.pop()
            heap.restore(entry)
            ranks[entry[3]] = place
        assert len(heap) == len(ranks)
        assert heap.peek() == min(ranks, key=lambda one: ranks[one], default=None)
        assert sorted(heap) == sorted(ranks)
    heap.clear()
    assert (len(heap), heap.peek(), [item.entry for item in items]) == (0, None, [None] * 6)


def test_the_heap_does_not_keep_its_dead() -> None:
    heap: LazyHeap[Item] = LazyHeap()
    first, other = Item(0), Item(1)
    heap.set(first, -1)
    for rank in range(10_000):
        heap.set(other, rank)
    assert len(heap._heap) < 100
    heapq.heappop(heap._heap)


def test_jain() -> None:
    assert jain_index([5, 5, 5]) == 1
    assert jain_index([1, 0, 0, 0]) == 0.25
    assert jain_index([]) == jain_index([0, 0]) == 1
    assert jain_index([1, 3]) == 0.8


def test_percentiles() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, fraction) for fraction in (0, 0.5, 0.99, 1)] == [1, 50, 99, 100]
    assert percentile([], 0.5) == 0
    assert percentile([7.0], 0.99) == 7


def test_waits_by_tenant() -> None:
    waits = {"a": range(100, 0, -1), "b": [5], "c": []}
    assert wait_percentiles(waits) == {"a": [50, 90, 99], "b": [5, 5, 5]}


def test_service_difference() -> None:
    # The second is 40 behind but asked for only 10 more; the third is 60 behind and asked for all of it.
    assert service_difference([100, 60, 40], [500, 70, 500]) == 70
    assert service_difference([], []) == 0
    assert accumulated_difference([3, 9, 4]) == 6
