"""How long a request waits for company: what its `latency_sla` stands for."""

from typing import Final

from headrace.request.latency import LatencySla

LOW_WAIT_MS: Final = 2.0
"""The least that still brings requests together which come at the same moment."""


def batch_wait_ms(
    latency_sla: LatencySla, *, interactive_wait_ms: float, offline_wait_ms: float
) -> float | None:
    """The wait window of one request, milliseconds; None leaves it to the worker, whose window can change meanwhile.

    `interactive_wait_ms` is the model's `batch_wait_ms`, `offline_wait_ms` its `offline_batch_wait_ms`. Whatever they
    are, `low` waits no longer than `normal`, and `normal` no longer than `throughput`.
    """
    if latency_sla == "low":
        return min(LOW_WAIT_MS, interactive_wait_ms)
    if latency_sla == "throughput":
        return max(offline_wait_ms, interactive_wait_ms)
    return None
