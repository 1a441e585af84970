"""A priority queue whose items may change their rank or leave: a heap with lazy deletion."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Entry = list[Any]
"""[rank, tie, serial, item]; a dead one has no item any more. Flat, because that compares fastest."""

_SLACK = 16
"""So many dead entries are always tolerated."""


class LazyHeap(Generic[Item]):
    """Lowest rank first, and of equal ranks the one that was set first.

    Every operation takes logarithmic time, amortized: dead entries are swept out when they outnumber the
    living.
    """

    __slots__ = ("_entries", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._entries: dict[Item, Entry] = {}
        """The living entry of each item."""
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        """All items, in no order."""
        return iter(self._entries)

    def set(self, item: Item, rank: Any, tie: Any = 0) -> None:
        """Put an item in, or give it another rank. `tie` decides between equal ranks."""
        old = self._entries.get(item)
        if old is not None:
            if old[0] == rank and old[1] == tie:
                return
            old[3] = None
        self._serial += 1
        entry = [rank, tie, self._serial, item]
        self._entries[item] = entry
        heap = self._heap
        if heap and heap[0] is old:
            # Who was just served moves back from the very front: in place, so that nothing dead is left there.
            heapq.heapreplace(heap, entry)
            return
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Take an item out, if it is there."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            entry[3] = None
        if not self._entries:
            self._heap.clear()

    def peek(self) -> Item | None:
        """The first item, or None."""
        entry = self._top()
        if entry is None:
            return None
        item: Item = entry[3]
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

    def tie_of(self, item: Item) -> Any:
        return self._entries[item][1]

    def move(self, item: Item, rank: Any) -> None:
        """Give an item that is there another rank. Its tie stays."""
        self.set(item, rank, self._entries[item][1])

    def take(self) -> Entry | None:
        """Take the first out. `restore` brings it back to the very same place."""
        entry = self._top()
        if entry is not None:
            heapq.heappop(self._heap)
            del self._entries[entry[3]]
        return entry

    def restore(self, entry: Entry) -> None:
        """Undo `take`."""
        assert entry[3] not in self._entries
        self._entries[entry[3]] = entry
        heapq.heappush(self._heap, entry)

    def in_order(self) -> Iterator[Entry]:
        """All entries, first one first; those without an item are dead. Nothing may change meanwhile.

        Finding the first few looks at no more than twice as many, dead ones included.
        """
        heap = self._heap
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, at = heapq.heappop(ahead)
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(ahead, (heap[below], below))
            yield entry

    def _top(self) -> Entry | None:
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[3] is not None:
                return entry
            heapq.heappop(heap)
        return None
