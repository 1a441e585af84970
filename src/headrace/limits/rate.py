"""Requests per second: the generic cell rate algorithm in integer microseconds.

Source: ITU-T I.371, annex A ("virtual scheduling"). The state is one number, the theoretical arrival
time of the next request if all came at the steady rate. A request is early by `tat - now`; it passes as
long as that is within the burst tolerance. No drift, no window edge, no background refill.
"""

MICROSECONDS = 1_000_000


class RequestRate:
    """One rate limit. `rps` may change at any time."""

    __slots__ = ("_interval_us", "_rps", "_tat_us", "_tolerance_us")

    def __init__(self) -> None:
        self._tat_us = 0
        self._rps = 0.0
        """The rate that the two numbers below were worked out for."""
        self._interval_us = 0
        self._tolerance_us = 0

    def wait_us(self, rps: float, now_us: int) -> int:
        """For how long a request would have to wait; 0 if it may pass now. Changes nothing."""
        if rps != self._rps:
            self._work_out(rps)
        wait_us = self._tat_us - now_us - self._tolerance_us
        return wait_us if wait_us > 0 else 0

    def take(self, rps: float, now_us: int) -> None:
        """Count a request that passes."""
        if rps != self._rps:
            self._work_out(rps)
        tat_us = self._tat_us
        self._tat_us = (tat_us if tat_us > now_us else now_us) + self._interval_us

    def give_back(self, rps: float) -> None:
        """Undo a `take` of the same instant."""
        if rps != self._rps:
            self._work_out(rps)
        self._tat_us -= self._interval_us

    def remaining(self, rps: float, now_us: int) -> int:
        """How many requests would pass now, one after the other."""
        if rps != self._rps:
            self._work_out(rps)
        early_us = self._tat_us - now_us
        number = (self._tolerance_us - (early_us if early_us > 0 else 0)) // self._interval_us + 1
        return number if number > 0 else 0

    def room(self, rps: float, now_us: int) -> tuple[int, int, int]:
        """(requests that pass now, requests per second, milliseconds until all pass again)"""
        early_us = self._tat_us - now_us
        return self.remaining(rps, now_us), int(rps) or 1, early_us // 1000 if early_us > 0 else 0

    def is_idle(self, now_us: int) -> bool:
        """Whether the past no longer matters."""
        return self._tat_us <= now_us

    def _work_out(self, rps: float) -> None:
        """Emission interval and burst tolerance, microseconds. Intervals round up: never over the rate."""
        interval_us = max(1, -int(-MICROSECONDS // rps))
        burst = max(1, int(rps))
        self._rps, self._interval_us, self._tolerance_us = rps, interval_us, (burst - 1) * interval_us
