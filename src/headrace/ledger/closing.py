"""Which final record ends an operation, given what the gateway saw and what the engine counted."""

from typing import Final

import msgspec

from headrace.errors import Refusal
from headrace.ledger.records import CountSource, OperationRecord, Outcome, Reservation

MIB: Final = 1024 * 1024


class Ending(msgspec.Struct, frozen=True):
    """How an operation ended, as the gateway saw it."""

    status: int
    outcome: Outcome
    code: str | None = None
    """The error code the client got, if it got one."""


COMPLETED: Final = Ending(200, "completed")
CLIENT_CLOSED: Final = Ending(499, "client_closed")
SHUTDOWN: Final = Ending(503, "shutdown", "shutting_down")
RECOVERED: Final = Ending(500, "recovered")

_OUTCOMES: Final[dict[str, Outcome]] = {
    "worker_lost": "worker_lost",
    "engine_error": "worker_error",
    "internal_error": "worker_error",
    "upstream_error": "upstream_error",
    "deadline_exceeded": "timeout",
    "shutting_down": "shutdown",
}


def ending_of(refusal: Refusal) -> Ending:
    """The ending that a refusal makes; everything not listed is a plain `refused`."""
    return Ending(refusal.status, _OUTCOMES.get(refusal.code, "refused"), refusal.code)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation took from an engine. Times in microseconds, memory in bytes."""

    source: CountSource
    attempt_ids: tuple[str, ...] = ()
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    kv_bytes_peak: int = 0
    kv_byte_seconds: int = 0
    memory_source: str = "none"
    prefill_us: int = 0
    decode_us: int = 0
    start_ts: int | None = None
    first_token_ts: int | None = None


NOTHING: Final = Counts(source="none")


def close(
    reservation: Reservation, ending: Ending, counts: Counts, *, worker_id: str | None, end_ts: int
) -> OperationRecord:
    """The final record.

    Prompt tokens are those the engine computed: an operation left in prefill is charged for the part of
    its prompt that was read in, one that never reached an engine for nothing.
    """
    return OperationRecord(
        request_id=reservation.request_id,
        attempt_ids=counts.attempt_ids,
        tenant_id=reservation.tenant_id,
        user_id=reservation.user_id,
        api_key_id=reservation.api_key_id,
        model=reservation.model,
        worker_id=worker_id,
        mode=reservation.mode,
        prompt_tokens_estimated=reservation.prompt_tokens_estimated,
        prompt_tokens=counts.prompt_tokens,
        prompt_tokens_cached=counts.prompt_tokens_cached,
        completion_tokens=counts.completion_tokens,
        reserved_tokens=reservation.reserved_tokens,
        gpu_memory_mb=round(counts.kv_bytes_peak / MIB, 3),
        memory_source=counts.memory_source,
        kv_byte_seconds=counts.kv_byte_seconds,
        prefill_us=counts.prefill_us,
        decode_us=counts.decode_us,
        queue_enter_ts=reservation.queue_enter_ts,
        start_ts=counts.start_ts,
        first_token_ts=counts.first_token_ts,
        end_ts=end_ts,
        latency_us=max(0, end_ts - reservation.queue_enter_ts),
        status=ending.status,
        outcome=ending.outcome,
        finish_reason=counts.finish_reason,
        count_source=counts.source,
        trace_id=reservation.trace_id,
    )
