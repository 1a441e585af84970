"""What the ledger knows of an operation: the reservation that opens it, the record that ends it.

Every operation leaves exactly one final record, whatever happens to it. The field names are the
public ones: `GET /v1/usage/{request_id}` and the admin API return them as they stand here.

Tokens are counts, times are microseconds since 1970 UTC, memory is bytes unless the name says other.
They hold nothing that could lead back to them, so the garbage collector need not know them (`gc=False`).
"""

from typing import Literal

import msgspec

from headrace.config.scheduling import ServiceClass

Outcome = Literal[
    "completed",  # the model ended its answer: end of sequence, stop string or token limit
    "client_closed",  # the client went away
    "refused",  # never accepted: limits, queue, validation after the reservation
    "worker_lost",  # the worker process died or its connection broke
    "worker_error",  # the worker reported a fault
    "upstream_error",  # a foreign upstream failed
    "timeout",  # a deadline passed
    "shutdown",  # headrace itself stopped
    "recovered",  # headrace died while it ran; closed from journal and progress file at the next start
    "expired",  # the lease ran out; what it used is not known yet
    "late",  # the lease had run out; what it used became known afterwards
]

CountSource = Literal[
    "engine",  # the worker's final record, counted by the engine loop
    "progress_file",  # the worker died; its progress file said how far it was
    "upstream_usage",  # a foreign upstream's own usage figures
    "chunks",  # a foreign upstream that broke or was left early: content chunks counted by the gateway
    "unknown",  # a foreign upstream that answered in full and gave no usage figures; counts are zero
    "none",  # never reached an engine; counts are zero
]

AbortPolicy = Literal[
    "generated",  # what the engine computed and generated
    "delivered",  # of the answer only what the client's connection got; nothing got, nothing charged
    "free_on_error",  # nothing where the fault is ours or the engine's, else as `generated`
]
"""What an operation that was not completed is charged (`ledger.charging`)."""


class Reservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Opens an operation. Journalled before anything is sent to a worker."""

    request_id: str
    tenant_id: str
    api_key_id: str
    """The key's `jti`."""
    user_id: str | None = None
    department: str | None = None
    model: str
    mode: Literal["stream", "complete"]
    prompt_tokens_estimated: int
    reserved_tokens: int
    priority: ServiceClass = "interactive"
    queue_enter_ts: int
    trace_id: str


class OperationRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The one final row of an operation."""

    request_id: str
    num_requests: int = 1
    """More than one: a row for so many refusals of the same kind; its id is that of the first."""
    attempt_ids: tuple[str, ...] = ()
    tenant_id: str
    user_id: str | None = None
    department: str | None = None
    api_key_id: str
    model: str
    version: str | None = None
    pool: str | None = None
    worker_id: str | None = None
    gpu_id: str | None = None
    adapter: str | None = None
    priority: ServiceClass = "interactive"
    """The class it waited in."""
    mode: Literal["stream", "complete"] = "complete"
    prompt_tokens_estimated: int = 0
    prompt_tokens: int = 0
    """Counted by the engine; cached ones included."""
    prompt_tokens_cached: int = 0
    prompt_tokens_injected: int = 0
    completion_tokens: int = 0
    delivered_tokens: int = 0
    """Tokens of the answer that were handed to the client's connection; 0 also where that is not known."""
    abort_policy: AbortPolicy = "generated"
    charged_prompt_tokens: int = 0
    charged_completion_tokens: int = 0
    """What limits and bills count. Never more than what was used."""
    refunded: bool = False
    """An administrator took the charge back; what was used still stands."""
    reserved_tokens: int = 0
    gpu_memory_mb: float = 0.0
    """Peak KV memory of the operation, in MiB."""
    memory_source: str = "none"
    """`kv_geometry` (computed from the model's KV layout) or `none`."""
    kv_byte_seconds: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    queue_enter_ts: int
    start_ts: int | None = None
    first_token_ts: int | None = None
    end_ts: int
    latency_us: int
    status: int
    """HTTP status; 499 when the client went away."""
    outcome: Outcome
    code: str | None = None
    """The error code the client got, if it got one."""
    finish_reason: str | None = None
    count_source: CountSource
    policy_actions: tuple[str, ...] = ()
    price_version: str | None = None
    cost: str | None = None
    trace_id: str = ""


class Refund(msgspec.Struct, frozen=True, kw_only=True):
    """Takes back what an operation that has ended is charged."""

    request_id: str
    reason: str
    actor: str
    """The `jti` of the admin key, or the name of a role."""
    at_ts: int
