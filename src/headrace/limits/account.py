"""What one tenant, key, model or the cluster has taken."""

from headrace.config.limits import UNLIMITED, Level, Limits
from headrace.limits.memory import bytes_of_gb
from headrace.limits.rate import RequestRate
from headrace.limits.window import TokenWindow


class Account:
    """What one tenant, key, model or the cluster has taken."""

    __slots__ = (
        "account_id",
        "level",
        "limits",
        "memory",
        "memory_max",
        "rate",
        "running",
        "streams",
        "throttled_until_us",
        "window",
    )

    def __init__(self, level: Level, account_id: str, limits: Limits) -> None:
        self.level: Level = level
        self.account_id = account_id
        self.throttled_until_us = 0
        """So long requests that find no memory wait, at half the share. Only while memory is limited."""
        self.limit(limits)
        self.rate = RequestRate()
        self.window = TokenWindow()
        self.running = 0
        self.streams = 0
        self.memory = 0
        """Bytes that its requests on workers hold."""

    def limit(self, limits: Limits) -> None:
        """These limits from now on."""
        # Most accounts have none. Those share one object, so that the checks below can tell in one comparison.
        self.limits = UNLIMITED if limits == UNLIMITED else limits
        gb = limits.gpu_memory_gb
        self.memory_max = None if gb is None else bytes_of_gb(gb)
        if gb is None:
            self.throttled_until_us = 0

    def is_idle(self, now_us: int) -> bool:
        return (
            not self.running
            and self.throttled_until_us <= now_us
            and not self.streams
            and self.rate.is_idle(now_us)
            and self.window.is_idle(now_us)
        )
