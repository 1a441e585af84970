"""The only place that reads the clock.

Policy code gets times as arguments. Everything else takes a `Clock`, so that a simulation can hand
in its own. Wall time is for people and records, monotonic time for durations; neither is mixed with
the other.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time, in integer microseconds."""

    def wall_us(self) -> int:
        """Microseconds since 1970-01-01 UTC. May jump."""
        ...

    def monotonic_us(self) -> int:
        """Microseconds since some point in the past. Never goes back."""
        ...


class SystemClock:
    """The machine's clock."""

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000
