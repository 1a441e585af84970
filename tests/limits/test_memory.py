"""Memory of requests (LI-6): an estimate in whole bytes, taken with the grant, given back to the byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bounds import MIB
from headrace.config.limits import Limits
from headrace.config.settings import MemorySettings
from headrace.limits import memory_book
from headrace.limits.account import Account
from headrace.limits.book import Ask, decide, grant, may_start, release
from headrace.limits.memory import GIB, MemoryRate, bytes_of_gb, gb_of


def account(level: str = "tenant", **limits: float) -> Account:
    return Account(level, "x", Limits(**limits))  # type: ignore[arg-type]


def ask(memory: int, *, waits: bool = False, total: int = 10) -> Ask:
    return Ask(prompt_tokens=5, total_tokens=total, is_stream=False, memory=memory, waits_for_memory=waits)


def test_the_default_formula_of_li_6() -> None:
    rate = MemoryRate.of_settings(MemorySettings())
    assert rate.base == 128 * MIB
    assert rate.bytes_of(1000) / MIB == pytest.approx(128 + 1200, rel=1e-6)


@given(st.integers(0, GIB), st.integers(1, 10 * MIB), st.integers(0, 10 * GIB))
def test_as_many_tokens_as_fit_and_not_one_more(base: int, per_token: int, size: int) -> None:
    rate = MemoryRate(base, per_token)
    tokens = rate.tokens_in(size)
    assert rate.bytes_of(tokens) <= size < rate.bytes_of(tokens + 1)


@given(st.floats(0, 1_000_000))
def test_gigabytes_are_read_and_shown_to_the_kilobyte(gb: float) -> None:
    assert gb_of(bytes_of_gb(gb)) == pytest.approx(gb, abs=1e-6)


def test_what_does_not_fit_alone_is_refused_for_good_also_while_throttled() -> None:
    levels = [account("cluster"), account(gpu_memory_gb=1)]
    for waits in (False, True):
        excess = decide(levels, ask(GIB + 1, waits=waits), 0)
        assert excess is not None
        assert (excess.limit_type, excess.level, excess.free_at_us) == ("memory", "tenant", None)
        assert (excess.limit, excess.held, excess.requested) == (GIB, 0, GIB + 1)
    assert decide(levels, ask(GIB), 0) is None


def test_zero_lets_nothing_through_and_no_limit_everything() -> None:
    assert decide([account(gpu_memory_gb=0)], ask(1), 0) is not None
    assert decide([account()], ask(10**18), 0) is None


def test_what_others_hold_stands_in_the_way_until_it_is_given_back() -> None:
    levels = [account("cluster"), account(gpu_memory_gb=1)]
    grant(levels, is_stream=False, memory=GIB - 10)
    excess = decide(levels, ask(11), 7)
    assert excess is not None
    assert (excess.limit_type, excess.held, excess.free_at_us) == ("memory", GIB - 10, 0)
    assert decide(levels, ask(11, waits=True), 7) is None, "who is throttled waits"
    assert decide(levels, ask(10), 7) is None
    assert may_start(levels, is_stream=False, memory=10)
    assert not may_start(levels, is_stream=False, memory=11)
    assert not memory_book.fits(levels, memory=11)
    assert memory_book.left(levels) == 10
    assert memory_book.smallest_limit(levels) == GIB
    assert levels[0].memory == GIB - 10, "counted where nothing is limited, too"
    release(levels, is_stream=False, memory=GIB - 10)
    assert [one.memory for one in levels] == [0, 0]


def test_another_limit_that_refuses_as_well_comes_first() -> None:
    """A refusal for memory has consequences: it must be memory that it was for."""
    levels = [account(gpu_memory_gb=1, tpm=5)]
    grant(levels, is_stream=False, memory=GIB)
    excess = decide(levels, ask(1), 0)
    assert excess is not None and excess.limit_type == "tpm"


def test_what_grew_beyond_the_limit_goes_on_where_nobody_else_is() -> None:
    levels = [account(gpu_memory_gb=1)]
    assert not may_start(levels, is_stream=False, memory=2 * GIB)
    assert may_start(levels, is_stream=False, memory=2 * GIB, is_begun=True)
    grant(levels, is_stream=False, memory=1)
    assert not may_start(levels, is_stream=False, memory=2 * GIB, is_begun=True)


def test_growing_asks_no_limit() -> None:
    levels = [account(gpu_memory_gb=1)]
    grant(levels, is_stream=False, memory=GIB)
    memory_book.resize(levels, 5)
    assert levels[0].memory == GIB + 5
    memory_book.resize(levels, -5)
    release(levels, is_stream=False, memory=GIB)
    assert levels[0].memory == 0


def test_a_throttled_account_is_not_idle_and_ends_by_itself() -> None:
    one = account(gpu_memory_gb=1)
    one.throttled_until_us = 100
    assert not one.is_idle(99)
    assert one.is_idle(100)
    assert memory_book.is_throttled([account(), one], 99)
    assert not memory_book.is_throttled([account(), one], 100)
    one.limit(Limits(tpm=5))
    assert not memory_book.is_throttled([one], 0), "nothing is guarded any more"
    one.limit(Limits(gpu_memory_gb=1))
    assert not memory_book.is_throttled([one], 0)
