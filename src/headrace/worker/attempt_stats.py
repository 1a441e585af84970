"""What became of a worker's attempts, as Prometheus metrics. Written by the engine thread."""

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from headrace.worker.messages import AttemptRecord

PreemptionReason = Literal["queue", "memory"]
"""`queue`: the owner wanted its place for another; `memory`: there were too few KV cells."""


class AttemptStats:
    """Counters of attempts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._prefill_ms = Histogram(
            "prefill_latency_ms",
            "From a slot to the first token, milliseconds.",
            buckets=(10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000),
            registry=registry,
        )
        self._decode_ms = Histogram(
            "decode_latency_per_token_ms",
            "Mean time per generated token of an attempt after its first, milliseconds.",
            buckets=(2, 5, 10, 20, 50, 100, 200, 300, 500, 1000, 2000),
            registry=registry,
        )
        self._attempts = Counter(
            "headrace_worker_attempts", "Attempts ended.", ["finish_reason"], registry=registry
        )
        for reason in ("stop", "length", "aborted", "error"):
            self._attempts.labels(reason)
        self._preemptions = Counter(
            "headrace_worker_preemptions",
            "Sequences taken out of their slots before their end: for another request, for want of KV cells.",
            ["reason"],
            registry=registry,
        )
        for reason in get_args(PreemptionReason):
            self._preemptions.labels(reason)
        self._recomputed = Counter(
            "headrace_worker_recomputed_tokens",
            "Tokens computed again after preemptions, of sequences that have ended. Nobody is charged for them.",
            registry=registry,
        )

    def prefilled(self, microseconds: int) -> None:
        self._prefill_ms.observe(microseconds / 1000)

    def preempted(self, reason: PreemptionReason) -> None:
        self._preemptions.labels(reason).inc()

    def finished(self, record: AttemptRecord) -> None:
        self._recomputed.inc(record.recomputed_tokens)
        self._attempts.labels(record.finish_reason).inc()
        if record.completion_tokens > 1:
            self._decode_ms.observe(record.decode_us / 1000 / (record.completion_tokens - 1))
