"""What a worker's sequences took over and what became of the rest, as Prometheus metrics. Written by the engine thread."""

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

_log = structlog.get_logger()


class CacheStats:
    """Counters of kept and parked tokens."""

    def __init__(self, registry: CollectorRegistry, *, kv_bytes_per_token: int) -> None:
        self._kv_bytes_per_token = kv_bytes_per_token
        self._placements = Counter(
            "headrace_worker_placements",
            "Sequences given a slot, by what they took over: nothing, a slot's tokens in place, a copy, a parked state.",
            ["source"],
            registry=registry,
        )
        for source in ("cold", "place", "copy", "restore"):
            self._placements.labels(source)
        self._looked_up = Counter(
            "kv_cache_prompt_tokens", "Prompt tokens of sequences given a slot.", registry=registry
        )
        self._hit_tokens = Counter(
            "kv_cache_hit_tokens", "Prompt tokens that did not have to be computed.", registry=registry
        )
        self._prefix_rate = Gauge(
            "kv_cache_hit_rate_prefix",
            "Share of all prompt tokens since the start that did not have to be computed.",
            registry=registry,
        )
        self._session_rate = Gauge(
            "kv_cache_hit_rate_session",
            "Share of the requests of conversations since the start that found their conversation's tokens.",
            registry=registry,
        )
        self._prompt_seen = self._prompt_hit = self._sessions_seen = self._sessions_hit = 0
        self._evictions = Counter(
            "kv_cache_evictions",
            "Kept prefixes that left KV memory: out of time, for want of room, put aside in a file, ended.",
            ["reason"],
            registry=registry,
        )
        for reason in ("expired", "pressure", "ended", "parked"):
            self._evictions.labels(reason)
        self._kept = Gauge(
            "kv_cache_bytes_kept", "KV memory holding tokens of sequences that have ended.", registry=registry
        )
        self._parked = Gauge("kv_cache_bytes_parked", "States put aside in files.", registry=registry)
        self._restore_failures = Counter(
            "kv_cache_restore_failures", "Parked states that could not be used.", registry=registry
        )

    def placed(
        self, *, prompt_tokens: int, cached_tokens: int, has_session: bool, is_session: bool, source: str
    ) -> None:
        """A sequence has its slot, and so many tokens of its prompt need not be computed."""
        self._placements.labels(source).inc()
        self._looked_up.inc(prompt_tokens)
        self._hit_tokens.inc(cached_tokens)
        self._prompt_seen += prompt_tokens
        self._prompt_hit += cached_tokens
        self._prefix_rate.set(self._prompt_hit / self._prompt_seen)
        if has_session:
            self._sessions_seen += 1
            self._sessions_hit += is_session
            self._session_rate.set(self._sessions_hit / self._sessions_seen)

    def evicted(self, reason: str) -> None:
        """Kept tokens were let go. Those that a sequence took over in place are not lost, so not counted."""
        if reason != "replaced":
            self._evictions.labels(reason).inc()

    def kept(self, tokens: int) -> None:
        """So many tokens stay in slots where nothing runs."""
        self._kept.set(tokens * self._kv_bytes_per_token)

    def parked(self, bytes_used: int) -> None:
        self._parked.set(bytes_used)

    def restore_failed(self, reason: str) -> None:
        self._restore_failures.inc()
        _log.warning("kv_not_restored", error=reason)
