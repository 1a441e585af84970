"""A priority queue whose items may change their rank or leave: a heap with lazy deletion."""

import heapq
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

Entry = tuple[Any, ...]
"""(rank, tie, serial, item). Flat, and no list, because that compares fastest and takes least memory. Dead once it is
no longer its item's."""

SLACK = 16
"""So many dead entries are always tolerated."""


class Item(Protocol):
    """What can be in one `LazyHeap` at a time."""

    entry: Entry | None
    """Its living entry; None while it is in no heap. Here and not in a dictionary of the heap: where hundreds of
    thousands wait, a look into a large table costs more than the rest of the step."""


ItemT = TypeVar("ItemT", bound=Item)


class LazyHeap(Generic[ItemT]):
    """Lowest rank first, and of equal ranks the one that was set first.

    Every operation takes logarithmic time, amortized: dead entries are swept out when they outnumber the
    living.
    """

    __slots__ = ("_heap", "_length", "_serial")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._length = 0
        self._serial = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ItemT]:
        """All items, in no order."""
        return (entry[3] for entry in self._heap if entry[3].entry is entry)

    def set(self, item: ItemT, rank: Any, tie: Any = 0) -> None:
        """Put an item in, or give it another rank. `tie` decides between equal ranks."""
        old = item.entry
        if old is None:
            self._length += 1
        elif old[0] == rank and old[1] == tie:
            return
        self._serial += 1
        item.entry = entry = (rank, tie, self._serial, item)
        heap = self._heap
        if old is not None and heap[0] is old:
            # Who was just served moves back from the very front: in place, so that nothing dead is left there.
            heapq.heapreplace(heap, entry)
            return
        heapq.heappush(heap, entry)
        if len(heap) > 2 * self._length + SLACK:
            self._heap = [entry for entry in heap if entry[3].entry is entry]
            heapq.heapify(self._heap)

    def discard(self, item: ItemT) -> None:
        """Take an item out, if it is there."""
        if item.entry is not None:
            item.entry = None
            self._length -= 1
            if not self._length:
                self._heap.clear()

    def clear(self) -> None:
        """Take all out."""
        for item in list(self):
            item.entry = None
        self._heap.clear()
        self._length = 0

    def peek(self) -> ItemT | None:
        """The first item, or None."""
        entry = self._top()
        if entry is None:
            return None
        item: ItemT = entry[3]
        return item

    def rank(self) -> Any:
        """The first item's rank. There must be one."""
        entry = self._top()
        assert entry is not None
        return entry[0]

    def key(self) -> tuple[Any, Any]:
        """The first item's rank and tie. There must be one."""
        entry = self._top()
        assert entry is not None
        return entry[0], entry[1]

    def move(self, item: ItemT, rank: Any) -> None:
        """Give an item that is there another rank. Its tie stays."""
        old = item.entry
        assert old is not None
        if old[0] != rank:
            self.set(item, rank, old[1])

    def take(self) -> Entry | None:
        """Take the first out. `restore` brings it back to the very same place."""
        entry = self._top()
        if entry is not None:
            heapq.heappop(self._heap)
            entry[3].entry = None
            self._length -= 1
        return entry

    def restore(self, entry: Entry) -> None:
        """Undo `take`."""
        assert entry[3].entry is None
        entry[3].entry = entry
        self._length += 1
        heapq.heappush(self._heap, entry)

    def in_order(self) -> Iterator[Entry | None]:
        """All entries, first one first; None for each that is dead. Nothing may change meanwhile.

        Finding the first few looks at no more than twice as many, dead ones included.
        """
        for entry in walk(self._heap):
            yield entry if entry[3].entry is entry else None

    def _top(self) -> Entry | None:
        heap = self._heap
        while heap:
            first = heap[0]
            item: Item = first[3]
            if item.entry is first:
                return first
            heapq.heappop(heap)
        return None


def walk(heap: list[Entry]) -> Iterator[Entry]:
    """What is in a heap, lowest first. Nothing may change meanwhile."""
    ahead = [(heap[0], 0)] if heap else []
    while ahead:
        entry, at = heapq.heappop(ahead)
        for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
            heapq.heappush(ahead, (heap[below], below))
        yield entry
