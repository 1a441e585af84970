"""The engine loop: continuous batching on a thread of its own.

Between steps, attempts join and leave. A step computes the next token of every running sequence and
a portion of the prompts still to be read in (`headrace.scheduling.steps` says how much). The loop
owns the engine; other threads only put commands into its inbox. What happened goes out through one
callback per forward call, after the progress file has it.

Where KV cells run short (`headrace.scheduling.memory`), sequences leave their slots, wait here before all newcomers, and
go on by themselves. Their owners see nothing of it but the time.
"""

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from headrace.clock import Clock
from headrace.engine.protocol import Engine, Forward, Span
from headrace.errors import EngineFault
from headrace.request.controls import Controls
from headrace.scheduling.prefill_order import PrefillOrder, without_long_rider
from headrace.scheduling.steps import PrefillPace, StepLimits, share_out, share_out_chunks
from headrace.worker.attempt_stats import PreemptionReason
from headrace.worker.gate import ContinuousGate, Gate
from headrace.worker.inbox import Command, Inbox
from headrace.worker.memory import KvMemory
from headrace.worker.messages import (
    Abort,
    AttemptRecord,
    Drain,
    EndSession,
    FinishReason,
    Piece,
    Preempt,
    Preempted,
    Resume,
)
from headrace.worker.progress import ProgressFile
from headrace.worker.sequence import Sequence
from headrace.worker.slots import EngineSlots
from headrace.worker.stats import StepStats

FAULTS_MAX = 3
"""After so many faults in a row the engine is given up and the process ends."""


class LoopNews(msgspec.Struct, gc=False):
    """What one forward call, or one round of commands, brought about: (connection, item) pairs."""

    pieces: list[tuple[int, Piece]] = []
    records: list[tuple[int, AttemptRecord]] = []
    preempted: list[tuple[int, Preempted]] = []
    """Before all pieces."""


class EngineLoop(Inbox):
    """Runs attempts on an engine. Public methods but `run`, `idle_s` and `step` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        limits: StepLimits,
        clock: Clock,
        progress: ProgressFile,
        on_news: Callable[[LoopNews], None],
        stats: StepStats,
        slots: EngineSlots | None = None,
        chunk_tokens: int | None = None,
        gate: Gate | None = None,
        debug: bool | None = None,
    ) -> None:
        """`chunk_tokens`: read prompts in by multiples of so many tokens (reproducible mode).
        `gate`: who gets a slot when; left out, everybody at once. `debug`: compare the books of KV cells with the
        engine's after every step; left out, as the environment says.
        """
        super().__init__()
        self._info = engine.info
        self._vocabulary = engine.vocabulary
        self._clock = clock
        self._progress = progress
        self._on_news = on_news
        self._stats = stats
        self._chunk_tokens = chunk_tokens
        self._pace = PrefillPace(limits)
        self._configured = limits
        self._gate: Gate = gate or ContinuousGate()
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._suspended: dict[str, Sequence] = {}
        """Preempted by their owners, until they are resumed or aborted."""
        self._num_arrived = 0
        self._slots = slots or EngineSlots(engine, clock=clock, stats=stats)
        self._memory = KvMemory(
            self._slots, stats=stats.memory, running_max=self._info.sequences, debug=debug
        )
        self._news = LoopNews()
        self._faults = 0
        self._drawn = 0
        self._order = PrefillOrder()

    def warmed_up(self, prefill: tuple[int, float]) -> None:
        """Before it runs: so many prompt tokens took so many seconds. The first portions keep to their time, too."""
        self._pace.observe_prefill(*prefill)

    # --- any thread -----------------------------------------------------------------------------

    @property
    def can_preempt(self) -> bool:
        return self._gate.can_preempt

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._commands)

    @property
    def num_suspended(self) -> int:
        return len(self._suspended)

    # --- the engine thread ------------------------------------------------------------------------

    def run(self) -> None:
        """Step until stopped. Raises `EngineFault` when the engine fails again and again."""
        while not self._is_stopping:
            self.step()
            idle_s = self.idle_s()
            if idle_s != 0:
                self._wait(idle_s)
        for sequence in [*self._waiting, *self._prefilling, *self._decoding, *self._suspended.values()]:
            self._finish(sequence, "aborted", error="the worker is stopping")
        self._tell()
        self._slots.park_all()

    def idle_s(self) -> float | None:
        """How long there is nothing to do if no command comes: 0 when there is work, None for ever."""
        if self._is_stopping or self._commands or self._prefilling or self._decoding:
            return 0.0
        opens_us = self._gate.opens_us()
        if opens_us is None:
            return 0.0 if self._waiting else None
        return max(0, opens_us - self._clock.monotonic_us()) / 1e6

    def step(self) -> None:
        """One round: commands, newcomers, every running sequence's next token, a portion of prefill."""
        began_us = self._clock.monotonic_us()
        self._stats.step_began(began_us)
        while (command := self._next_command()) is not None:
            self._obey(command)
        self._admit()
        self._relieve()
        compute_s = sample_s = 0.0
        self._drawn = 0
        num_decoding = len(self._decoding)
        if self._decoding:
            done = self._decode()
            compute_s, sample_s = compute_s + done.compute_s, sample_s + done.sample_s
        self._tell()
        prefill_tokens = 0
        if self._prefilling:
            prefill_tokens, done = self._prefill(num_decoding)
            compute_s, sample_s = compute_s + done.compute_s, sample_s + done.sample_s
        self._tell()
        self._stats.step_ended(
            now_us=self._clock.monotonic_us(),
            running=self.num_running,
            decoding=num_decoding,
            prefill_tokens=prefill_tokens,
            generated=self._drawn,
            compute_s=compute_s,
            sample_s=sample_s,
            kv_tokens=sum(sequence.held for sequence in self._decoding)
            + sum(sequence.held for sequence in self._prefilling),
            waiting=self.num_waiting,
            suspended=self.num_suspended,
        )
        self._memory.stepped(self._running())

    def _running(self) -> list[Sequence]:
        return [*self._prefilling, *self._decoding]

    def _obey(self, command: Command) -> None:
        match command:
            case Sequence():
                self._gate.arrived(command)
                self._arrived(command)
            case Abort(attempt_id):
                self._abort(attempt_id)
            case Preempt(attempt_id):
                self._preempt(attempt_id)
            case Resume(attempt_id):
                self._resume(attempt_id)
            case EndSession(session):
                self._slots.end_session(session)
            case Controls():
                self._adjust(command)
            case Drain():
                self._gate.hurry()

    def _arrived(self, one: Sequence) -> None:
        one.number, self._num_arrived = self._num_arrived, self._num_arrived + 1
        if self._memory.can_end(one):
            self._waiting.append(one)
        else:  # the server refuses these; to wait for what never comes would be to wait for ever
            self._finish(one, "error", error="it needs more KV memory than this worker has")

    def _adjust(self, controls: Controls) -> None:
        """Never beyond what the engine was loaded for, nor so little that prompts could not be read in."""
        configured = self._configured
        running_max = min(controls.max_batch_size or self._info.sequences, self._info.sequences)
        tokens = min(controls.max_batch_tokens or configured.batch_tokens_max, configured.batch_tokens_max)
        target_ms = controls.target_step_ms or configured.target_step_ms
        self._pace.set_limits(
            StepLimits(
                batch_tokens_max=max(tokens, running_max + (self._chunk_tokens or configured.grain)),
                target_step_ms=target_ms,
                idle_step_ms=max(target_ms, controls.idle_step_ms or configured.idle_step_ms),
                grain=configured.grain,
                context_cost=configured.context_cost,
            )
        )
        self._gate.adjust(wait_ms=controls.batch_wait_ms, tokens_max=tokens, size_max=running_max)
        self._memory.configure(running_max)

    def _abort(self, attempt_id: str) -> None:
        one = self._suspended.pop(attempt_id, None) or self._take_out(attempt_id)
        if one is not None:
            self._finish(one, "aborted")

    def _take_out(self, attempt_id: str) -> Sequence | None:
        for group in (self._decoding, self._prefilling, self._waiting):
            for sequence in group:
                if sequence.attempt_id == attempt_id:
                    group.remove(sequence)
                    return sequence
        return None

    def _preempt(self, attempt_id: str) -> None:
        one = self._suspended.get(attempt_id) or self._take_out(attempt_id)
        if one is None:
            return
        if one.slot >= 0:
            self._vacate(one, "queue")
        self._suspended[attempt_id] = one
        self._news.preempted.append((one.connection_id, Preempted(attempt_id, one.generated)))

    def _resume(self, attempt_id: str) -> None:
        one = self._suspended.pop(attempt_id, None)
        if one is not None:
            self._waiting.appendleft(one)

    def _vacate(self, one: Sequence, reason: PreemptionReason) -> None:
        """Take a sequence out of its slot. What it has computed is kept as that of one that has ended."""
        self._slots.close(one, is_sound=True)
        # Token by token where answers are to be reproducible: read in as a prompt, the tokens' KV memory would
        # differ in the last bits.
        one.preempted(now_us=self._clock.monotonic_us(), is_replayed=self._chunk_tokens is not None)
        self._stats.attempts.preempted(reason)

    def _admit(self) -> None:
        """Slots for newcomers whom the gate lets in, first come first served; one that waits for a prefix that another
        is computing keeps its claim to a slot.
        """
        self._gate.turn(self._clock.monotonic_us())
        held_back: list[Sequence] = []
        while (
            self._waiting
            and self._gate.lets_in(self._waiting[0])
            and self._slots.has_room(len(held_back))
            and self.num_running + len(held_back) < self._memory.running_max
            and self._has_memory(self._waiting[0], held_back)
        ):
            sequence = self._waiting.popleft()
            is_first = not sequence.has_run
            if not self._slots.open(sequence):
                held_back.append(sequence)
                continue
            if is_first:
                self._progress.started(
                    sequence.attempt_id,
                    tenant_id=sequence.tenant_id,
                    prompt_tokens=len(sequence.prompt),
                    cached=sequence.cached,
                    wall_us=sequence.started_ts,
                )
            (self._prefilling if sequence.is_prefilling else self._decoding).append(sequence)
        self._waiting.extendleft(reversed(held_back))

    def _has_memory(self, one: Sequence, held_back: list[Sequence]) -> bool:
        return self._memory.has_room(one, [*self._running(), *held_back])

    def _relieve(self) -> None:
        """Make room for what the running sequences are sure to need; who has to leave for that goes on before newcomers."""
        while (victim := self._memory.next_victim(self._running())) is not None:
            self._take_out(victim.attempt_id)
            self._vacate(victim, "memory")
            place = 0
            while place < len(self._waiting) and self._waiting[place].number < victim.number:
                place += 1
            self._waiting.insert(place, victim)

    def _decode(self) -> Forward:
        batch = self._decoding
        spans = [Span(one.slot, one.held, [one.next_token], one.is_next_new) for one in batch]
        done = self._forward(spans, batch)
        if done is None:
            return _NOTHING
        self._pace.observe_decode(done.compute_s)
        now_us = self._clock.monotonic_us()
        wall_us = self._clock.wall_us()
        for one in batch:
            one.grew(1, now_us=now_us)
        self._decoding = [
            one
            for one, span, token in zip(batch, spans, done.tokens, strict=True)
            if not (span.is_sampled and self._take_token(one, token, now_us=now_us, wall_us=wall_us))
        ]
        self._note_progress(batch, wall_us=wall_us)
        return done

    def _prefill(self, num_decoding: int) -> tuple[int, Forward]:
        waiting, shares = self._share_prefill(num_decoding)
        batch = waiting[: len(shares)]
        spans = [
            Span(
                one.slot,
                one.held,
                one.start[one.held : one.held + share],
                one.held + share == len(one.start) and not one.generated,
            )
            for one, share in zip(batch, shares, strict=True)
        ]
        done = self._forward(spans, batch)
        if done is None:
            return 0, _NOTHING
        if len(shares) == 1:
            self._pace.observe_prefill(shares[0], done.compute_s, context=batch[0].held)
        now_us = self._clock.monotonic_us()
        wall_us = self._clock.wall_us()
        for one, share, token in zip(batch, shares, done.tokens, strict=True):
            one.grew(share, now_us=now_us)
            self._order.took(one.attempt_id, share)
            self._slots.computed(one)
            if one.is_prefilling:
                continue
            self._prefilling.remove(one)
            if not one.generated:
                self._stats.attempts.prefilled(now_us - one.opened_us)
                if self._take_token(one, token, now_us=now_us, wall_us=wall_us):
                    continue
            self._decoding.append(one)
        self._note_progress(batch, wall_us=wall_us)
        return sum(shares), done

    def _share_prefill(self, num_decoding: int) -> tuple[list[Sequence], list[int]]:
        """The prompts in the order in which they are read in, and how many tokens of the first ones in this step."""
        waiting = self._prefilling
        left = [len(one.start) - one.held for one in waiting]
        order = self._order.order([one.attempt_id for one in waiting], left)
        waiting, left = [waiting[place] for place in order], [left[place] for place in order]
        limits = self._pace.limits
        room = limits.batch_tokens_max - num_decoding
        portion = min(self._pace.portion(num_decoding=num_decoding, context=waiting[0].held), room)
        costs = self._pace.costs([one.held for one in waiting])
        if self._chunk_tokens is None:
            shares = share_out(left, portion, room=room, grain=limits.grain, costs=costs)
        else:
            shares = share_out_chunks(left, portion, room=room, chunk=self._chunk_tokens, costs=costs)
        return waiting, without_long_rider(shares, left, portion=portion)

    def _forward(self, spans: list[Span], batch: list[Sequence]) -> Forward | None:
        """Compute; None if the engine failed, after its sequences were ended with an error."""
        try:
            done = self._slots.forward(spans)
        except EngineFault as fault:
            self._faults += 1
            self._stats.faulted()
            for one in list(batch):
                (self._prefilling if one in self._prefilling else self._decoding).remove(one)
                self._finish(one, "error", error=str(fault))
            if self._faults >= FAULTS_MAX:
                self._tell()
                raise
            return None
        self._faults = 0
        return done

    def _take_token(self, one: Sequence, token: int, *, now_us: int, wall_us: int) -> bool:
        """Add a drawn token to its sequence. True when that ended it."""
        self._drawn += 1
        one.drew(token, now_us=now_us, wall_us=wall_us)
        reason: FinishReason | None = None
        if self._vocabulary.is_end(token):
            text, reason = one.text.end(), "stop"
        else:
            text = one.text.feed(self._vocabulary.token_bytes(token))
            if one.text.has_stopped:
                reason = "stop"
            elif one.generated >= one.max_tokens:
                text, reason = text + one.text.end(), "length"
        # A token that is not text yet (half a character, the beginning of a stop string) is told as well:
        # whoever is settled from the gateway's last knowledge is settled with the right count.
        self._news.pieces.append((one.connection_id, Piece(one.attempt_id, text, one.generated)))
        if reason is None:
            return False
        self._finish(one, reason)
        return True

    def _note_progress(self, batch: Iterable[Sequence], *, wall_us: int) -> None:
        counts = [(one.attempt_id, one.computed, one.generated) for one in batch if one.slot >= 0]
        if counts:
            self._progress.advanced(counts, wall_us=wall_us)

    def _finish(self, one: Sequence, reason: FinishReason, *, error: str | None = None) -> None:
        record = one.record(
            reason,
            info=self._info,
            now_us=self._clock.monotonic_us(),
            wall_us=self._clock.wall_us(),
            error=error,
        )
        if one.slot >= 0:
            self._slots.close(one, is_sound=reason != "error")
        self._gate.left(one)
        self._progress.finished(record)
        self._stats.attempts.finished(record)
        self._news.records.append((one.connection_id, record))

    def _tell(self) -> None:
        news = self._news
        if news.pieces or news.records or news.preempted:
            self._news = LoopNews()
            self._on_news(news)


_NOTHING = Forward([], 0.0, 0.0)
