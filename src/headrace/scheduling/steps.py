"""What one engine step computes: all running sequences' next tokens and a portion of prefill.

A step is two forward calls. First every decoding sequence's token, so that running streams are
served before anything else and their results do not depend on what is being prefilled; then one
portion of prompt tokens. The portion is what is left of the token budget, cut so that the step keeps
to its target time: that bounds how long a stream waits for its next token while a long prompt is read
in, and how long an abort or a new request waits for its turn.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.bounds import CHUNK_GRAIN

PREFILL_SHARE_MIN: Final = 0.5
"""Where decoding takes most of a step's target time (many sequences, each with much to look back at), prefill still
gets this part of it: otherwise newcomers would be read in by the smallest portions and the batch stay half empty.
32 prompts of which 1 100 tokens were cached, 48 to compute: half of the first tokens after 11 s without this."""

_SMOOTHING: Final = 0.2
"""Weight of the newest measurement in the running mean of prefill speed."""


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The budgets of a step."""

    batch_tokens_max: int
    """Most tokens computed in a step, decode and prefill together."""
    target_step_ms: float
    """How long a step should take while streams are running."""
    idle_step_ms: float
    """How long a step may take while nothing is decoding: only aborts and newcomers wait for it."""
    grain: int = CHUNK_GRAIN
    """Portions are multiples of so many tokens."""
    context_cost: float = 0.0
    """What each token before a prompt token adds to the time that it takes, as a part of the time it takes behind none."""

    def __post_init__(self) -> None:
        assert self.batch_tokens_max >= self.grain > 0
        assert self.context_cost >= 0
        assert 0 < self.target_step_ms <= self.idle_step_ms


class PrefillPace:
    """How many prompt tokens fit into a step, learned from the steps so far.

    Speeds are those of tokens behind nothing. What stands before them is reckoned in by `StepLimits.context_cost`:
    otherwise short prompts would make a portion of a long one too large, and long ones those of short ones too small.
    """

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._tokens_per_ms = 0.0
        self._decode_ms = 0.0

    @property
    def limits(self) -> StepLimits:
        return self._limits

    def set_limits(self, limits: StepLimits) -> None:
        """From the next step on. What was learned of the speed stays."""
        self._limits = limits

    def observe_prefill(self, tokens: int, seconds: float, *, context: int = 0) -> None:
        """Take in the prefill of one prompt's portion of `tokens` tokens behind `context` tokens.

        Of less than the grain nothing is learned: that says more about the cost of a call than about speed, and would
        make the next portion smaller still.
        """
        if tokens < self._limits.grain or seconds <= 0:
            return
        speed = tokens * self._cost_at(context + tokens / 2) / (seconds * 1000)
        known = self._tokens_per_ms
        self._tokens_per_ms = speed if known == 0 else known + _SMOOTHING * (speed - known)

    def observe_decode(self, seconds: float) -> None:
        """Take in the decode call of the step at hand, which the prefill call will share its time with."""
        self._decode_ms = seconds * 1000

    def portion(self, *, num_decoding: int, context: int = 0) -> int:
        """Most prompt tokens to compute in this step, the first of them behind `context` tokens."""
        limits = self._limits
        room = limits.batch_tokens_max - num_decoding
        if self._tokens_per_ms > 0:
            left_ms = limits.idle_step_ms if num_decoding == 0 else self._left_ms()
            fitting = int(left_ms * self._tokens_per_ms / self._cost_at(context))
            fitting = fitting // limits.grain * limits.grain
            room = min(room, fitting)
        # Even when decoding alone fills the step, prefill must go on: a waiting prompt never starves.
        return max(limits.grain, room)

    def costs(self, contexts: Sequence[int]) -> list[float]:
        """What a token behind each of these takes, against one behind the first."""
        first = self._cost_at(contexts[0]) if contexts else 1.0
        return [self._cost_at(context) / first for context in contexts]

    def _cost_at(self, context: float) -> float:
        return 1.0 + self._limits.context_cost * context

    def _left_ms(self) -> float:
        target_ms = self._limits.target_step_ms
        return max(target_ms - self._decode_ms, target_ms * PREFILL_SHARE_MIN)


def share_out_chunks(
    remaining: Sequence[int], portion: float, *, room: int, chunk: int, costs: Sequence[float] = ()
) -> list[int]:
    """The same in multiples of `chunk`; a prompt's remainder of less than a chunk comes by itself.

    An engine's results depend on how a prompt is cut: it computes many rows with another kernel than few. Cut so,
    every token goes through the same one whatever else runs (llama.cpp's flash attention works in tiles of 64 rows;
    `benchmarks/kv-choices.md`).
    """
    shares: list[int] = []
    for tokens, cost in zip(remaining, costs or [1.0] * len(remaining), strict=True):
        fitting = max(int(portion / cost), chunk)
        share = min(tokens, fitting, room) // chunk * chunk if tokens >= chunk else tokens
        if not share or share > room or (shares and portion <= 0):
            break
        shares.append(share)
        portion -= share * cost
        room -= share
    return shares


def share_out(
    remaining: Sequence[int],
    portion: float,
    *,
    room: int,
    grain: int = CHUNK_GRAIN,
    costs: Sequence[float] = (),
) -> list[int]:
    """Split a portion over prompts, first come first served: tokens for each, in the same order.

    `remaining` holds each prompt's tokens still to compute, `costs` what a token of each takes against one of the first
    (left out: the same), and `portion` counts tokens of the first; the list returned is cut after the last
    prompt that gets any. A prompt's short end goes with what comes before it, as far as there is `room`
    (the hard limit of tokens, at least the portion), and no prompt but the first is begun with a fragment.
    """
    assert portion <= room
    shares: list[int] = []
    for tokens, cost in zip(remaining, costs or [1.0] * len(remaining), strict=True):
        fitting = min(int(portion / cost), room)
        if tokens > min(fitting + grain - 1, room):
            if fitting >= grain or not shares:
                shares.append(fitting)
            break
        shares.append(tokens)
        portion -= tokens * cost
        room -= tokens
        if portion <= 0:
            break
    return shares
