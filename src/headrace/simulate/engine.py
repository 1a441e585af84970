"""The engine model: how long a replica computes, and what it has in memory.

Two ways of reading prompts in:

- `chunked` is the worker's own (`headrace.worker.loop`): in each step one token of every running sequence, then a
  portion of the prompts, sized and shared by `headrace.scheduling.steps`;
- `whole` reads all newcomers in at once while the others stand still, as the runtime of the published tables.

A simulated step takes constant time to compute, however many sequences run.
"""

import heapq
from typing import Literal

import msgspec

from headrace.scheduling.prefill_order import PrefillOrder, without_long_rider
from headrace.scheduling.steps import PrefillPace, StepLimits, share_out
from headrace.simulate.cache import BLOCK_TOKENS, PrefixCache
from headrace.simulate.workload import Arrival

Prefill = Literal["chunked", "whole"]


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. Times in microseconds. The defaults are Llama-2-7B on an A10G, fitted to published runs."""

    prefill_us_per_token: float = 218.0
    decode_us: float = 33_500.0
    """Of a step, whatever runs."""
    decode_us_per_context_token: float = 0.6
    decode_us_per_sequence: float = 110.0
    slots: int = 32
    kv_tokens: int = 10_000
    prefill: Prefill = "chunked"
    steps_per_round: int = 1
    """Newcomers are taken up after so many steps."""
    has_lookahead: bool = False
    """Memory is planned by the known lengths of the answers, step by step, instead of by their maxima."""
    batch_tokens_max: int = 512
    target_step_ms: float = 100.0
    idle_step_ms: float = 500.0
    reads_short_first: bool = False
    """Prompts are read in as headrace's workers do it (`headrace.scheduling.prefill_order`), else in order of arrival."""
    cache_blocks: int | None = 0
    """Blocks of 512 tokens that the prefix cache holds. None: without bound."""


class Sequence:
    """A request in an engine."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "done_tokens",
        "finish_step",
        "first_us",
        "last_us",
        "left",
        "lost_tokens",
        "number",
        "start_step",
    )

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.number = number
        self.arrival = arrival
        self.cached_tokens = 0
        self.done_tokens = 0
        """Of the answer, from before it was stopped: they are read in again with the prompt."""
        self.left = 0
        """Tokens to be read in."""
        self.lost_tokens = 0
        """Read in, or generated, before it was stopped."""
        self.start_step = 0
        self.finish_step = 0
        self.first_us = 0
        self.last_us = 0

    @property
    def to_read_in(self) -> int:
        """All that has to be before its next token, when it starts. The last token is always computed."""
        return max(self.arrival.prompt_tokens + self.done_tokens - self.cached_tokens, 1)

    def output_tokens(self, step: int) -> int:
        """Of the answer, so far. Only while it is decoding."""
        return min(self.done_tokens + 1 + step - self.start_step, self.arrival.output_tokens)


class Engine:
    """One replica over simulated time."""

    def __init__(self, replica_id: str, model: EngineModel) -> None:
        self.replica_id = replica_id
        self.model = model
        self.now_us = 0.0
        self.busy_us = 0.0
        self.slot_us = 0.0
        """Sum over sequences of the time they were decoding or read in."""
        self.steps = 0
        self.cache = PrefixCache(model.cache_blocks)
        self.hit_tokens = 0
        self._prefilling: list[Sequence] = []
        self._decoding: list[tuple[int, int, Sequence]] = []
        """A heap by the step in which each ends."""
        self._context_tokens = 0
        self._order = PrefillOrder()
        self._pace = PrefillPace(
            StepLimits(
                batch_tokens_max=model.batch_tokens_max,
                target_step_ms=model.target_step_ms,
                idle_step_ms=model.idle_step_ms,
            )
        )

    @property
    def is_idle(self) -> bool:
        return not self._prefilling and not self._decoding

    def decoding(self) -> list[Sequence]:
        return [entry[2] for entry in self._decoding]

    def match(self, arrival: Arrival) -> int:
        """Prompt tokens that are in the cache. The last token is always computed."""
        return min(self.cache.match(arrival.blocks) * BLOCK_TOKENS, max(arrival.prompt_tokens - 1, 0))

    def start(self, sequence: Sequence, now_us: int) -> None:
        """Take a request up with the next step."""
        if self.is_idle:
            self.now_us = max(self.now_us, now_us)
        arrival = sequence.arrival
        sequence.cached_tokens = arrival.cached_tokens
        if self.model.cache_blocks != 0 and arrival.blocks:
            sequence.cached_tokens = self.match(arrival)
            self.cache.use(arrival.blocks)
            self.hit_tokens += sequence.cached_tokens
        sequence.left = sequence.to_read_in
        self._prefilling.append(sequence)

    def stop(self, number: int) -> Sequence:
        """Take a request out, between two steps. What it has generated stands in `done_tokens`."""
        for sequence in self._prefilling:
            if sequence.number == number:
                self._prefilling.remove(sequence)
                sequence.lost_tokens += sequence.to_read_in - sequence.left
                return sequence
        (entry,) = (one for one in self._decoding if one[1] == number)
        self._decoding.remove(entry)
        heapq.heapify(self._decoding)
        sequence = entry[2]
        done_tokens = sequence.output_tokens(self.steps)
        sequence.lost_tokens += sequence.to_read_in + done_tokens - sequence.done_tokens
        self._context_tokens -= sequence.arrival.prompt_tokens + done_tokens
        sequence.done_tokens = done_tokens
        return sequence

    def fits(self, arrival: Arrival) -> bool:
        """Whether memory never runs out if this one is taken up now, with answers as long as they will be.

        The most that is ever held: when the i-th to end does, those that end later have grown by as much.
        """
        sizes = [
            (entry[0] - self.steps, one.arrival.prompt_tokens + one.output_tokens(self.steps))
            for entry in self._decoding
            for one in (entry[2],)
        ]
        sizes += [
            (one.arrival.output_tokens - one.done_tokens, one.arrival.prompt_tokens + one.done_tokens)
            for one in self._prefilling
        ]
        sizes.append((arrival.output_tokens, arrival.prompt_tokens))
        sizes.sort(reverse=True)
        held = most = 0
        for count, (left, size) in enumerate(sizes, 1):
            held += size
            most = max(most, held + left * count)
        return most < self.model.kv_tokens

    def run(self, until_us: float) -> tuple[list[Sequence], list[Sequence]]:
        """Compute until this time, or until something has begun or ended: (begun, ended)."""
        begun: list[Sequence] = []
        ended: list[Sequence] = []
        while not self.is_idle and not begun and not ended and self.now_us < until_us:
            if self._prefilling and self.model.prefill == "whole":
                self._prefill_whole(begun, ended)
            for _ in range(self.model.steps_per_round):
                self._step(begun, ended)
                if self.is_idle:
                    break
        return begun, ended

    def _prefill_whole(self, begun: list[Sequence], ended: list[Sequence]) -> None:
        tokens = sum(sequence.left for sequence in self._prefilling)
        self._spend(tokens * self.model.prefill_us_per_token)
        newcomers, self._prefilling = self._prefilling, []
        for sequence in newcomers:
            self._begin(sequence, begun, ended)

    def _step(self, begun: list[Sequence], ended: list[Sequence]) -> None:
        model = self.model
        num_decoding = len(self._decoding)
        decode_us = 0.0
        if num_decoding:
            decode_us = (
                model.decode_us
                + model.decode_us_per_context_token * self._context_tokens
                + model.decode_us_per_sequence * num_decoding
            )
            self._spend(decode_us)
            self.steps += 1
            self._context_tokens += num_decoding
            self._end(ended)
        if self._prefilling:
            self._pace.observe_decode(decode_us / 1e6)
            self._prefill_portion(num_decoding, begun, ended)

    def _prefill_portion(self, num_decoding: int, begun: list[Sequence], ended: list[Sequence]) -> None:
        model = self.model
        portion = self._pace.portion(num_decoding=num_decoding)
        room = max(model.batch_tokens_max - num_decoding, portion)
        waiting = self._prefilling
        left = [sequence.left for sequence in waiting]
        if model.reads_short_first:
            order = self._order.order([sequence.number for sequence in waiting], left)
            waiting, left = [waiting[place] for place in order], [left[place] for place in order]
        shares = share_out(left, portion, room=room)
        if model.reads_short_first:
            shares = without_long_rider(shares, left, portion=portion)
        tokens = sum(shares)
        took_us = tokens * model.prefill_us_per_token
        self._spend(took_us)
        self._pace.observe_prefill(tokens, took_us / 1e6)
        for sequence, share in zip(waiting, shares, strict=False):
            sequence.left -= share
            self._order.took(sequence.number, share)
        done = [sequence for sequence in self._prefilling if sequence.left <= 0]
        if done:
            self._prefilling = [sequence for sequence in self._prefilling if sequence.left > 0]
            for sequence in done:
                self._begin(sequence, begun, ended)

    def _begin(self, sequence: Sequence, begun: list[Sequence], ended: list[Sequence]) -> None:
        """The prompt is read in, and with it the next token is there."""
        if not sequence.done_tokens:
            sequence.first_us = round(self.now_us)
        sequence.start_step = self.steps
        sequence.finish_step = self.steps + max(sequence.arrival.output_tokens - sequence.done_tokens - 1, 0)
        begun.append(sequence)
        if sequence.finish_step == self.steps:
            sequence.last_us = round(self.now_us)
            ended.append(sequence)
            return
        self._context_tokens += sequence.arrival.prompt_tokens + sequence.done_tokens + 1
        heapq.heappush(self._decoding, (sequence.finish_step, sequence.number, sequence))

    def _end(self, ended: list[Sequence]) -> None:
        while self._decoding and self._decoding[0][0] <= self.steps:
            sequence = heapq.heappop(self._decoding)[2]
            sequence.last_us = round(self.now_us)
            self._context_tokens -= sequence.arrival.prompt_tokens + sequence.arrival.output_tokens
            ended.append(sequence)

    def _spend(self, us: float) -> None:
        self.now_us += us
        self.busy_us += us
        self.slot_us += us * (len(self._decoding) + len(self._prefilling))
