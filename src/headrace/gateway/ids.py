"""Ids that are made for requests: unguessable, and drawn without a system call each."""

import secrets
from typing import Final

from headrace.clock import Clock

_POOL_BYTES: Final = 2048
"""Random bytes drawn at once, enough for some eighty requests: the system call costs far more than its bytes."""


class IdSource:
    """Makes ids from the system's random numbers. Each digit is used once; a copy of the object (a fork that
    goes on as a gateway) would use them again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._digits = ""
        self._taken = 0

    def hex_id(self) -> str:
        """32 hex digits: sortable by time, unguessable by the rest."""
        return f"{self._clock.wall_us() // 1000:012x}{self._random(20)}"

    def trace_id(self) -> str:
        """32 random hex digits (W3C trace context)."""
        return self._random(32)

    def _random(self, num_digits: int) -> str:
        start, end = self._taken, self._taken + num_digits
        if end > len(self._digits):
            self._digits = secrets.token_hex(_POOL_BYTES)
            start, end = 0, num_digits
        self._taken = end
        return self._digits[start:end]
