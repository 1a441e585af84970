"""What a request will probably turn out to be, from those of its tenant that have ended.

The fair queue charges a request when it starts, before anybody knows how long its answer will be, and before
a worker has counted its prompt. A wrong guess costs nothing in the end, because the real counts correct
it; a good one keeps tenants from being charged now for what they will not take.

Memory is taken by another guess, on the safe side: the longest of a tenant's recent answers (`RecentOutputs`).
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


class Expectations:
    """Of one model. Bounded: the tenants that were heard of longest ago are forgotten."""

    def __init__(self, *, tenants_max: int = TENANTS_MAX) -> None:
        self._tenants_max = tenants_max
        self._outputs: OrderedDict[str, _Average] = OrderedDict()
        self._output: _Average | None = None
        self._bytes_per_token = _Average(BYTES_PER_TOKEN_FIRST)

    def prompt_tokens(self, bound: int) -> int:
        """Of a prompt that has at most `bound` tokens, which is nearly its bytes."""
        return max(1, round(bound / self._bytes_per_token.value))

    def output_tokens(self, tenant: str, maximum: int) -> int:
        """Of an answer that has at most `maximum` tokens. Of the first one of all, the maximum."""
        average = self._outputs.get(tenant) or self._output
        return maximum if average is None else min(maximum, max(1, round(average.value)))

    def counted(self, bound: int, prompt_tokens: int) -> None:
        """A prompt with this bound has turned out to have so many tokens."""
        if bound > 0 and prompt_tokens > 0:
            self._bytes_per_token.add(max(1.0, bound / prompt_tokens))

    def answered(self, tenant: str, output_tokens: int) -> None:
        """A request of the tenant was answered in full, with so many tokens."""
        if self._output is None:
            self._output = _Average(output_tokens)
        self._output.add(output_tokens)
        average = self._outputs.get(tenant)
        if average is None:
            if len(self._outputs) >= self._tenants_max:
                self._outputs.popitem(last=False)
            average = self._outputs[tenant] = _Average(output_tokens)
        else:
            self._outputs.move_to_end(tenant)
        average.add(output_tokens)


class _Window:
    __slots__ = ("longest", "recent")

    def __init__(self) -> None:
        self.recent: deque[int] = deque(maxlen=RECENT_ANSWERS)
        self.longest = 0

    def add(self, output_tokens: int) -> None:
        recent = self.recent
        is_longest_leaving = len(recent) == RECENT_ANSWERS and recent[0] == self.longest
        recent.append(output_tokens)
        if output_tokens >= self.longest:
            self.longest = output_tokens
        elif is_longest_leaving:
            self.longest = max(recent)


class RecentOutputs:
    """How long the answers of each tenant were lately, of one model. Bounded as `Expectations` is."""

    def __init__(self, *, tenants_max: int = TENANTS_MAX) -> None:
        self._tenants_max = tenants_max
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def longest(self, tenant: str) -> int | None:
        """Tokens of the longest recent answer; None of a tenant that has had none."""
        window = self._windows.get(tenant)
        return None if window is None else window.longest

    def answered(self, tenant: str, output_tokens: int, *, is_whole: bool) -> None:
        """An answer of the tenant has ended. One that was broken off says only how long it was at least."""
        window = self._windows.get(tenant)
        if window is None:
            if not is_whole:
                return
            if len(self._windows) >= self._tenants_max:
                self._windows.popitem(last=False)
            window = self._windows[tenant] = _Window()
        elif is_whole or output_tokens > window.longest:
            self._windows.move_to_end(tenant)
        else:
            return
        window.add(output_tokens)
