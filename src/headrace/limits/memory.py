"""How much memory a request is taken to need: so much for itself, and so much for each of its tokens.

For our own workers that is exactly the KV memory of the model's geometry, and nothing for itself. Where nobody knows,
behind a foreign server, it is a rule of thumb that the settings can replace. All of it is whole bytes: what is held
must add up.
"""

from typing import Final

import msgspec

from headrace.bounds import MIB
from headrace.config.settings import MemorySettings

GIB: Final = 1024 * MIB
"""A GB of limits and headers: 1024 MB of 1024 KB."""


class MemoryRate(msgspec.Struct, frozen=True, gc=False):
    """The formula of one model, in bytes."""

    base: int
    per_token: int

    def bytes_of(self, tokens: int) -> int:
        """What a request of so many tokens, prompt and answer, needs."""
        return self.base + tokens * self.per_token

    def tokens_in(self, size: int) -> int:
        """Most tokens of a request that fits into so many bytes; 0 or less if none fits."""
        return (size - self.base) // max(1, self.per_token)

    @classmethod
    def of_settings(cls, settings: MemorySettings) -> "MemoryRate":
        """A token takes a byte at least."""
        return cls(int(settings.base_mb * MIB), max(1, int(settings.mb_per_token * MIB)))


NO_MEMORY: Final = MemoryRate(0, 0)
"""For those to whom memory does not matter: nothing is ever needed."""


def bytes_of_gb(gb: float) -> int:
    return int(gb * GIB)


def gb_of(size: float) -> float:
    """For people: to the kilobyte."""
    return round(size / GIB, 6)
