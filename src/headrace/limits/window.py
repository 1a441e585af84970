"""Tokens per minute: what was settled in the last 60 seconds, exactly, plus what is held.

A true sliding window. It remembers each settlement until it is 60 seconds old; settlements of the same
millisecond are one entry, so a busy tenant costs at most 60 000 entries.
"""

from collections import deque

WINDOW_US = 60_000_000
_GRAIN_US = 1_000


class TokenWindow:
    """Settled and held tokens of one account."""

    __slots__ = ("_settled", "_settled_sum", "held")

    def __init__(self) -> None:
        self._settled: deque[list[int]] = deque()
        """[time of its first settlement, of its last, tokens]"""
        self._settled_sum = 0
        self.held = 0

    def used(self, now_us: int) -> int:
        """Tokens settled in the last 60 seconds."""
        settled = self._settled
        if settled:
            old_us = now_us - WINDOW_US
            while settled and settled[0][1] <= old_us:
                self._settled_sum -= settled.popleft()[2]
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
        if not tokens:
            return
        settled = self._settled
        if settled and now_us - settled[-1][0] < _GRAIN_US and now_us >= settled[-1][1]:
            last = settled[-1]
            last[1] = now_us
            last[2] += tokens
            self._settled_sum += tokens
        else:
            self.add(tokens, now_us)

    def add(self, tokens: int, settled_us: int) -> None:
        """Count a settlement. Times must not go back by more than the grain."""
        settled = self._settled
        last = settled[-1] if settled else None
        if last is not None and settled_us - last[0] < _GRAIN_US:
            # Counted until the last of them is old enough: never a token too early.
            if settled_us > last[1]:
                last[1] = settled_us
            last[2] += tokens
        else:
            settled.append([settled_us, settled_us, tokens])
        self._settled_sum += tokens

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
