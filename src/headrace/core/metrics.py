"""What the core and the gateway count. Label values come from bounded sets only."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from headrace.bounds import TENANT_LABELS_MAX
from headrace.ledger.records import OperationRecord
from headrace.telemetry.families import CounterFamily, GaugeFamily, HistogramFamily, Labels

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)

WATCHED: Final = {
    "headrace_http_connections_open": "Client connections.",
    "headrace_http_requests_refused": "Requests refused by the HTTP layer since the start.",
    "headrace_ledger_pending": "Ledger entries not written yet.",
    "headrace_ledger_healthy": "0 while the ledger cannot be written.",
    "headrace_queue_length": "Requests waiting for a replica.",
    "headrace_running": "Requests on replicas.",
}
"""Gauges that are read when they are scraped."""


class CoreMetrics:
    """Counters of operations, of their tokens and of their times."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenants: set[str] = set()
        self.registry = registry
        self._operations = CounterFamily(
            "headrace_operations",
            "Operations ended, by model and outcome.",
            ["model", "outcome"],
            registry,
        )
        self._tokens = CounterFamily(
            "headrace_tokens", "Tokens counted by the engines.", ["model", "kind"], registry
        )
        self._tenant_tokens = CounterFamily(
            "headrace_tenant_tokens",
            "Tokens by tenant (the first hundred seen; the rest as 'other').",
            ["tenant", "kind"],
            registry,
        )
        self._latency = HistogramFamily(
            "headrace_request_seconds",
            "From acceptance to the final record, completed operations.",
            ["model"],
            registry,
            bounds=_SECONDS,
        )
        self._first_token = HistogramFamily(
            "headrace_time_to_first_token_seconds",
            "From acceptance to the first token.",
            ["model"],
            registry,
            bounds=_SECONDS,
        )
        self._queue_wait = HistogramFamily(
            "headrace_queue_seconds",
            "From acceptance to a worker's start of the attempt.",
            ["model"],
            registry,
            bounds=_SECONDS,
        )
        self._tenant_queue_wait = HistogramFamily(
            "headrace_tenant_queue_seconds",
            "From acceptance to a worker's start of the attempt, by tenant (the first hundred seen; the rest as "
            "'other'): percentiles of their waits.",
            ["tenant"],
            registry,
            bounds=_SECONDS,
        )
        self._waiting = GaugeFamily(
            "headrace_queue_waiting",
            "Requests waiting for a replica, by class after aging, as of the last second.",
            ["model", "service_class"],
            registry,
        )
        self._jain = GaugeFamily(
            "headrace_fairness_jain_index",
            "How evenly tenants were served in the last 60 s: the Jain index of their service (cost of computed tokens "
            "by weight, in a second), over those who had requests waiting for at least 5 s of it, counted while they had. "
            "1: in proportion to their weights, or fewer than two waited so long.",
            ["model"],
            registry,
        )
        self._memory_held = GaugeFamily(
            "headrace_memory_held_bytes",
            "Memory that requests on replicas are taken to need, as limits of gpu_memory_gb count it.",
            ["model"],
            registry,
        )
        self._throttled = GaugeFamily(
            "headrace_accounts_throttled",
            "Tenants, departments, users, models of tenants and keys that a refusal for memory slows down.",
            [],
            registry,
        )
        self._memory_refusals = CounterFamily(
            "headrace_memory_refusals",
            "Requests refused by a limit of memory, by the level of that limit.",
            ["model", "level"],
            registry,
        )
        self._replies = CounterFamily(
            "headrace_http_replies", "Replies by route and status.", ["route", "status"], registry
        )
        self._put_back = CounterFamily(
            "headrace_put_back",
            "Requests that a full replica sent back to the head of the queue.",
            ["model"],
            registry,
        )
        self._placements = CounterFamily(
            "headrace_placements",
            "Requests given to a replica, by why that one: its session's, one that has its prompt's beginning, the least "
            "loaded, or the only one.",
            ["model", "reason"],
            registry,
        )
        self._placement_warm_tokens = CounterFamily(
            "headrace_placement_warm_tokens",
            "Prompt tokens expected to be in the memory of the worker that was chosen, where there are several.",
            ["model"],
            registry,
        )
        self._preempted = CounterFamily(
            "headrace_preempted",
            "Requests that were stopped for another tenant's and wait to go on.",
            ["model"],
            registry,
        )
        self._unauthenticated = CounterFamily(
            "headrace_unauthenticated",
            "Requests without a valid key, by reason.",
            ["reason"],
            registry,
        )
        self._overhead = HistogramFamily(
            "headrace_gateway_overhead_seconds",
            "Time the gateway adds before a request is with a replica, waiting in the queue left out.",
            [],
            registry,
            bounds=_OVERHEAD,
        )

    def watch(self, readers: Mapping[str, Callable[[], float]]) -> None:
        """Say where the values of `WATCHED` come from."""
        assert readers.keys() == WATCHED.keys()
        for name, read in readers.items():
            Gauge(name, WATCHED[name], registry=self.registry).set_function(read)

    def watch_queues(
        self,
        *,
        waiting: Callable[[], Iterable[tuple[Labels, float]]],
        jain_index: Callable[[], Iterable[tuple[Labels, float]]],
    ) -> None:
        """Say where the numbers of the queues come from."""
        self._waiting.read_with(waiting)
        self._jain.read_with(jain_index)

    def watch_memory(
        self,
        *,
        held: Callable[[], Iterable[tuple[Labels, float]]],
        throttled: Callable[[], Iterable[tuple[Labels, float]]],
    ) -> None:
        """Say where the numbers of the limits of memory come from."""
        self._memory_held.read_with(held)
        self._throttled.read_with(throttled)

    def refused_memory(self, model: str, level: str) -> None:
        self._memory_refusals.add((model, level))

    def replied(self, route: str, status: int) -> None:
        self._replies.add((route, str(status)))

    def put_back(self, model: str) -> None:
        self._put_back.add((model,))

    def placed(self, model: str, reason: str, warm_tokens: int) -> None:
        """A request was given to a replica that is expected to have so many tokens of its prompt."""
        self._placements.add((model, reason))
        if warm_tokens:
            self._placement_warm_tokens.add((model,), warm_tokens)

    def preempted(self, model: str) -> None:
        self._preempted.add((model,))

    def unauthenticated(self, reason: str) -> None:
        self._unauthenticated.add((reason,))

    def handed_over(self, overhead_us: int) -> None:
        """A request is with a replica after so much time of the gateway's own."""
        self._overhead.observe((), overhead_us / 1e6)

    def settled(self, record: OperationRecord) -> None:
        """Count a final record."""
        model = record.model
        self._operations.add((model, record.outcome), record.num_requests)
        if record.prompt_tokens or record.completion_tokens:
            tenant = self._tenant_label(record.tenant_id)
            for kind, tokens in (
                ("prompt", record.prompt_tokens),
                ("cached", record.prompt_tokens_cached),
                ("completion", record.completion_tokens),
            ):
                if tokens:
                    self._tokens.add((model, kind), tokens)
                    self._tenant_tokens.add((tenant, kind), tokens)
        entered = record.queue_enter_ts
        labels = (model,)
        if record.start_ts is not None:
            waited_s = max(0, record.start_ts - entered) / 1e6
            self._queue_wait.observe(labels, waited_s)
            self._tenant_queue_wait.observe((self._tenant_label(record.tenant_id),), waited_s)
        if record.first_token_ts is not None:
            self._first_token.observe(labels, max(0, record.first_token_ts - entered) / 1e6)
        if record.outcome == "completed":
            self._latency.observe(labels, record.latency_us / 1e6)

    def _tenant_label(self, tenant_id: str) -> str:
        if tenant_id in self._tenants:
            return tenant_id
        if len(self._tenants) < TENANT_LABELS_MAX:
            self._tenants.add(tenant_id)
            return tenant_id
        return "other"
