"""Limits: exact rates, exact windows, one decision over all levels, refusals that change nothing."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.config.limits import Limits
from headrace.limits.book import Account, Ask, decide, grant, hold, may_start, release, settle, trim
from headrace.limits.rate import RequestRate
from headrace.limits.window import WINDOW_US, TokenWindow

SECOND = 1_000_000


def passes(rate: RequestRate, rps: float, now_us: int) -> bool:
    if rate.wait_us(rps, now_us):
        return False
    rate.take(rps, now_us)
    return True


@given(
    st.sampled_from([0.5, 1, 3, 7, 10, 333, 6000]),
    st.lists(st.integers(0, 2 * SECOND), max_size=120),
    st.integers(0, 2**53),
)
def test_no_span_ever_sees_more_than_burst_plus_rate(rps: float, gaps: list[int], start: int) -> None:
    rate, now, passed = RequestRate(), start, []
    for gap in gaps:
        now += gap
        if passes(rate, rps, now):
            passed.append(now)
    burst = max(1, int(rps))
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            allowed = burst + Fraction(passed[last] - passed[first], SECOND) * Fraction(rps)
            assert last - first + 1 <= allowed + 1


def test_the_first_request_passes_whatever_the_clock_says_and_a_burst_of_a_second() -> None:
    rate = RequestRate()
    assert [passes(rate, 5, 0) for _ in range(6)] == [True] * 5 + [False]
    assert rate.wait_us(5, 0) == 200_000
    assert rate.remaining(5, 0) == 0
    assert passes(rate, 5, 200_000)
    assert rate.remaining(5, 10 * SECOND) == 5


def test_the_window_slides_exactly() -> None:
    window = TokenWindow()
    window.add(60, 0)
    window.add(30, 10 * SECOND)
    assert window.used(WINDOW_US - 1) == 90
    assert window.used(WINDOW_US) == 30
    assert window.used(WINDOW_US + 10 * SECOND) == 0


def test_when_tokens_become_free_is_known_where_it_can_be() -> None:
    window = TokenWindow()
    window.add(60, 1000)
    window.add(30, 5 * SECOND)
    now = 10 * SECOND
    assert window.free_at_us(100, 10, now) == now
    assert window.free_at_us(100, 50, now) == 1000 + WINDOW_US
    assert window.free_at_us(100, 90, now) == 5 * SECOND + WINDOW_US
    window.hold(20)
    assert window.free_at_us(100, 90, now) == 0, "what is held may never come back in time"


def account(level: str = "tenant", **limits: float) -> Account:
    return Account(level, "x", Limits(**limits))  # type: ignore[arg-type]


def ask(total: int = 10, *, prompt: int = 5, is_stream: bool = False) -> Ask:
    return Ask(prompt_tokens=prompt, total_tokens=total, is_stream=is_stream)


@pytest.mark.parametrize(
    ("limits", "request_", "limit_type"),
    [
        ({"max_prompt_tokens": 4}, ask(), "prompt_tokens"),
        ({"max_total_tokens": 9}, ask(), "total_tokens"),
        ({"tpm": 9}, ask(), "tpm"),
        ({"concurrency": 0}, ask(), "concurrency"),
        ({"streams": 0}, ask(is_stream=True), "streams"),
    ],
)  # fmt: skip
def test_what_can_never_pass_says_so(limits: dict[str, float], request_: Ask, limit_type: str) -> None:
    excess = decide([account("cluster"), account(**limits)], request_, 0)
    assert excess is not None
    assert (excess.limit_type, excess.level, excess.free_at_us) == (limit_type, "tenant", None)


def test_a_refusal_at_the_last_level_takes_nothing_at_the_first() -> None:
    levels = [account("cluster", rps=1, tpm=1000), account("tenant", tpm=1000), account("key", tpm=5)]
    assert decide(levels, ask(), 0)
    assert levels[0].rate.remaining(1, 0) == 1
    assert levels[0].window.held == levels[1].window.held == 0
    levels[2].limits = Limits(tpm=10)
    assert decide(levels, ask(), 0) is None


def test_streams_and_requests_are_taken_at_the_grant() -> None:
    levels = [account(concurrency=2, streams=1)]
    for _ in range(5):
        assert decide(levels, ask(is_stream=True), 0) is None, "a queued request holds neither"
        hold(levels, ask(is_stream=True), 0)
    assert may_start(levels, is_stream=True)
    grant(levels, is_stream=True)
    assert not may_start(levels, is_stream=True)
    assert may_start(levels, is_stream=False)
    grant(levels, is_stream=False)
    assert not may_start(levels, is_stream=False)
    release(levels, is_stream=True)
    assert may_start(levels, is_stream=True)


class WindowMachine(RuleBasedStateMachine):
    """Never one token over in any window; as many admitted as fit; nothing held at the end."""

    TPM = 100

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.levels = [account("tenant", tpm=self.TPM), account("key", tpm=2 * self.TPM)]
        self.held: list[int] = []
        self.settled: list[tuple[int, int]] = []

    def used(self) -> int:
        return sum(tokens for at, tokens in self.settled if at > self.now - WINDOW_US)

    @rule(milliseconds=st.integers(0, 40_000))
    def wait(self, milliseconds: int) -> None:
        self.now += milliseconds * 1000

    @rule(tokens=st.integers(1, 60))
    def arrive(self, tokens: int) -> None:
        fits = self.used() + sum(self.held) + tokens <= self.TPM
        excess = decide(self.levels, ask(tokens, prompt=1), self.now)
        assert (excess is None) == fits
        if excess is None:
            hold(self.levels, ask(tokens, prompt=1), self.now)
            self.held.append(tokens)
        else:
            assert excess.free_at_us is not None
            assert excess.free_at_us > self.now

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back_a_part(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        part = data.draw(st.integers(0, self.held[index]))
        trim(self.levels, part)
        self.held[index] -= part

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        used = data.draw(st.integers(0, held))
        settle(self.levels, held=held, used=used, now_us=self.now)
        self.settled.append((self.now, used))

    @invariant()
    def never_over(self) -> None:
        for level in self.levels:
            assert level.window.held == sum(self.held)
            assert level.window.used(self.now) == self.used()
        assert self.used() + sum(self.held) <= self.TPM


WindowMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestWindow = WindowMachine.TestCase
