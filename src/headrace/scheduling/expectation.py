"""What a request will probably turn out to be, from those of its tenant that have ended.

The fair queue charges a request when it starts, before anybody knows how long its answer will be, and before
a worker has counted its prompt. A wrong guess costs nothing in the end, because the real counts correct
it; a good one keeps tenants from being charged now for what they will not take.

Memory is taken by another guess, on the safe side: the longest of a tenant's recent answers (`Expectations.longest_output`).
"""

from collections import OrderedDict, deque
from typing import Final

SMOOTHING: Final = 0.2
"""Weight of the newest request in an average: about the last ten count."""
TENANTS_MAX: Final = 10_000
BYTES_PER_TOKEN_FIRST: Final = 4.0
"""Until a prompt has been counted: usual for English text."""
RECENT_ANSWERS: Final = 20
"""A tenant's answers that are remembered one by one."""


class _Average:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, value: float) -> None:
        self.value += SMOOTHING * (value - self.value)


class _Answers:
    """Those of one tenant."""

    __slots__ = ("average", "longest", "recent")

    def __init__(self, output_tokens: int) -> None:
        self.average = float(output_tokens)
        self.recent = deque((output_tokens,), RECENT_ANSWERS)
        self.longest = output_tokens

    def add(self, output_tokens: int) -> None:
        recent = self.recent
        leaving = recent[0] if len(recent) == RECENT_ANSWERS else 0
        recent.append(output_tokens)
        if output_tokens >= self.longest:
            self.longest = output_tokens
        elif leaving == self.longest:
            self.longest = max(recent)


class Expectations:
    """Of one model. Bounded: the tenants that were heard of longest ago are forgotten."""

    def __init__(self, *, tenants_max: int = TENANTS_MAX) -> None:
        self._tenants_max = tenants_max
        self._answers: OrderedDict[str, _Answers] = OrderedDict()
        self._output: _Average | None = None
        self._bytes_per_token = _Average(BYTES_PER_TOKEN_FIRST)

    def prompt_tokens(self, bound: int) -> int:
        """Of a prompt that has at most `bound` tokens, which is nearly its bytes."""
        return max(1, round(bound / self._bytes_per_token.value))

    def output_tokens(self, tenant: str, maximum: int) -> int:
        """Of an answer that has at most `maximum` tokens. Of the first one of all, the maximum."""
        answers = self._answers.get(tenant)
        if answers is not None:
            return min(maximum, max(1, round(answers.average)))
        return maximum if self._output is None else min(maximum, max(1, round(self._output.value)))

    def longest_output(self, tenant: str) -> int | None:
        """Tokens of the longest of its recent answers; None of a tenant that has had none."""
        answers = self._answers.get(tenant)
        return None if answers is None else answers.longest

    def counted(self, bound: int, prompt_tokens: int) -> None:
        """A prompt with this bound has turned out to have so many tokens."""
        if bound > 0 and prompt_tokens > 0:
            self._bytes_per_token.add(max(1.0, bound / prompt_tokens))

    def answered(self, tenant: str, output_tokens: int) -> None:
        """A request of the tenant was answered in full, with so many tokens."""
        if self._output is None:
            self._output = _Average(output_tokens)
        self._output.add(output_tokens)
        answers = self._answers.get(tenant)
        if answers is None:
            if len(self._answers) >= self._tenants_max:
                self._answers.popitem(last=False)
            self._answers[tenant] = _Answers(output_tokens)
        else:
            self._answers.move_to_end(tenant)
            answers.average += SMOOTHING * (output_tokens - answers.average)
            answers.add(output_tokens)

    def broken_off(self, tenant: str, output_tokens: int) -> None:
        """An answer ended before its time: it says only how long it was at least."""
        answers = self._answers.get(tenant)
        if answers is not None and output_tokens > answers.longest:
            answers.add(output_tokens)
