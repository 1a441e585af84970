"""Gives sequences their slots: carries out on the engine what the cache's rules decide.

`SlotBook` says which slot, what is taken over and what has to go; here are the engine calls, the files
outside, the clock and the counts. Every call that changes what a slot holds is noted in `CellBook`.
"""

from collections.abc import Sequence as Many

from headrace import bounds
from headrace.bounds import BLOCK_TOKENS
from headrace.caching.cells import CellBook
from headrace.caching.index import Holding
from headrace.caching.slots import Placement, SlotBook
from headrace.clock import Clock
from headrace.engine.protocol import Engine, Forward, Span
from headrace.errors import EngineFault
from headrace.worker.messages import KeptSession
from headrace.worker.parking import Parking
from headrace.worker.sequence import Sequence
from headrace.worker.stats import StepStats


class EngineSlots:
    """The slots of one engine. Belongs to the engine thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock,
        stats: StepStats,
        parking: Parking | None = None,
        grain: int = 1,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._stats = stats.cache
        self._parking = parking
        self.adopted_sessions: list[KeptSession] = []
        """Conversations of which an earlier life has put something aside, the one used last in front."""
        info = engine.info
        self.cells = CellBook(
            info.sequences,
            num_cells=info.kv_tokens,
            slot_cells_max=info.context_tokens,
            pool_cells=info.kv_tokens if info.is_kv_unified else None,
        )
        self.book = SlotBook(
            info.sequences, grain=grain, is_shared=info.is_kv_unified, can_park=self._can_park
        )
        if parking is not None:
            self._adopt(parking)

    def open(self, one: Sequence) -> bool:
        """Give a waiting sequence a slot with all that can be taken over. False: it has to wait."""
        now_us = self._clock.monotonic_us()
        placement = self.book.place(one.wanted, now_us)
        self._clean()
        if placement is None:
            return False
        slot = placement.slot
        # Before anything is put aside, which may need its place.
        state = self._load(placement)
        if placement.park is not None:
            self._park(placement.park, slot)
            self._empty(slot)
        self.make_room(self._new_cells(one, placement), spare=placement.donor)
        held = self._take_over(placement, state)
        if held != placement.length:
            self.book.computed(slot, held)
        self._engine.open(slot, one.sampling, held=held, drawn=one.generated)
        self.cells.cut(slot, held)
        self.cells.started(slot)
        is_first = not one.has_run
        one.opened(slot, held=held, now_us=now_us, wall_us=self._clock.wall_us())
        if is_first:
            self._count(one, placement)
        return True

    def _count(self, one: Sequence, placement: Placement) -> None:
        self._stats.placed(
            prompt_tokens=len(one.prompt),
            cached_tokens=one.held,
            has_session=one.order.session is not None,
            is_session=placement.is_session and one.held > 0,
            source=placement.source if one.held else "cold",
        )

    def has_room(self, num_claimed: int) -> bool:
        """Whether one more sequence could get a slot beside so many that have a claim to one."""
        return self.book.num_free > num_claimed

    def shared_with_running(self, one: Sequence) -> int:
        """How many of the cells that a waiting sequence needs are held by a running one and can be shared."""
        return self.book.shared_with_running(one.wanted) if self.cells.is_shared else 0

    def make_room(self, tokens: int, *, spare: Holding | None = None) -> bool:
        """Let kept prefixes go, least recently used first, until so many cells are free. False: they are not."""
        if self.cells.free >= tokens:
            return True
        for holding in self.book.kept():
            if holding is not spare:
                self._evict(holding)
                if self.cells.free >= tokens:
                    return True
        return False

    def forward(self, spans: Many[Span]) -> Forward:
        """Compute. Raises `EngineFault`; then the sequences have to be closed as not sound."""
        done = self._engine.forward(spans)
        if self.cells.is_shared:  # in the order in which the engine places them
            spans = sorted(spans, key=lambda one: (1, 0) if len(one.tokens) > 1 else (0, one.slot))
        for span in spans:
            self.cells.grew(span.slot, len(span.tokens))
        return done

    def engine_holds(self) -> tuple[list[int], int]:
        """Tokens of each slot and cells in use by the engine's own books. Slow."""
        engine = self._engine
        return [engine.held(slot) for slot in range(engine.info.sequences)], engine.cells_used()

    def computed(self, one: Sequence) -> None:
        """A part of the sequence's prompt has been computed."""
        self.book.computed(one.slot, one.held)

    def close(self, one: Sequence, *, is_sound: bool) -> None:
        """A sequence has left. What it computed is kept unless the engine failed."""
        slot, one.slot = one.slot, -1
        if is_sound:
            keep = self.book.finish(slot, one.kept_tokens, one.wanted, self._clock.monotonic_us())
        else:
            self.book.abandon(slot)
            keep = 0
        self._engine.close(slot, keep=keep)
        self.cells.cut(slot, keep)
        self.cells.stopped(slot)
        self._clean()

    def end_session(self, session: str) -> None:
        self.book.end_session(session)
        self._clean()

    def park_all(self) -> None:
        """The worker ends in order: put aside what another life can use."""
        for holding in reversed(self.book.kept()):
            if self._can_park(holding.num_valid):
                self._evict(holding)
        if self._parking is not None:
            self._parking.close()

    # --- inside -----------------------------------------------------------------------------------------

    def _load(self, placement: Placement) -> bytes | None:
        """The parked state that is to be restored, if it is there and sound."""
        if placement.source != "restore":
            return None
        assert (
            placement.donor is not None and placement.donor.parked is not None and self._parking is not None
        )
        return self._parking.load(placement.donor.parked)

    def _take_over(self, placement: Placement, state: bytes | None) -> int:
        """How many tokens the slot holds for the new sequence."""
        donor = placement.donor
        if placement.source == "copy":
            assert donor is not None
            self._engine.copy(donor.slot, placement.slot, placement.length)
            self.cells.copied(donor.slot, placement.slot, placement.length)
        elif placement.source == "restore":
            assert donor is not None
            if self.cells.free < donor.num_valid:
                return 0  # all of it is read back before it can be cut
            try:
                if state is None:
                    raise EngineFault("the parked state is damaged or gone")
                self._engine.restore(placement.slot, state, placement.length)
            except EngineFault as fault:
                self._stats.restore_failed(str(fault))
                self.book.forget_parked(donor, "ended")
                self._clean()
                return 0
            self.cells.grew(placement.slot, donor.num_valid)
            self.cells.cut(placement.slot, placement.length)
        return placement.length

    def _new_cells(self, one: Sequence, placement: Placement) -> int:
        """Cells that a sequence will need beyond those it takes over where they are."""
        donor = placement.donor
        if placement.source == "restore":
            assert donor is not None
            return max(one.outstanding, donor.num_valid)
        is_there = placement.source == "place" or (placement.source == "copy" and self.cells.is_shared)
        return one.outstanding - (placement.length if is_there else 0)

    def _evict(self, holding: Holding) -> None:
        """Let a kept prefix go, into a file if that is possible."""
        slot = holding.slot
        is_parked = self._can_park(holding.num_valid)
        self.book.release(holding, is_parked=is_parked)
        if is_parked:
            self._park(holding, slot)
            self._empty(slot)
        self._clean()

    def _empty(self, slot: int) -> None:
        """Drop what a slot holds where nothing runs."""
        self._engine.close(slot)
        self.cells.cut(slot, 0)

    def _park(self, holding: Holding, slot: int) -> None:
        """Save what `slot` still holds of this holding, and make room for it outside if need be."""
        parking = self._parking
        assert parking is not None
        for part in self.book.parked_parts(holding):
            if len(part.tokens) >= len(holding.tokens):
                return  # all of it lies there already
            self.book.forget_parked(part, "replaced")
        self._clean()
        state = self._engine.save(slot)
        size = parking.size_max(holding, len(state))
        while parking.bytes_used + size > parking.bytes_max:
            oldest = self.book.oldest_parked()
            if oldest is None:
                return
            self.book.forget_parked(oldest, "pressure")
            self._clean()
        expires_ts = self._clock.wall_us() + max(0, holding.expires_us - self._clock.monotonic_us())
        self.book.parked(holding, parking.save(holding, state, expires_ts=expires_ts))
        self._stats.parked(parking.bytes_used)
        self._stats.evicted("parked")

    def _can_park(self, tokens: int) -> bool:
        if self._parking is None or tokens < BLOCK_TOKENS:
            return False
        return tokens * self._engine.info.kv_bytes_per_token < self._parking.bytes_max

    def _adopt(self, parking: Parking) -> None:
        offset_us = self._clock.wall_us() - self._clock.monotonic_us()
        for holding, expires_ts in parking.scan(self._clock.wall_us()):
            holding.expires_us = expires_ts - offset_us
            self.book.adopt(holding)
            if holding.session is not None:
                self.adopted_sessions.append(KeptSession(holding.tenant, holding.session, expires_ts))
        self.adopted_sessions.sort(key=lambda kept: kept.expires_ts, reverse=True)
        del self.adopted_sessions[bounds.KEPT_SESSIONS_MAX :]

    def _clean(self) -> None:
        for freed in self.book.take_freed():
            self._stats.evicted(freed.reason)
            holding = freed.holding
            if holding.parked is not None and self._parking is not None:
                self._parking.remove(holding.parked)
            elif holding.parked is None and freed.reason != "replaced":
                self._empty(holding.slot)
        self._stats.kept(self.book.kept_tokens)
