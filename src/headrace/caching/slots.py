"""Who gets which slot of an engine, and what becomes of the KV memory that was in it.

    empty ──▶ running ──▶ kept ──▶ running …          a finished sequence's tokens stay in their slot
                │           └──▶ parked, or dropped    until the slot or the time is needed
                └──▶ empty

A new sequence takes over the longest computed prefix there is:

1. *in place*: a kept slot whose tokens it continues, or that has little beyond the common part, which is lost,
2. *copy*: from any slot, running ones too, into a free one; the donor keeps everything,
3. *restore*: a parked one, into a free slot,
4. or it starts cold in a free slot.

If what it could take over is just being computed for another sequence, it waits for that: computing the
same prefix twice would make both later. Slots are freed least recently used first, plain ones before
those of sessions.
"""

from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec

from headrace.bounds import BLOCK_TOKENS
from headrace.caching.index import Holding, Match, PrefixIndex, Scope

Mode = Literal["full", "prefix_only", "off"]
Source = Literal["cold", "place", "copy", "restore"]

TAIL_TOKENS_MAX: Final = 2 * BLOCK_TOKENS
"""A kept slot is taken over in place if no more than this is lost by it, or nothing older could be freed."""
TAIL_PART_MAX: Final = 1 / 16
"""Where no slot is empty, a tail of so much of what is taken over may be lost as well, unless it is a conversation's. A copy
would put another slot's tokens aside: for 1 100 tokens of the built-in model both together take 45 ms. Computing a sixteenth
of them again takes 150, should anybody ask for it."""
LESS_TOKENS_MAX: Final = 16
"""There, a slot that can be taken over in place is preferred to one that has no more than so many tokens more."""


class CacheOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may be kept of a sequence, and who may find it."""

    mode: Mode = "full"
    group: str | None = None
    """Tenants of the same group share the prefixes that their requests mark as cacheable."""
    session: str | None = None
    """A conversation: kept longer, and freed later."""
    ttl_s: float = 600.0


KEPT_IN_FULL: Final = CacheOrder()
"""What applies where nothing is said."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that wants a slot."""

    tenant: str
    prompt: list[int]
    cacheable: int
    """So many of the first tokens are marked as a cacheable prefix; 0 if nothing is marked."""
    order: CacheOrder
    is_answered: bool = False
    """What follows the last token is known: all of it may be taken over."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sequence runs, and what it takes over. To be carried out in the order of the fields."""

    park: Holding | None = None
    """Save this slot's tokens outside before they are overwritten. It is no longer a slot's."""
    slot: int
    source: Source = "cold"
    donor: Holding | None = None
    """For `copy` a slot's, for `restore` a parked one."""
    length: int = 0
    """Tokens taken over. All but these are to be dropped from the slot."""
    is_session: bool = False
    """Whether they come from the same conversation."""


class Freed(msgspec.Struct, frozen=True):
    """A holding that is gone, and why."""

    holding: Holding
    reason: Literal["expired", "replaced", "pressure", "ended"]


class SlotBook:
    """The slots of one engine. `grain` cuts what may be taken over to multiples, 1 for any length. `is_shared`: a copy
    takes no memory of its own.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        grain: int = 1,
        is_shared: bool = False,
        can_park: Callable[[int], bool] = lambda tokens: False,
    ) -> None:
        self._grain = grain
        self._is_shared = is_shared
        self._can_park = can_park
        self._empty = list(range(num_slots - 1, -1, -1))
        """Free slots without tokens; the lowest is taken first: engines compute neighbouring slots together."""
        self._in_slots: dict[int, Holding] = {}
        self._parked: dict[str, Holding] = {}
        self._index = PrefixIndex()
        self._freed: list[Freed] = []
        self._num_running = 0
        self._next_expiry_us = 0

    # --- what there is ----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_free(self) -> int:
        """Slots that a sequence could get: empty, or only kept."""
        return len(self._empty) + len(self._in_slots) - self.num_running

    @property
    def kept_tokens(self) -> int:
        """Tokens in slots where nothing runs."""
        return sum(holding.num_valid for holding in self._in_slots.values() if not holding.is_running)

    def kept_by_tenant(self) -> Iterator[tuple[str, int]]:
        """(tenant, tokens) of each slot where nothing runs."""
        return ((one.tenant, one.num_valid) for one in self._in_slots.values() if not one.is_running)

    @property
    def holdings(self) -> Iterator[Holding]:
        yield from self._in_slots.values()
        yield from self._parked.values()

    def take_freed(self) -> list[Freed]:
        """What was let go since the last call."""
        freed, self._freed = self._freed, []
        return freed

    # --- coming and going -----------------------------------------------------------------------------

    def place(self, wanted: Wanted, now_us: int) -> Placement | None:
        """A slot for a sequence. None: it should wait, for a slot or for a prefix that is being computed."""
        self.expire(now_us)
        if not self.num_free:
            return None
        matches = [] if wanted.order.mode == "off" else self._index.find(wanted.prompt, _scopes(wanted))
        best, promised = self._best(matches, wanted)
        ready = self._usable(best.ready if best else 0, wanted)
        if promised is not None and self._usable(promised.length, wanted) >= ready + BLOCK_TOKENS:
            return None
        if best is None or ready < BLOCK_TOKENS:
            return self._start(wanted, now_us, park=self._free_slot(now_us, spare=None))
        if not self._empty and not self._is_shared:
            best = self._best_in_place(best, matches, wanted)
            ready = self._usable(best.ready, wanted)
        holding = best.holding
        is_session = _is_session(holding, wanted)
        if self._is_taken_in_place(holding, ready, wanted):
            slot = holding.slot
            self._drop(holding, "replaced")
            placement = Placement(slot=slot, source="place", length=ready, is_session=is_session)
        else:
            park = self._free_slot(now_us, spare=holding)
            placement = Placement(
                park=park,
                slot=self._empty[-1],
                source="restore" if holding.parked else "copy",
                donor=holding,
                length=ready,
                is_session=is_session,
            )
            holding.used_us = now_us
        return self._start(wanted, now_us, placement=placement)

    def shared_with_running(self, wanted: Wanted) -> int:
        """How many of a sequence's first tokens it could take over from one that runs."""
        if wanted.order.mode == "off":
            return 0
        matches = self._index.find(wanted.prompt, _scopes(wanted))
        return self._usable(
            max((match.ready for match in matches if match.holding.is_running), default=0), wanted
        )

    def computed(self, slot: int, num_tokens: int) -> None:
        """So many of the running sequence's first prompt tokens are computed now."""
        holding = self._in_slots[slot]
        assert holding.is_running
        holding.num_valid = min(num_tokens, len(holding.tokens)) // self._grain * self._grain

    def finish(self, slot: int, generated: list[int], wanted: Wanted, now_us: int) -> int:
        """A sequence has ended. `generated` are the tokens behind its prompt that are in the KV memory too.

        Returns how many tokens to keep in the slot; 0: none, it is empty.
        """
        holding = self._in_slots[slot]
        self._stopped(holding)
        order = wanted.order
        keep = holding.num_valid
        if order.mode == "off":
            keep = 0
        elif order.mode == "prefix_only":
            keep = min(keep, wanted.cacheable // self._grain * self._grain)
        elif self._grain == 1 and keep == len(wanted.prompt):
            keep += len(generated)
        if keep < BLOCK_TOKENS:
            self._drop(holding, "ended")
            return 0
        self._index.remove(holding)
        holding.tokens = (wanted.prompt + generated)[:keep]
        self._index.add(holding)
        holding.num_valid = keep
        holding.used_us = now_us
        holding.expires_us = now_us + int(order.ttl_s * 1e6)
        self._next_expiry_us = min(self._next_expiry_us, holding.expires_us)
        return keep

    def abandon(self, slot: int) -> None:
        """The slot's tokens are worth nothing: its engine failed."""
        holding = self._in_slots[slot]
        self._stopped(holding)
        self._drop(holding, "ended")

    # --- parked ---------------------------------------------------------------------------------------

    def parked(self, holding: Holding, name: str) -> None:
        """The tokens of a slot that `place` gave to another sequence are saved under this name."""
        assert holding.slot < 0 and name not in self._parked
        holding.parked = name
        self._parked[name] = holding
        self._index.add(holding)

    def adopt(self, holding: Holding) -> None:
        """Take in what an earlier life of the worker has parked."""
        assert holding.parked is not None
        self._parked[holding.parked] = holding
        self._index.add(holding)

    def forget_parked(
        self, holding: Holding, reason: Literal["expired", "replaced", "pressure", "ended"]
    ) -> None:
        """It is no longer there, or worth nothing. Without effect on one that was let go before."""
        if holding.parked in self._parked:
            self._drop(holding, reason)

    def parked_parts(self, holding: Holding) -> list[Holding]:
        """What is parked of the same tenant and goes no further than this, or is the whole of it and more."""
        matches = self._index.find(holding.tokens, [("tenant", holding.tenant)])
        return [
            match.holding
            for match in matches
            if match.holding.parked is not None
            and match.length >= min(len(match.holding.tokens), len(holding.tokens))
        ]

    def oldest_parked(self) -> Holding | None:
        """The one to give up first when there is no more room outside."""
        return min(self._parked.values(), key=_age, default=None)

    # --- time and memory ------------------------------------------------------------------------------

    def expire(self, now_us: int) -> None:
        """Let go of what nobody has asked for in its time."""
        if now_us < self._next_expiry_us:
            return
        for holding in list(self.holdings):
            if not holding.is_running and holding.expires_us <= now_us:
                self._drop(holding, "expired")
        self._next_expiry_us = min((one.expires_us for one in self.holdings if not one.is_running), default=0)

    def end_session(self, session: str) -> int:
        """Let go of a conversation's tokens where nothing runs; how many holdings those were."""
        ended = [one for one in self.holdings if one.session == session and not one.is_running]
        for holding in ended:
            self._drop(holding, "ended")
        return len(ended)

    def kept(self) -> list[Holding]:
        """Slots where nothing runs, the one to be given up first in front."""
        return sorted((one for one in self._in_slots.values() if not one.is_running), key=_age)

    def release(self, holding: Holding, *, is_parked: bool) -> None:
        """Give up a kept slot; what it held is parked, or lost."""
        assert holding.slot >= 0 and not holding.is_running
        if is_parked:
            self._vacate(holding)
        else:
            self._drop(holding, "pressure")

    # --- inside -----------------------------------------------------------------------------------------

    def _best(self, matches: list[Match], wanted: Wanted) -> tuple[Match | None, Match | None]:
        """The longest computed prefix, and the longest that is still being computed."""
        best = max(
            matches,
            key=lambda match: (
                match.ready,
                match.holding.session is not None and match.holding.session == wanted.order.session,
                not match.holding.parked,
                not match.holding.is_running,
            ),
            default=None,
        )
        promised = max(
            (one for one in matches if one.holding.is_running and one.ready < one.length),
            key=lambda match: match.length,
            default=None,
        )
        return best, promised

    def _best_in_place(self, best: Match, matches: list[Match], wanted: Wanted) -> Match:
        """One that is hardly shorter than the best and need not be copied, if there is such a one."""
        is_own = wanted.is_answered or _is_session(best.holding, wanted)
        if is_own or self._is_taken_in_place(best.holding, self._usable(best.ready, wanted), wanted):
            return best
        least = max(BLOCK_TOKENS, self._usable(best.ready, wanted) - LESS_TOKENS_MAX)
        near = (
            match
            for match in matches
            if (ready := self._usable(match.ready, wanted)) >= least
            and self._is_tail_short(match.holding, ready, wanted)
        )
        return max(near, key=lambda match: match.ready, default=best)

    def _usable(self, length: int, wanted: Wanted) -> int:
        """How much of a prompt may be taken over: an answer follows from a token that is computed."""
        most = len(wanted.prompt) - (not wanted.is_answered)
        return min(length, most) // self._grain * self._grain

    def _is_taken_in_place(self, holding: Holding, ready: int, wanted: Wanted) -> bool:
        if holding.slot < 0 or holding.is_running:
            return False
        if not self._empty and self.num_free == 1:
            return True  # there is no other slot to copy it to
        return self._is_tail_short(holding, ready, wanted)

    def _is_tail_short(self, holding: Holding, ready: int, wanted: Wanted) -> bool:
        """Whether a kept slot of the sequence's own tenant has so little beyond what is taken over that it may be lost."""
        if holding.slot < 0 or holding.is_running or holding.tenant != wanted.tenant:
            return False
        lost = holding.num_valid - ready
        if _is_session(holding, wanted) or lost <= TAIL_TOKENS_MAX:
            return True
        is_dear = self._empty or self._is_shared or holding.session is not None
        return not is_dear and lost <= TAIL_PART_MAX * ready

    def _free_slot(self, now_us: int, *, spare: Holding | None) -> Holding | None:
        """Make sure that a slot is empty. Returns what has to be parked for it, if anything."""
        if self._empty:
            return None
        victim = next((one for one in self.kept() if one is not spare), spare)
        assert victim is not None and not victim.is_running
        if self._can_park(victim.num_valid):
            self._vacate(victim)
            return victim
        self._drop(victim, "pressure")
        return None

    def _start(
        self,
        wanted: Wanted,
        now_us: int,
        *,
        park: Holding | None = None,
        placement: Placement | None = None,
    ) -> Placement:
        if placement is None:
            placement = Placement(park=park, slot=self._empty[-1])
        self._empty.remove(placement.slot)
        order = wanted.order
        holding = Holding(
            tenant=wanted.tenant,
            # While it runs, no more of it may be found than may be kept.
            tokens=wanted.prompt[: wanted.cacheable] if order.mode == "prefix_only" else wanted.prompt,
            slot=placement.slot,
            group=order.group,
            shared=wanted.cacheable,
            session=order.session,
        )
        holding.is_running = True
        self._num_running += 1
        holding.used_us = now_us
        self._in_slots[placement.slot] = holding
        if order.mode == "off":
            holding.tokens = []
        holding.num_valid = min(placement.length, len(holding.tokens))
        self._index.add(holding)
        return placement

    def _stopped(self, holding: Holding) -> None:
        assert holding.is_running
        holding.is_running = False
        self._num_running -= 1

    def _vacate(self, holding: Holding) -> None:
        """Take a holding out of its slot without losing what it says."""
        self._index.remove(holding)
        del self._in_slots[holding.slot]
        self._put_empty(holding.slot)
        holding.slot = -1

    def _drop(self, holding: Holding, reason: Literal["expired", "replaced", "pressure", "ended"]) -> None:
        self._index.remove(holding)
        if holding.parked is not None:
            del self._parked[holding.parked]
        else:
            del self._in_slots[holding.slot]
            self._put_empty(holding.slot)
        self._freed.append(Freed(holding, reason))

    def _put_empty(self, slot: int) -> None:
        self._empty.append(slot)
        self._empty.sort(reverse=True)


def _is_session(holding: Holding, wanted: Wanted) -> bool:
    """Whether it is of the conversation that the sequence belongs to."""
    return wanted.order.session is not None and holding.session == wanted.order.session


def _scopes(wanted: Wanted) -> list[Scope]:
    """Where it may look for its beginning."""
    own: Scope = ("tenant", wanted.tenant)
    return [own] if wanted.order.group is None else [own, ("group", wanted.order.group)]


def _age(holding: Holding) -> tuple[bool, int]:
    """Plain ones before conversations, then the least recently used."""
    return holding.session is not None, holding.used_us
