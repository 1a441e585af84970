"""What the engine loop measures of itself, as Prometheus metrics and as the age of the running step.

Written by the engine thread; the age is read by the network thread for the heartbeat.
"""

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.scheduling.static_batch import FlushReason
from headrace.worker.attempt_stats import AttemptStats
from headrace.worker.cache_stats import CacheStats
from headrace.worker.memory_stats import MemoryStats

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
_STEP_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)
_OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class StepStats:
    """Counters of the engine loop, and those of what it computes for: attempts, what is kept, memory."""

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
        self._suspended = Gauge(
            "headrace_worker_suspended", "Attempts preempted and not resumed yet.", registry=registry
        )
        self.attempts = AttemptStats(registry)
        self.cache = CacheStats(registry, kv_bytes_per_token=kv_bytes_per_token)
        self.memory = MemoryStats(registry)
        self._batches_flushed = Counter(
            "headrace_worker_batches_flushed",
            "Static batches that began to run, by what closed them: nobody more could join, the next request did not fit, "
            "the wait window ended.",
            ["reason"],
            registry=registry,
        )
        for flush_reason in get_args(FlushReason):
            self._batches_flushed.labels(flush_reason)
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

    def flushed(self, reason: FlushReason) -> None:
        """A static batch begins to run."""
        self._batches_flushed.labels(reason).inc()

    def step_age_s(self, now_us: int) -> float:
        """For how long the step at hand has been running; 0 between steps."""
        began_us = self._began_us
        return (now_us - began_us) / 1e6 if began_us else 0.0

    def faulted(self) -> None:
        self._faults.inc()
