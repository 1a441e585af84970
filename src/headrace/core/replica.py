"""What the core and the gateway need of a replica, whatever computes behind it.

Two kinds: our own worker processes (`core.embedded`) and foreign OpenAI-compatible servers
(`core.upstream`). Each answers a request with an `Answer`.
"""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from headrace.api.chat import ChatCall
from headrace.caching.slots import CacheOrder
from headrace.config.settings import SamplingDefaults
from headrace.ledger.closing import Counts
from headrace.request.controls import Controls
from headrace.request.messages import Message


class Task(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One attempt to be made on a replica."""

    attempt_id: str
    tenant_id: str
    completion_id: str
    created_s: int
    model: str
    call: ChatCall
    max_tokens: int
    """Most tokens of the answer."""
    is_limited: bool
    """The maximum is a limit's and has to be kept, also by a foreign server that the client gave none."""
    sampling_defaults: SamplingDefaults
    """The model's, for what the client left open."""
    cache: CacheOrder
    """What of it a worker may keep."""
    body: bytes
    """The request as it came, for replicas that speak the same protocol."""
    traceparent: str


class ReplicaBusy(Exception):
    """The replica takes no more requests at the moment. The request goes back to the head of the queue."""

    def __init__(self, *, retry_after_s: float | None = None) -> None:
        super().__init__("the replica is full")
        self.retry_after_s = retry_after_s
        """When it wants to be asked again, if it said so."""


class Answer(Protocol):
    """One attempt under way on a replica.

    `begin`, then `complete` or `stream`; `abort` at any time; `counts` for the end, which always comes.
    Errors are `Refusal`s.
    """

    async def begin(self) -> None:
        """Wait until the replica has taken the prompt. A refusal here still has a status of its own.

        Raises `ReplicaBusy` if it takes none at the moment; then nothing ran.
        """
        ...

    @property
    def exact_total(self) -> int | None:
        """After `begin`: prompt and longest answer as the replica counted them; None if it does not say."""
        ...

    async def complete(self) -> bytes:
        """The whole answer as a JSON body. `counts` is ready when this returns."""
        ...

    def stream(self, *, quiet_s: float) -> AsyncIterator[bytes]:
        """SSE bytes as they come, `b""` whenever nothing came for `quiet_s` seconds.

        Ends after the last text; `counts` is ready then. What closes the stream is in `ending`.
        """
        ...

    def ending(self) -> bytes:
        """The last bytes of a stream that went well: finish reason, usage if asked for, `[DONE]`."""
        ...

    @property
    def prompt_tokens(self) -> int | None:
        """After `begin`: the prompt as the replica counted it; None if it does not say."""
        ...

    @property
    def tokens_told(self) -> int:
        """Tokens of the answer behind what `stream` has yielded so far."""
        ...

    @property
    def tokens_generated(self) -> int:
        """Tokens of the answer that are known to be there; 0 until the first, and where nobody says."""
        ...

    @property
    def is_recorded(self) -> bool:
        """Whether the replica keeps a record of the attempt until it is acknowledged."""
        ...

    @property
    def heard_us(self) -> int | None:
        """When the attempt was last known to be alive; None where others watch over that."""
        ...

    def abort(self) -> None:
        """Make the replica stop. Without effect on one that has ended."""
        ...

    @property
    def can_preempt(self) -> bool:
        """Whether `preempt` and `resume` work here."""
        ...

    def preempt(self, on_stopped: Callable[[int], None]) -> None:
        """Let the replica stop computing it and give its place to another; everything told so far stays true.

        `on_stopped` is called once, with the tokens generated so far, when the place is free. It is never called if
        the attempt ends first, or its worker dies. Until then `preempt` and `resume` may not be called again. The
        attempt is alive meanwhile: it may be aborted, and `heard_us` goes on.
        """
        ...

    def resume(self) -> None:
        """Go on, after `on_stopped`. The replica begins with it before all others that wait there."""
        ...

    async def counts(self) -> Counts:
        """What the attempt took, once that is final. Waits for a replica that is still stopping; cancelling the
        wait changes nothing.
        """
        ...

    def acknowledge(self) -> None:
        """The counts are in the ledger."""
        ...


class Replica(Protocol):
    """A place where requests run."""

    @property
    def replica_id(self) -> str: ...

    @property
    def worker_id(self) -> str:
        """The name that stays the same over restarts; the ledger and the admin API show it."""
        ...

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of prompt and answer; None where it is not known."""
        ...

    @property
    def kv_bytes_per_token(self) -> int | None:
        """What a token takes of its memory; None where that is not known."""
        ...

    @property
    def can_count(self) -> bool:
        """Whether `count_prompt` knows."""
        ...

    async def count_prompt(self, messages: list[Message]) -> int | None:
        """Tokens of a prompt; None if that is not known here."""
        ...

    def adjust(self, controls: Controls) -> None:
        """Work by these from now on."""
        ...

    def end_session(self, session: str) -> None:
        """Forget what is kept of a conversation."""
        ...

    def start(self, task: Task) -> Answer: ...
