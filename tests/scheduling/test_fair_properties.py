"""The fair queue under random histories, and the proof that these would find a bug."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling import fair_bugs
from tests.scheduling.fair_machine import FairMachine
from tests.scheduling.fair_shares import check_backlogged, check_return, check_stopping

FairMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestFairMachine = FairMachine.TestCase


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_backlogged_tenants_are_never_further_apart_than_one_request(seed: int) -> None:
    check_backlogged(seed)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_who_returns_gets_its_share_and_no_more(seed: int) -> None:
    check_return(seed)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_tenants_are_not_stopped_for_each_other_in_turn(seed: int) -> None:
    check_stopping(seed)


@pytest.mark.parametrize("bug", fair_bugs.BUGS)
def test_a_planted_bug_is_found_from_outside(bug: str) -> None:
    with fair_bugs.planted(bug):
        assert fair_bugs.outside(20) is not None
    assert fair_bugs.outside(2) is None


@pytest.mark.parametrize("bug", fair_bugs.BUGS)
def test_a_planted_bug_is_found_by_histories(bug: str) -> None:
    with fair_bugs.planted(bug):
        assert fair_bugs.inside(100) is not None
