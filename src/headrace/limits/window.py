"""Tokens per minute: what was settled in the last 60 seconds, exactly, plus what is held.

A true sliding window. It remembers each settlement until it is 60 seconds old; settlements of the same
millisecond are one entry, so a busy tenant costs at most 60 000 entries.
"""

from collections import deque
from typing import Final

WINDOW_US = 60_000_000
_GRAIN_US = 1_000

_Settlement = tuple[int, int, int]
"""Settlements of one grain: time of the first, time of the last, tokens."""
_NEVER_US: Final = 1 << 62
_NOTHING: Final[deque[_Settlement]] = deque(maxlen=0)
"""Of every account in which nothing was settled lately: an empty deque of its own takes 760 bytes, and there may be
a hundred thousand accounts."""


class TokenWindow:
    """Settled and held tokens of one account."""

    __slots__ = ("_old_at_us", "_settled", "_settled_sum", "held")

    def __init__(self) -> None:
        self._settled = _NOTHING
        """Oldest first."""
        self._old_at_us = _NEVER_US
        """When the oldest is 60 seconds old: so a look at the account nearly always needs no look at them."""
        self._settled_sum = 0
        self.held = 0

    def used(self, now_us: int) -> int:
        """Tokens settled in the last 60 seconds."""
        if now_us >= self._old_at_us:
            self._drop_old(now_us)
        return self._settled_sum

    def hold(self, tokens: int) -> None:
        self.held += tokens

    def trim(self, tokens: int) -> None:
        """Give back a part of what is held."""
        assert 0 <= tokens <= self.held
        self.held -= tokens

    def settle(self, held: int, tokens: int, now_us: int) -> None:
        """Replace a hold by what was really used."""
        assert 0 <= held <= self.held
        self.held -= held
        if tokens:
            self.add(tokens, now_us)

    def add(self, tokens: int, settled_us: int) -> None:
        """Count a settlement. Times must not go back by more than the grain."""
        settled = self._settled
        self._settled_sum += tokens
        if settled:
            first_us, last_us, before = settled[-1]
            if settled_us - first_us < _GRAIN_US:
                # Counted until the last of them is old enough: never a token too early.
                settled[-1] = (first_us, max(last_us, settled_us), before + tokens)
                self._old_at_us = settled[0][1] + WINDOW_US
                return
        else:
            settled = self._settled = deque()
            self._old_at_us = settled_us + WINDOW_US
        settled.append((settled_us, settled_us, tokens))

    def free_at_us(self, limit: int, tokens: int, now_us: int) -> int:
        """When `tokens` more would fit if what is held stays held; 0 if never, because it is too much."""
        over = self.used(now_us) + self.held + tokens - limit
        if over <= 0:
            return now_us
        for _, last_us, amount in self._settled:
            over -= amount
            if over <= 0:
                return last_us + WINDOW_US
        return 0

    def is_idle(self, now_us: int) -> bool:
        return self.held == 0 and self.used(now_us) == 0

    def _drop_old(self, now_us: int) -> None:
        settled = self._settled
        old_us = now_us - WINDOW_US
        while settled and settled[0][1] <= old_us:
            self._settled_sum -= settled.popleft()[2]
        if settled:
            self._old_at_us = settled[0][1] + WINDOW_US
        else:
            self._settled, self._old_at_us = _NOTHING, _NEVER_US
