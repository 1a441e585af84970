"""Gives sequences their slots: carries out on the engine what the cache's rules decide.

`SlotBook` says which slot, what is taken over and what has to go; here are the engine calls, the files
outside, the clock and the counts.
"""

from headrace.caching.index import BLOCK_TOKENS, Holding
from headrace.caching.slots import Placement, SlotBook
from headrace.clock import Clock
from headrace.engine.protocol import Engine
from headrace.errors import EngineFault
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
        self._stats = stats
        self._parking = parking
        self.book = SlotBook(engine.info.sequences, grain=grain, can_park=self._can_park)
        if parking is not None:
            self._adopt(parking)

    def open(self, one: Sequence) -> bool:
        """Give a waiting sequence a slot with all that can be taken over. False: it has to wait."""
        now_us = self._clock.monotonic_us()
        placement = self.book.place(one.wanted, now_us)
        self._clean()
        if placement is None:
            return False
        if placement.park is not None:
            self._park(placement.park, placement.slot)
        held = self._take_over(placement)
        if held != placement.length:
            self.book.computed(placement.slot, held)
        self._engine.open(placement.slot, one.sampling, held=held, drawn=one.generated)
        is_first = not one.has_run
        one.opened(placement.slot, held=held, now_us=now_us, wall_us=self._clock.wall_us())
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
        self._clean()

    def end_session(self, session: str) -> None:
        self.book.end_session(session)
        self._clean()

    def park_all(self) -> None:
        """The worker ends in order: put aside what another life can use."""
        for holding in reversed(self.book.kept()):
            if self._can_park(holding.num_valid):
                slot = holding.slot
                self.book.release(holding, is_parked=True)
                self._park(holding, slot)
        self._clean()

    # --- inside -----------------------------------------------------------------------------------------

    def _take_over(self, placement: Placement) -> int:
        """How many tokens the slot holds for the new sequence."""
        donor = placement.donor
        if placement.source == "copy":
            assert donor is not None
            self._engine.copy(donor.slot, placement.slot, placement.length)
        elif placement.source == "restore":
            assert donor is not None and donor.parked is not None and self._parking is not None
            state = self._parking.load(donor.parked)
            try:
                if state is None:
                    raise EngineFault("the parked state is damaged or gone")
                self._engine.restore(placement.slot, state, placement.length)
            except EngineFault as fault:
                self._stats.restore_failed(str(fault))
                self.book.forget_parked(donor.parked, "ended")
                self._clean()
                return 0
        return placement.length

    def _park(self, holding: Holding, slot: int) -> None:
        """Save what `slot` still holds of this holding, and make room for it outside if need be."""
        parking = self._parking
        assert parking is not None
        for part in self.book.parked_parts(holding):
            if len(part.tokens) >= len(holding.tokens):
                return  # all of it lies there already
            assert part.parked is not None
            self.book.forget_parked(part.parked, "replaced")
        self._clean()
        state = self._engine.save(slot)
        while parking.bytes_used + len(state) > parking.bytes_max:
            oldest = self.book.oldest_parked()
            if oldest is None or oldest.parked is None:
                return
            self.book.forget_parked(oldest.parked, "pressure")
            self._clean()
        expires_ts = self._clock.wall_us() + max(0, holding.expires_us - self._clock.monotonic_us())
        name = parking.save(holding, state, expires_ts=expires_ts)
        if name is not None:
            self.book.parked(holding, name)
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

    def _clean(self) -> None:
        for freed in self.book.take_freed():
            self._stats.evicted(freed.reason)
            holding = freed.holding
            if holding.parked is not None and self._parking is not None:
                self._parking.remove(holding.parked)
        self._stats.kept(self.book.kept_tokens)
