"""What a gateway and a worker say to each other.

One connection for each gateway, many attempts at once on it. The worker sends the news of all
sequences of a step in one frame, so that the cost of a frame is paid per step, not per token.

Gateway to worker: `Submit`, `Abort`, `Preempt`, `Resume`, `Count`, `Acknowledge`, `EndSession`, `Adjust`,
`Drain`.
Worker to gateway: `Hello` once, then `News`: accepted, rejected or preempted attempts, pieces of text, final
records; and `Status` at least every second.
"""

from typing import Literal

import msgspec

from headrace.caching.slots import KEPT_IN_FULL, CacheOrder
from headrace.engine.protocol import EngineInfo
from headrace.request.controls import Controls, Wait
from headrace.request.messages import Message
from headrace.request.sampling import Sampling

PROTOCOL_VERSION = 3

FinishReason = Literal["stop", "length", "aborted", "error"]


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this attempt. Answered by `Accepted` or `Rejected`, then pieces, then one `AttemptRecord`."""

    attempt_id: str
    tenant_id: str
    messages: list[Message]
    max_tokens: int | None
    """Most tokens to generate; None leaves it to the context."""
    sampling: Sampling
    stop: list[str]
    cache: CacheOrder = KEPT_IN_FULL
    """What of it may be kept, and who may find it."""
    batch_wait_ms: Wait | None = None
    """How long it may wait for company; None: as the model's settings and controls have it."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop this attempt at the next step. Its record still comes."""

    attempt_id: str


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Take this attempt out of the engine at the next step and keep it. Answered by `Preempted`, unless it has ended."""

    attempt_id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Go on with a preempted attempt, before all that wait. Its next piece continues the text told so far."""

    attempt_id: str


class Count(msgspec.Struct, frozen=True, tag=True):
    """How many tokens would this prompt be? Answered by `Counted` with the same number."""

    number: int
    messages: list[Message]


class Counted(msgspec.Struct, frozen=True, tag=True):
    number: int
    prompt_tokens: int | None
    """None if the messages make no prompt; for one far too long, a lower bound."""


class Acknowledge(msgspec.Struct, frozen=True, tag=True):
    """These records are in the ledger; the worker may forget them."""

    attempt_ids: list[str]


class EndSession(msgspec.Struct, frozen=True, tag=True):
    """Forget what is kept of a conversation."""

    session: str


class Adjust(msgspec.Struct, frozen=True, tag=True):
    """Work by these from now on."""

    controls: Controls


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no more attempts, finish what runs, then exit."""


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """The prompt was counted and fits."""

    attempt_id: str
    prompt_tokens: int
    max_tokens: int
    """The effective maximum: what was asked for, cut to what the context leaves."""


class Rejected(msgspec.Struct, frozen=True, array_like=True):
    """The attempt was not run. Nothing is charged."""

    attempt_id: str
    code: Literal["context_length_exceeded", "invalid_prompt", "draining"]
    message: str
    prompt_tokens: int = 0


class Preempted(msgspec.Struct, frozen=True, array_like=True):
    """The attempt computes nothing and holds no slot until it is resumed. It may still be aborted."""

    attempt_id: str
    completion_tokens: int


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Text that became certain in a step, and how many tokens the attempt has generated so far."""

    attempt_id: str
    text: str
    completion_tokens: int


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt's final count. Kept by the worker until acknowledged. Times in microseconds."""

    attempt_id: str
    tenant_id: str
    prompt_tokens: int
    """Tokens of the whole prompt."""
    prompt_tokens_computed: int = 0
    """How many of them went through the engine before the attempt ended."""
    prompt_tokens_cached: int = 0
    completion_tokens: int = 0
    finish_reason: FinishReason
    error: str | None = None
    kv_bytes_peak: int = 0
    kv_byte_seconds: int = 0
    queued_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    started_ts: int | None = None
    first_token_ts: int | None = None
    ended_ts: int
    preemptions: int = 0
    """How often it was taken out of its slot before its end."""
    recomputed_tokens: int = 0
    """Tokens computed again for that reason; they are in none of the counts above."""
    source: Literal["engine", "progress_file"] = "engine"


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker introduces itself when a gateway connects, with the records nobody has acknowledged."""

    protocol_version: int
    worker_id: str
    pid: int
    engine: EngineInfo
    load_us: int
    warm_up_us: int
    can_preempt: bool
    """Whether it takes `Preempt`: a static batch runs to its end."""
    unacknowledged: list[AttemptRecord]


class News(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What happened since the last frame. A record comes after its attempt's last piece, `preempted` came to pass
    before the pieces.
    """

    accepted: list[Accepted] = []
    rejected: list[Rejected] = []
    preempted: list[Preempted] = []
    pieces: list[Piece] = []
    records: list[AttemptRecord] = []


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker is alive, also during a long step."""

    running: int
    waiting: int
    suspended: int
    """Attempts that were preempted and have not been resumed."""
    attempts: list[str]
    """The receiver's attempts that are here and not over: their leases may be renewed."""
    step_age_s: float
    """For how long the engine's step at hand has been running; 0 between steps."""
    is_draining: bool


ToWorker = Submit | Abort | Preempt | Resume | Count | Acknowledge | EndSession | Adjust | Drain
FromWorker = Hello | News | Counted | Status
