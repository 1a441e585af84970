"""Accept, grant, renew, settle, expire: one owner, one thread, every decision complete or not made at all.

    accept ──▶ dispatch (grant) ──▶ renew … ──▶ settle
      │         ▲   └─ put_back, preempt ─┘ └──▶ expire ──▶ settle_late
      └────────────┴───────────────────────▶ settle

Accepting takes the rates and holds the tokens; granting takes concurrency, streams and a place on a replica,
so a waiting request holds neither; memory too is taken with the grant. A refusal changes nothing, but that one for
memory throttles who was refused: for a while its requests wait where they would be refused, at half its share.
`headrace.admission.invariants` says what is true between any two calls.
"""

from collections.abc import Callable, Iterator

import msgspec

from headrace.admission.accounts import Accounts
from headrace.admission.applicant import (
    Applicant,
    account_of,
    ask_of,
    clamped_to_memory,
    is_too_large_for_memory,
    shortened_to_fit,
)
from headrace.admission.entry import Entry, IllegalTransition, Phase
from headrace.admission.size import Size, size_of
from headrace.limits import book, memory_book
from headrace.limits.book import Ask, Excess
from headrace.scheduling.explain import Explanation, Reason
from headrace.scheduling.explained_queue import WaitingRequest
from headrace.scheduling.fair import FairQueue

TOKEN_LIMITS = frozenset({"tpm", "prompt_tokens", "total_tokens", "memory"})
"""Limits that a bound may exceed where the exact count would not."""
THROTTLED_LEVELS = frozenset({"tenant", "department", "user", "tenant_model", "key"})
"""Where a refusal for memory slows down who was refused. What all tenants share is no one's fault."""
OUTPUT_STEP = 64
"""An answer that becomes longer than was predicted takes memory for so many tokens at once."""


class LimitReached(Exception):
    """A limit stands against the request."""

    def __init__(self, excess: Excess) -> None:
        super().__init__(excess.limit_type)
        self.excess = excess


class NeedsCount(Exception):
    """The bound of the prompt does not fit; its exact count may."""


class NeedsTrim(Exception):
    """The request would fit if others held no more than they need: their prompts should be counted."""

    def __init__(self, entries: list[Entry]) -> None:
        super().__init__(f"{len(entries)} hold a bound")
        self.entries = entries


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """A request that was accepted."""

    entry: Entry
    size: Size
    evicted: list[Entry]
    """Other tenants' waiting requests that gave up their places for this one. They are still to be settled."""


class Took(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an operation really took of its replica, in tokens. The fair queue charges that, whatever the bill says."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """So many of the prompt's were there already."""
    output_tokens: int = 0


TOOK_NOTHING = Took()


class AdmissionController:
    """All queues, accounts and open operations of one core."""

    def __init__(self, *, lease_us: int, memory_throttle_us: int = 0) -> None:
        """`memory_throttle_us`: for so long a refusal for memory slows an account down."""
        self._lease_us = lease_us
        self._memory_throttle_us = memory_throttle_us
        self.accounts = Accounts()
        self.queues: dict[str, FairQueue[Entry]] = {}
        self.entries: dict[str, Entry] = {}
        """Operations that are accepted and neither settled nor expired, by request id."""
        self.expired: dict[str, Entry] = {}
        """Operations whose lease ran out and whose record may still come."""
        self._bounds: dict[str, Entry] = {}
        """Open operations that hold an upper bound of a prompt that could be counted."""
        self._may_start: dict[str, Callable[[Entry], bool]] = {}
        """By model: whether a waiting request may be granted a place now."""

    def add_model(
        self, model_id: str, queue: FairQueue[Entry], *, is_bound: Callable[[Entry], bool] | None = None
    ) -> None:
        """A model with its queue. `is_bound` says whether there are replicas where a request may not run: it lets
        others pass while the rest is full.
        """
        assert model_id not in self.queues
        self.queues[model_id] = queue

        def may_start(entry: Entry) -> bool:
            return _may_start(entry) and (is_bound is None or not is_bound(entry) or queue.has_place(entry))

        self._may_start[model_id] = may_start

    def remove_replica(self, model_id: str, replica_id: str, *, successor_id: str | None) -> list[Entry]:
        """A replica is gone. Returns those who waited in vain: no other is left or expected. They are still
        to be settled, like those who ran on it.
        """
        queue = self.queues[model_id]
        if successor_id is not None:
            queue.expect(successor_id)
        queue.give_up(replica_id)
        hopeless = queue.drop_hopeless()
        for entry in hopeless:
            entry.move(Phase.DROPPED)
        return hopeless

    # --- accept ---------------------------------------------------------------------------------------

    def accept(self, applicant: Applicant, now_us: int) -> Admitted:
        """Check every limit, hold the tokens and take a place in the queue: all or nothing.

        Raises `NeedsCount`, `NeedsTrim`, `LimitReached`, `QueueFull`, `NoReplica`; then nothing has changed, but that
        an account that had no memory for it is throttled.
        """
        request_id = applicant.request_id
        if request_id in self.entries:
            raise IllegalTransition(f"{request_id} is accepted a second time")
        accounts = applicant.accounts
        size, ask = self._fit(applicant, now_us)
        demand = applicant.demand
        entry = Entry(
            request_id=request_id,
            tenant_id=applicant.tenant_id,
            model_id=applicant.model_id,
            is_stream=applicant.is_stream,
            accounts=accounts,
            held=size.total,
            is_exact=applicant.is_exact,
            prompt_tokens=applicant.prompt_tokens,
            output_tokens=ask.output_tokens,
            memory=ask.memory,
            memory_rate=applicant.memory_rate,
            flow=None if demand is None else demand.flow,
            weight=1.0 if demand is None else demand.weight,
            is_dedicated=applicant.is_dedicated,
            is_throttled=applicant.is_throttled,
        )
        evicted = self.queues[applicant.model_id].enter(
            entry,
            tenant=entry.tenant_id,
            tokens=size.total,
            may_start=_may_start,
            demand=demand,
            now_us=now_us,
        )
        for other in evicted:
            other.move(Phase.DROPPED)
        book.hold(accounts, ask, now_us)
        self.entries[request_id] = entry
        if applicant.can_be_counted and not applicant.is_exact:
            self._bounds[request_id] = entry
        return Admitted(entry, size, evicted)

    def take_back(self, entry: Entry, now_us: int) -> None:
        """Undo an acceptance that could not be journalled, at the same instant: as if it had never been."""
        for account in entry.accounts:
            if account.limits.rps is not None:
                account.rate.give_back(account.limits.rps)
        self.settle(entry, used=0, now_us=now_us)

    # --- grant ----------------------------------------------------------------------------------------

    def dispatch(self, model_id: str, now_us: int) -> Iterator[Entry]:
        """Grant places to those who may start, next one first. `entry.replica_id` says where."""
        queue = self.queues[model_id]
        for entry, replica_id in queue.dispatch(self._may_start[model_id], now_us=now_us):
            entry.move(Phase.GRANTED)
            entry.home = None
            entry.replica_id = replica_id
            entry.lease_until_us = now_us + self._lease_us
            book.grant(entry.accounts, is_stream=entry.is_stream, memory=entry.memory)
            yield entry

    def explain(self, entry: Entry, *, number_max: int) -> Explanation | None:
        """Why a request waits and where it stands, exactly among the first `number_max`; None if it does not wait."""
        found = self.queues[entry.model_id].why(entry, _may_start, number_max=number_max)
        return None if found is None else _explained(entry, found)

    def first_waiting(self, model_id: str, *, number_max: int) -> list[WaitingRequest[Entry]]:
        """The first ones in the expected order."""
        return _all_explained(self.queues[model_id].in_expected_order(_may_start, number_max=number_max))

    def waiting_of(
        self, model_id: str, tenant: str, *, number_max: int, looked_at_max: int
    ) -> list[WaitingRequest[Entry]]:
        """A tenant's own, with exact positions where they are among the first `looked_at_max` of all."""
        found = self.queues[model_id].waiting_requests_of(
            tenant, _may_start, number_max=number_max, looked_at_max=looked_at_max
        )
        return _all_explained(found)

    def put_back(self, entry: Entry) -> None:
        """The replica was full after all: the request is the next one again, and the replica is paused
        until `FairQueue.pause` says otherwise.
        """
        assert entry.replica_id is not None
        entry.move(Phase.WAITING)
        replica_id, entry.replica_id = entry.replica_id, None
        book.release(entry.accounts, is_stream=entry.is_stream, memory=entry.memory)
        queue = self.queues[entry.model_id]
        queue.put_back(entry, replica_id, tenant=entry.tenant_id, tokens=entry.held)
        queue.pause(replica_id, is_paused=True)

    def wants_preemption(self, model_id: str) -> tuple[Entry, Entry] | None:
        """(granted request to be stopped, waiting one to have its place), if the queue's rule wants that now."""
        return self.queues[model_id].preemption(_may_start)

    def preempt(self, entry: Entry, *, output_tokens: int, in_favour_of: Entry) -> None:
        """A granted request has been stopped after so many tokens of its answer. It waits for a place where it was,
        and goes on there; the one it was stopped for is the next one, if it still waits.
        """
        assert entry.replica_id is not None
        entry.move(Phase.WAITING)
        entry.home, entry.replica_id = entry.replica_id, None
        book.release(entry.accounts, is_stream=entry.is_stream, memory=entry.memory)
        self.queues[entry.model_id].preempted(
            entry, entry.home, tokens=entry.held, output_tokens=output_tokens, in_favour_of=in_favour_of
        )

    def trim(self, entry: Entry, total: int, *, prompt_tokens: int | None = None) -> bool:
        """The exact prompt is known: hold no more than it and the longest answer need. Whether that has freed memory
        for others.
        """
        assert total >= 0
        if entry.phase not in (Phase.WAITING, Phase.GRANTED):
            return False
        entry.is_exact = True
        self._bounds.pop(entry.request_id, None)
        if total < entry.held:
            book.trim(entry.accounts, entry.held - total)
            if entry.phase is Phase.WAITING:
                self.queues[entry.model_id].resize(entry, total)
            entry.held = total
        if prompt_tokens is not None and prompt_tokens < entry.prompt_tokens:
            entry.prompt_tokens = prompt_tokens
        return self._resize_memory(entry) < 0

    def grow(self, entry: Entry, output_tokens: int) -> None:
        """So many tokens of a granted request's answer are there: where that is more than was predicted, it needs more
        memory than it holds. It gets that, whatever the limits say; newcomers find the less.
        """
        if entry.phase is Phase.GRANTED and output_tokens > entry.output_tokens:
            entry.output_tokens = -(-output_tokens // OUTPUT_STEP) * OUTPUT_STEP
            self._resize_memory(entry)

    def renew(self, entry: Entry, alive_us: int) -> None:
        """Somebody saw the attempt alive at this time."""
        if entry.phase is Phase.GRANTED:
            entry.lease_until_us = max(entry.lease_until_us, alive_us + self._lease_us)

    # --- end --------------------------------------------------------------------------------------------

    def settle(self, entry: Entry, *, used: int, now_us: int, took: Took = TOOK_NOTHING) -> None:
        """End an operation: what it holds becomes what it used, its place is free again."""
        self._leave(entry, Phase.CLOSED, took)
        book.settle(entry.accounts, held=entry.held, used=used, now_us=now_us)

    def due(self, now_us: int) -> list[Entry]:
        """Operations whose lease has run out."""
        return [
            entry
            for entry in self.entries.values()
            if entry.phase is Phase.GRANTED and entry.lease_until_us <= now_us
        ]

    def expire(self, entry: Entry, now_us: int) -> None:
        """End an operation that nobody has seen alive during its lease. What it used is not known yet."""
        self._leave(entry, Phase.EXPIRED, TOOK_NOTHING)
        book.settle(entry.accounts, held=entry.held, used=0, now_us=now_us)
        self.expired[entry.request_id] = entry

    def settle_late(self, entry: Entry, *, used: int, now_us: int, took: Took = TOOK_NOTHING) -> None:
        """The record of an expired operation came after all: what it used counts from now on."""
        entry.move(Phase.CLOSED)
        del self.expired[entry.request_id]
        queue = self.queues[entry.model_id]
        cost = queue.policy.prices.cost(
            prompt_tokens=took.prompt_tokens,
            cached_tokens=took.cached_tokens,
            output_tokens=took.output_tokens,
        )
        queue.settle_late(entry.flow, cost=cost, weight=entry.weight)
        book.settle(entry.accounts, held=0, used=used, now_us=now_us)

    def forget(self, entry: Entry) -> None:
        """No record of an expired operation will come any more."""
        entry.move(Phase.CLOSED)
        del self.expired[entry.request_id]

    def _resize_memory(self, entry: Entry) -> int:
        """Let an entry have the memory that is now reckoned with. By how many bytes what is held has changed."""
        more = entry.needed() - entry.memory
        if not more:
            return 0
        entry.memory += more
        if entry.phase is not Phase.GRANTED:
            return 0
        memory_book.resize(entry.accounts, more)
        return more

    def _fit(self, applicant: Applicant, now_us: int) -> tuple[Size, Ask]:
        """How large the request may become, so that no limit stands against it."""
        accounts = applicant.accounts
        room = book.tightest_room(accounts, now_us)
        size = size_of(
            prompt_tokens=applicant.prompt_tokens,
            max_tokens=applicant.max_tokens,
            default_max_tokens=applicant.default_max_tokens,
            context_tokens=applicant.context_tokens,
            room=room,
        )
        ask = ask_of(applicant, size)
        excess = book.decide(accounts, ask, now_us, room=room)
        if excess is None:
            return size, ask
        self._ask_for_counts(applicant, excess)
        if applicant.max_tokens is None and is_too_large_for_memory(excess):
            smaller = clamped_to_memory(applicant, size)
            if smaller is not None:
                size, ask = smaller, ask_of(applicant, smaller)
                excess = book.decide(accounts, ask, now_us, room=room)
                if excess is None:
                    return size, ask
        if applicant.may_be_shortened and excess.limit_type in TOKEN_LIMITS:
            shorter = shortened_to_fit(applicant, size, room)
            if shorter is not None:
                ask = ask_of(applicant, shorter)
                if book.decide(accounts, ask, now_us, room=room) is None:
                    return shorter, ask
        self._throttle(applicant, excess, now_us)
        raise LimitReached(excess)

    def _throttle(self, applicant: Applicant, excess: Excess, now_us: int) -> None:
        """Slow down who is refused memory, unless the request could never have had it."""
        if excess.limit_type != "memory" or excess.level not in THROTTLED_LEVELS or excess.free_at_us is None:
            return
        if self._memory_throttle_us:
            self.accounts.throttle(
                account_of(applicant, excess), now_us=now_us, until_us=now_us + self._memory_throttle_us
            )

    def _ask_for_counts(self, applicant: Applicant, excess: Excess) -> None:
        """A bound must not refuse what the exact counts would let pass: neither its own nor others'."""
        if excess.limit_type not in TOKEN_LIMITS:
            return
        if applicant.can_be_counted and not applicant.is_exact:
            raise NeedsCount
        is_memory = excess.limit_type == "memory"
        if (
            applicant.is_final
            or is_too_large_for_memory(excess)
            or not (is_memory or excess.limit_type == "tpm")
        ):
            return
        account = account_of(applicant, excess)
        bounds = [
            entry
            for entry in self._bounds.values()
            if account in entry.accounts and (not is_memory or entry.phase is Phase.GRANTED)
        ]
        if bounds:
            raise NeedsTrim(bounds)

    def _leave(self, entry: Entry, phase: Phase, took: Took) -> None:
        was = entry.phase
        entry.move(phase)
        del self.entries[entry.request_id]
        self._bounds.pop(entry.request_id, None)
        queue = self.queues[entry.model_id]
        if was is Phase.WAITING:
            queue.leave(entry)
        elif was is Phase.GRANTED:
            assert entry.replica_id is not None
            queue.settle(
                entry,
                prompt_tokens=took.prompt_tokens,
                cached_tokens=took.cached_tokens,
                output_tokens=took.output_tokens,
            )
            queue.release(entry.replica_id)
            book.release(entry.accounts, is_stream=entry.is_stream, memory=entry.memory)


def _may_start(entry: Entry) -> bool:
    return book.may_start(
        entry.accounts,
        is_stream=entry.is_stream,
        memory=entry.memory,
        is_begun=entry.home is not None,
    )


def _explained(entry: Entry, explanation: Explanation) -> Explanation:
    """The queue knows only that limits of its own hold a request back; whether it is memory is known here."""
    if explanation.reason != "own_limit":
        return explanation
    if memory_book.fits(entry.accounts, memory=entry.memory, is_begun=entry.home is not None):
        return explanation
    reason: Reason = "throttled" if entry.is_throttled else "memory_limit"
    return msgspec.structs.replace(explanation, reason=reason)


def _all_explained(found: list[WaitingRequest[Entry]]) -> list[WaitingRequest[Entry]]:
    return [
        msgspec.structs.replace(one, explanation=_explained(one.ticket, one.explanation)) for one in found
    ]
