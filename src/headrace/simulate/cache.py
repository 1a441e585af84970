"""The prefix cache of one simulated replica: blocks of prompts, the least recently used go first."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 512
"""As in the Mooncake traces."""


class PrefixCache:
    """Which blocks are there. `blocks_max` None: no bound."""

    def __init__(self, blocks_max: int | None) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are there."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count

    def use(self, blocks: Sequence[int]) -> int:
        """Read a prompt in: how many leading blocks were there. All of them are, afterwards."""
        hits = self.match(blocks)
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        if self._blocks_max is not None:
            while len(self._blocks) > self._blocks_max:
                self._blocks.popitem(last=False)
        return hits
