"""One operation as the state machine sees it.

    WAITING ──▶ GRANTED ──▶ CLOSED
     │ │  ◀──────┘ │ (put back, or stopped for another)
     │ │           └──▶ EXPIRED ──▶ CLOSED   (the lease ran out; a late record may still come)
     │ └──▶ DROPPED ──▶ CLOSED               (lost its place in the queue; to be settled)
     └──▶ CLOSED

`TRANSITIONS` is the whole truth about what may follow what; anything else is a bug and raises.
"""

from enum import Enum
from typing import Final

from headrace.limits.account import Account
from headrace.limits.memory import NO_MEMORY, MemoryRate
from headrace.scheduling.prompt_keys import PromptKeys


class Phase(Enum):
    __hash__ = object.__hash__  # the members are single objects; Enum's own hash is a Python function

    WAITING = "waiting"
    DROPPED = "dropped"
    GRANTED = "granted"
    EXPIRED = "expired"
    CLOSED = "closed"


TRANSITIONS: Final = {
    Phase.WAITING: frozenset({Phase.GRANTED, Phase.DROPPED, Phase.CLOSED}),
    Phase.DROPPED: frozenset({Phase.CLOSED}),
    Phase.GRANTED: frozenset({Phase.WAITING, Phase.EXPIRED, Phase.CLOSED}),
    Phase.EXPIRED: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset[Phase](),
}


class IllegalTransition(AssertionError):
    """A bug of ours: something was released, granted or settled twice."""


class Entry:
    """What an accepted operation holds. Only `AdmissionController` changes it."""

    __slots__ = (
        "accounts",
        "flow",
        "held",
        "home",
        "is_dedicated",
        "is_exact",
        "is_stream",
        "is_throttled",
        "lease_until_us",
        "memory",
        "memory_rate",
        "model_id",
        "output_tokens",
        "phase",
        "prompt_keys",
        "prompt_tokens",
        "replica_id",
        "request_id",
        "tenant_id",
        "weight",
    )

    def __init__(
        self,
        *,
        request_id: str,
        tenant_id: str,
        model_id: str,
        is_stream: bool,
        accounts: tuple[Account, ...],
        held: int,
        is_exact: bool,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        memory: int = 0,
        memory_rate: MemoryRate = NO_MEMORY,
        flow: str | None = None,
        weight: float = 1.0,
        is_dedicated: bool = False,
        is_throttled: bool = False,
    ) -> None:
        self.request_id = request_id
        self.tenant_id = tenant_id
        self.model_id = model_id
        self.is_stream = is_stream
        self.accounts = accounts
        self.held = held
        """Tokens held at every account."""
        self.is_exact = is_exact
        """Whether the prompt's part of it is counted; otherwise it is an upper bound."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """So long an answer is reckoned with: what was predicted, or more once it has become longer."""
        self.memory = memory
        """Bytes that it holds at every account while it is granted: for these tokens, by `memory_rate`."""
        self.memory_rate = memory_rate
        self.is_throttled = is_throttled
        """It came while one of its accounts was throttled: it waits where others are refused."""
        self.flow = flow or tenant_id
        """Whose counter it is charged to in the queue, by `weight`."""
        self.weight = weight
        self.is_dedicated = is_dedicated
        """Runs on the replicas set aside for its tenant, where there are such."""
        self.phase = Phase.WAITING
        self.replica_id: str | None = None
        self.home: str | None = None
        """While stopped for another: the replica that keeps its state, where alone it can go on."""
        self.prompt_keys: PromptKeys | None = None
        """What it is recognised by, where there are several replicas and it may find or leave something there."""
        self.lease_until_us = 0
        """While granted: when it expires unless it is renewed."""

    def needed(self) -> int:
        """Bytes for the tokens that are reckoned with, and never for more than it may come to."""
        return self.memory_rate.bytes_of(min(self.prompt_tokens + self.output_tokens, self.held))

    def move(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise IllegalTransition(f"{self.request_id} cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase
