"""Requests per second: the generic cell rate algorithm in integer microseconds.

Source: ITU-T I.371, annex A ("virtual scheduling"). The state is one number, the theoretical arrival
time of the next request if all came at the steady rate. A request is early by `tat - now`; it passes as
long as that is within the burst tolerance. No drift, no window edge, no background refill.
"""

MICROSECONDS = 1_000_000


class RequestRate:
    """One rate limit. `rps` may change at any time."""

    __slots__ = ("_tat_us",)

    def __init__(self) -> None:
        self._tat_us = 0

    def wait_us(self, rps: float, now_us: int) -> int:
        """For how long a request would have to wait; 0 if it may pass now. Changes nothing."""
        _, tolerance_us = _parameters(rps)
        return max(0, self._tat_us - now_us - tolerance_us)

    def take(self, rps: float, now_us: int) -> None:
        """Count a request that passes."""
        interval_us, _ = _parameters(rps)
        self._tat_us = max(self._tat_us, now_us) + interval_us

    def give_back(self, rps: float) -> None:
        """Undo a `take` of the same instant."""
        self._tat_us -= _parameters(rps)[0]

    def remaining(self, rps: float, now_us: int) -> int:
        """How many requests would pass now, one after the other."""
        interval_us, tolerance_us = _parameters(rps)
        early_us = max(0, self._tat_us - now_us)
        return max(0, (tolerance_us - early_us) // interval_us + 1)

    def reset_us(self, now_us: int) -> int:
        """Time until a whole burst passes again."""
        return max(0, self._tat_us - now_us)

    def is_idle(self, now_us: int) -> bool:
        """Whether the past no longer matters."""
        return self._tat_us <= now_us


def _parameters(rps: float) -> tuple[int, int]:
    """Emission interval and burst tolerance, microseconds. Intervals round up: never over the rate."""
    interval_us = max(1, -int(-MICROSECONDS // rps))
    burst = max(1, int(rps))
    return interval_us, (burst - 1) * interval_us
