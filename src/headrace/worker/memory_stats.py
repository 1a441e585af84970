"""What a worker's KV memory holds, as Prometheus metrics."""

from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from headrace.bounds import TENANT_LABELS_MAX

OTHER: Final = "other"


class MemoryStats:
    """Gauges of cells. Written by the engine thread; fragmentation is computed when it is scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._cells = Gauge(
            "kv_cache_cells",
            "KV cells by what they hold: tokens of running sequences, kept prefixes, nothing.",
            ["state"],
            registry=registry,
        )
        self._running, self._kept, self._free = (
            self._cells.labels(state) for state in ("running", "kept", "free")
        )
        self._tenants = Gauge(
            "kv_cache_tenant_tokens",
            "Tokens in KV memory by tenant, running and kept (a hundred tenants at a time; the rest as 'other').",
            ["tenant"],
            registry=registry,
        )
        self._told: dict[str, int] = {}
        self._running_max = Gauge(
            "headrace_worker_running_max",
            "Sequences that may run at once now: lowered when KV cells run short.",
            registry=registry,
        )
        self._fragmentation = Gauge(
            "kv_cache_fragmentation",
            "Share, 0 to 1. Unified layout: free cells that are not in the longest free stretch; per sequence: memory of slots in "
            "use that holds nothing.",
            registry=registry,
        )

    def watch_fragmentation(self, read: Callable[[], float]) -> None:
        self._fragmentation.set_function(read)

    def holds(self, *, running: int, kept: int, free: int, running_max: int) -> None:
        self._running.set(running)
        self._kept.set(kept)
        self._free.set(free)
        self._running_max.set(running_max)

    def tenants_hold(self, tokens: Mapping[str, int]) -> None:
        """Tokens by tenant. Tenants keep their labels as long as they hold something."""
        told = self._told
        shown: dict[str, int] = {}
        others = 0
        for tenant, count in sorted(tokens.items(), key=lambda item: item[0] not in told):
            if len(shown) < TENANT_LABELS_MAX:
                shown[tenant] = count
            else:
                others += count
        if others:
            shown[OTHER] = shown.get(OTHER, 0) + others
        for tenant in told.keys() - shown.keys():
            self._tenants.remove(tenant)
        for tenant, count in shown.items():
            if told.get(tenant) != count:
                self._tenants.labels(tenant).set(count)
        self._told = shown
