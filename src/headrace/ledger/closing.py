"""Which final record ends an operation, given what the gateway saw and what the engine counted."""

from typing import Final, Literal

import msgspec

from headrace.errors import Refusal
from headrace.ledger.charging import charge
from headrace.ledger.history import TOKENS_MAX
from headrace.ledger.records import AbortPolicy, CountSource, OperationRecord, Outcome, Reservation

MIB: Final = 1024 * 1024

EndKind = Literal["settle", "void", "expire"]
"""How the journal calls the end of a reservation."""


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
EXPIRED: Final = Ending(500, "expired")
LATE: Final = Ending(500, "late")

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


class Counts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


def kind_of(record: OperationRecord) -> EndKind:
    """`expire`: nobody knows yet what was used. `void`: nothing ran. `settle`: everything else."""
    if record.outcome == "expired":
        return "expire"
    if record.count_source == "none" and not record.prompt_tokens and not record.completion_tokens:
        return "void"
    return "settle"


def close(
    reservation: Reservation,
    ending: Ending,
    counts: Counts,
    *,
    worker_id: str | None,
    end_ts: int,
    abort_policy: AbortPolicy = "generated",
    delivered_tokens: int | None = None,
) -> OperationRecord:
    """The final record.

    Prompt tokens are those the engine computed: an operation left in prefill is charged for the part of
    its prompt that was read in, one that never reached an engine for nothing. `delivered_tokens` are those
    of the answer that the client's connection got; None where nobody knows, as after a restart.
    """
    if counts.source == "upstream_usage":
        counts = _plausible(counts)
    charged_prompt_tokens, charged_completion_tokens = charge(
        abort_policy,
        ending.outcome,
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        delivered_tokens=delivered_tokens,
    )
    if delivered_tokens is None:
        # Settled as completed means that the whole answer is on its way.
        delivered_tokens = counts.completion_tokens if ending.outcome == "completed" else 0
    return OperationRecord(
        request_id=reservation.request_id,
        attempt_ids=counts.attempt_ids,
        tenant_id=reservation.tenant_id,
        user_id=reservation.user_id,
        department=reservation.department,
        api_key_id=reservation.api_key_id,
        model=reservation.model,
        worker_id=worker_id,
        priority=reservation.priority,
        mode=reservation.mode,
        prompt_tokens_estimated=reservation.prompt_tokens_estimated,
        prompt_tokens=counts.prompt_tokens,
        prompt_tokens_cached=counts.prompt_tokens_cached,
        completion_tokens=counts.completion_tokens,
        delivered_tokens=delivered_tokens,
        abort_policy=abort_policy,
        charged_prompt_tokens=charged_prompt_tokens,
        charged_completion_tokens=charged_completion_tokens,
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
        code=ending.code,
        finish_reason=counts.finish_reason,
        count_source=counts.source,
        trace_id=reservation.trace_id,
    )


def _plausible(counts: Counts) -> Counts:
    """A foreign server may say anything; what the ledger cannot hold must not keep the operation open."""
    if (
        0 <= counts.prompt_tokens_cached <= counts.prompt_tokens <= TOKENS_MAX
        and 0 <= counts.completion_tokens <= TOKENS_MAX
    ):
        return counts
    prompt_tokens = min(max(0, counts.prompt_tokens), TOKENS_MAX)
    return msgspec.structs.replace(
        counts,
        prompt_tokens=prompt_tokens,
        prompt_tokens_cached=min(max(0, counts.prompt_tokens_cached), prompt_tokens),
        completion_tokens=min(max(0, counts.completion_tokens), TOKENS_MAX),
    )
