"""What the engine loop measures of itself, as Prometheus metrics and as the age of the running step.

Written by the engine thread; the age is read by the network thread for the heartbeat.
"""

from typing import Literal, get_args

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.scheduling.static_batch import FlushReason
from headrace.worker.messages import AttemptRecord

PreemptionReason = Literal["queue", "memory"]
"""`queue`: the owner wanted its place for another; `memory`: there were too few KV cells."""

_log = structlog.get_logger()

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
_STEP_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)
_OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class StepStats:
    """Counters of the engine loop."""

    def __init__(self, registry: CollectorRegistry, *, kv_bytes_per_token: int) -> None:
        self._kv_bytes_per_token = kv_bytes_per_token
        self._began_us = 0
        self.tokens_generated = 0
        self.steps = 0
        self._steps = Counter("headrace_worker_steps", "Engine steps.", registry=registry)
        self._step = Histogram(
            "headrace_worker_step_seconds",
            "Duration of an engine step.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._overhead = Histogram(
            "headrace_worker_step_overhead_seconds",
            "Part of a step spent outside the engine's compute and sampling: planning, text, progress file, news.",
            buckets=_OVERHEAD_BUCKETS,
            registry=registry,
        )
        self._compute = Counter(
            "headrace_worker_compute_seconds", "Time in the engine's forward pass.", registry=registry
        )
        self._sample = Counter(
            "headrace_worker_sample_seconds", "Time spent drawing tokens.", registry=registry
        )
        self._batch = Histogram(
            "headrace_worker_batch_size",
            "Sequences decoded together in a step.",
            buckets=_BATCH_BUCKETS,
            registry=registry,
        )
        self._running = Gauge("headrace_worker_running", "Sequences in the engine.", registry=registry)
        self._running_max = Gauge(
            "headrace_worker_batch_size_max",
            "Most sequences decoded together since the start.",
            registry=registry,
        )
        self._running_peak = 0
        self._waiting = Gauge("headrace_worker_waiting", "Attempts waiting for a slot.", registry=registry)
        self._kv = Gauge(
            "kv_cache_bytes_used", "KV memory holding tokens of running sequences.", registry=registry
        )
        self._prefill = Counter(
            "headrace_worker_prefill_tokens", "Prompt tokens computed.", registry=registry
        )
        self._generated = Counter("headrace_worker_generated_tokens", "Tokens generated.", registry=registry)
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
        self._batches_flushed = Counter(
            "headrace_worker_batches_flushed",
            "Static batches that began to run, by what closed them: nobody more could join, the next request did not fit, "
            "the wait window ended.",
            ["reason"],
            registry=registry,
        )
        for flush_reason in get_args(FlushReason):
            self._batches_flushed.labels(flush_reason)
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
        self._suspended = Gauge(
            "headrace_worker_suspended", "Attempts preempted and not resumed yet.", registry=registry
        )
        self._faults = Counter("headrace_worker_faults", "Forward calls that failed.", registry=registry)

    def step_began(self, now_us: int) -> None:
        self._began_us = now_us

    def step_ended(
        self,
        *,
        now_us: int,
        running: int,
        decoding: int,
        prefill_tokens: int,
        generated: int,
        compute_s: float,
        sample_s: float,
        kv_tokens: int,
        waiting: int,
        suspended: int,
    ) -> None:
        seconds = (now_us - self._began_us) / 1e6
        self._began_us = 0
        self._waiting.set(waiting)
        self._suspended.set(suspended)
        self._kv.set(kv_tokens * self._kv_bytes_per_token)
        self._running.set(running)
        if not decoding and not prefill_tokens:
            return
        self.steps += 1
        self.tokens_generated += generated
        self._steps.inc()
        self._step.observe(seconds)
        self._overhead.observe(max(0.0, seconds - compute_s - sample_s))
        self._compute.inc(compute_s)
        self._sample.inc(sample_s)
        if decoding:
            self._batch.observe(decoding)
            if decoding > self._running_peak:
                self._running_peak = decoding
                self._running_max.set(decoding)
        self._generated.inc(generated)
        if prefill_tokens:
            self._prefill.inc(prefill_tokens)

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

    def flushed(self, reason: FlushReason) -> None:
        """A static batch begins to run."""
        self._batches_flushed.labels(reason).inc()

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

    def step_age_s(self, now_us: int) -> float:
        """For how long the step at hand has been running; 0 between steps."""
        began_us = self._began_us
        return (now_us - began_us) / 1e6 if began_us else 0.0

    def prefilled(self, microseconds: int) -> None:
        self._prefill_ms.observe(microseconds / 1000)

    def preempted(self, reason: PreemptionReason) -> None:
        self._preemptions.labels(reason).inc()

    def finished(self, record: AttemptRecord) -> None:
        self._recomputed.inc(record.recomputed_tokens)
        self._attempts.labels(record.finish_reason).inc()
        if record.completion_tokens > 1:
            self._decode_ms.observe(record.decode_us / 1000 / (record.completion_tokens - 1))

    def faulted(self) -> None:
        self._faults.inc()
