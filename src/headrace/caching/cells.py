"""How many KV cells each slot of an engine holds, counted by the calls that were made.

An engine keeps one cell for each token of a sequence. In the per-sequence layout each slot has cells of its own; in the
unified layout all slots take theirs from one pool, and a beginning that one slot copies from another is the same cells for
both. Engines do not say how many of them are in use, or only slowly: so they are counted here, and in debug builds
compared with the engine after every step.
"""

from collections.abc import Iterator


class _Run:
    """Consecutive tokens that are held by the same slots."""

    __slots__ = ("cells", "length", "num_holders", "num_running")

    def __init__(self, length: int, *, cells: list[int], num_holders: int, num_running: int) -> None:
        self.length = length
        self.cells = cells
        """Where they lie in the pool; empty where there is none."""
        self.num_holders = num_holders
        self.num_running = num_running
        """So many of the holders run; where none does, the tokens are only kept."""


class CellBook:
    """The cells of one engine. All lengths in tokens, that is in cells."""

    def __init__(
        self, num_slots: int, *, num_cells: int, slot_cells_max: int, pool_cells: int | None = None
    ) -> None:
        """`num_cells`: most that may be in use at once. `slot_cells_max`: most of one slot.
        `pool_cells`: size of the pool that all slots take from; None: each has `slot_cells_max` of its own.
        """
        self.num_cells = num_cells
        self.used = 0
        """Cells that hold something."""
        self.used_running = 0
        """Those of slots that run; what is left of `used` is kept for others."""
        self._slot_cells_max = slot_cells_max
        self._pool = None if pool_cells is None else _Pool(pool_cells)
        self._runs: list[list[_Run]] = [[] for _ in range(num_slots)]
        self._is_running = [False] * num_slots

    @property
    def is_shared(self) -> bool:
        """Whether slots can hold the same cells."""
        return self._pool is not None

    @property
    def is_short(self) -> bool:
        """Whether the slots could ask for more than there is."""
        return self.num_cells < len(self._runs) * self._slot_cells_max

    @property
    def free(self) -> int:
        return self.num_cells - self.used

    @property
    def kept(self) -> int:
        """Cells that only slots hold where nothing runs."""
        return self.used - self.used_running

    @property
    def lengths(self) -> Iterator[int]:
        """Tokens of each slot."""
        return (sum(run.length for run in runs) for runs in self._runs)

    @property
    def fragmentation(self) -> float:
        """Share of memory, 0 to 1, that is of little use though nothing lies in it.

        With a pool: of its free cells, those that are not in the longest free stretch. Any of them can be used, but attention
        reads up to the last one. Without: of the memory of slots that hold something, the part that holds nothing; no other
        slot can use it.
        """
        if self._pool is not None:
            return self._pool.fragmentation
        lengths = [length for length in self.lengths if length]
        return 1 - sum(lengths) / (len(lengths) * self._slot_cells_max) if lengths else 0.0

    def length(self, slot: int) -> int:
        return sum(run.length for run in self._runs[slot])

    # --- what the engine was told -----------------------------------------------------------------------

    def started(self, slot: int) -> None:
        """A sequence runs in this slot from now on."""
        assert not self._is_running[slot]
        self._is_running[slot] = True
        for run in self._runs[slot]:
            run.num_running += 1
            if run.num_running == 1:
                self.used_running += run.length

    def stopped(self, slot: int) -> None:
        """What the slot holds is only kept."""
        assert self._is_running[slot]
        self._is_running[slot] = False
        for run in self._runs[slot]:
            run.num_running -= 1
            if not run.num_running:
                self.used_running -= run.length

    def grew(self, slot: int, tokens: int) -> None:
        """So many more tokens lie behind what the slot held."""
        cells = self._pool.take(tokens) if self._pool is not None else []
        is_running = self._is_running[slot]
        self.used += tokens
        self.used_running += tokens * is_running
        runs = self._runs[slot]
        if runs and runs[-1].num_holders == 1:
            runs[-1].length += tokens
            runs[-1].cells += cells
        else:
            runs.append(_Run(tokens, cells=cells, num_holders=1, num_running=int(is_running)))

    def cut(self, slot: int, length: int) -> None:
        """Only the first `length` tokens are left."""
        self._split(slot, length)
        runs = self._runs[slot]
        held = sum(run.length for run in runs)
        while held > length:
            run = runs.pop()
            held -= run.length
            self._let_go(run, is_running=self._is_running[slot])
        assert held == length, "a slot can only be cut to less than it holds"

    def copied(self, source: int, target: int, length: int) -> None:
        """The target holds the first `length` tokens of the source, and nothing else."""
        self.cut(target, 0)
        if self._pool is None:
            self.grew(target, length)
            return
        self._split(source, length)
        held = 0
        for run in self._runs[source]:
            if held == length:
                break
            held += run.length
            run.num_holders += 1
            run.num_running += self._is_running[target]
            self._runs[target].append(run)
        assert held == length, "no more can be copied than there is"

    # --- inside -----------------------------------------------------------------------------------------

    def _split(self, slot: int, length: int) -> None:
        """Let a run of this slot end there, in all slots that hold it."""
        begin = 0
        for run in self._runs[slot]:
            if begin < length < begin + run.length:
                head = length - begin
                tail = _Run(
                    run.length - head,
                    cells=run.cells[head:],
                    num_holders=run.num_holders,
                    num_running=run.num_running,
                )
                run.length = head
                del run.cells[head:]
                for runs in self._runs:
                    if run in runs:
                        runs.insert(runs.index(run) + 1, tail)
                return
            begin += run.length

    def _let_go(self, run: _Run, *, is_running: bool) -> None:
        run.num_holders -= 1
        run.num_running -= is_running
        if is_running and not run.num_running:
            self.used_running -= run.length
        if not run.num_holders:
            self.used -= run.length
            if self._pool is not None:
                self._pool.give_back(run.cells)


class _Pool:
    """Which cells of a pool are taken, by llama.cpp's rule: the next free one behind the last that was taken, from the
    front again where something was freed before it or far less is in use.
    """

    def __init__(self, num_cells: int) -> None:
        self._taken = bytearray(num_cells)
        self._num_taken = 0
        self._head = 0

    def take(self, num: int) -> list[int]:
        if self._head > self._num_taken + 2 * num:
            self._head = 0
        cells = []
        for _ in range(num):
            cell = self._taken.find(0, self._head)
            if cell < 0:
                cell = self._taken.find(0)
            assert cell >= 0, "an engine cannot hold more than its cells"
            self._taken[cell] = 1
            self._head = cell + 1
            cells.append(cell)
        self._num_taken += num
        return cells

    def give_back(self, cells: list[int]) -> None:
        for cell in cells:
            self._taken[cell] = 0
        self._num_taken -= len(cells)
        if cells:
            self._head = min(self._head, *cells)

    @property
    def fragmentation(self) -> float:
        # Read from the thread that serves metrics, too: a copy cannot change meanwhile.
        taken = bytes(self._taken)
        num_free = taken.count(0)
        longest = max(map(len, taken.split(b"\x01")))
        return 1 - longest / num_free if num_free else 0.0
