"""ME-6: what an aborted or failed operation is charged, by policy."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ledger.charging import OUR_FAULTS, charge, without_charge
from headrace.ledger.closing import (
    CLIENT_CLOSED,
    COMPLETED,
    EXPIRED,
    LATE,
    NOTHING,
    RECOVERED,
    SHUTDOWN,
    Counts,
    Ending,
    close,
    kind_of,
)
from headrace.ledger.history import TOKENS_MAX, History, flaw_of, flaw_of_reservation
from headrace.ledger.records import AbortPolicy, OperationRecord, Outcome, Refund
from tests.store.ledger_samples import record, reservation

POLICIES: tuple[AbortPolicy, ...] = get_args(AbortPolicy)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
ENDED_EARLY = [outcome for outcome in OUTCOMES if outcome != "completed"]
TOKENS = st.integers(0, 10_000)


def charged(policy: AbortPolicy, outcome: Outcome, delivered_tokens: int | None) -> tuple[int, int]:
    return charge(policy, outcome, prompt_tokens=90, completion_tokens=10, delivered_tokens=delivered_tokens)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("delivered_tokens", [None, 0, 3])
def test_a_completed_operation_costs_what_the_engine_counted(
    policy: AbortPolicy, delivered_tokens: int | None
) -> None:
    assert charged(policy, "completed", delivered_tokens) == (90, 10)


@pytest.mark.parametrize("outcome", ENDED_EARLY)
def test_generated_charges_what_was_computed(outcome: Outcome) -> None:
    assert charged("generated", outcome, 0) == (90, 10)


@pytest.mark.parametrize("outcome", ENDED_EARLY)
@pytest.mark.parametrize(
    ("delivered_tokens", "expected"),
    [(None, (0, 0)), (0, (0, 0)), (1, (90, 1)), (10, (90, 10)), (11, (90, 10))],
)
def test_delivered_charges_what_the_connection_got(
    outcome: Outcome, delivered_tokens: int | None, expected: tuple[int, int]
) -> None:
    assert charged("delivered", outcome, delivered_tokens) == expected


@pytest.mark.parametrize("outcome", ENDED_EARLY)
def test_free_on_error_forgives_our_faults_only(outcome: Outcome) -> None:
    is_our_fault = outcome not in ("client_closed", "refused")
    assert (outcome in OUR_FAULTS) == is_our_fault
    assert charged("free_on_error", outcome, 0) == ((0, 0) if is_our_fault else (90, 10))


@given(st.sampled_from(POLICIES), st.sampled_from(OUTCOMES), TOKENS, TOKENS, st.none() | TOKENS)
def test_never_more_is_charged_than_was_used(
    policy: AbortPolicy, outcome: Outcome, prompt: int, completion: int, delivered: int | None
) -> None:
    counts = Counts(source="engine", prompt_tokens=prompt, completion_tokens=completion)
    final = close(
        reservation(department="research"),
        Ending(500, outcome),
        counts,
        worker_id="w0",
        end_ts=1,
        abort_policy=policy,
        delivered_tokens=delivered,
    )
    assert flaw_of(final) is None
    assert final.abort_policy == policy
    assert final.department == "research"
    assert 0 <= final.charged_prompt_tokens <= prompt
    assert 0 <= final.charged_completion_tokens <= completion


def test_a_record_says_which_error_the_client_got_and_what_it_received() -> None:
    counts = Counts(source="engine", prompt_tokens=5, completion_tokens=7)
    ended = close(
        reservation(), Ending(502, "worker_lost", "worker_lost"), counts, worker_id=None, end_ts=1,
        delivered_tokens=4,
    )  # fmt: skip
    assert (ended.code, ended.delivered_tokens) == ("worker_lost", 4)
    assert close(reservation(), COMPLETED, counts, worker_id=None, end_ts=1).delivered_tokens == 7
    assert close(reservation(), RECOVERED, counts, worker_id=None, end_ts=1).delivered_tokens == 0


@pytest.mark.parametrize(
    ("ending", "source", "tokens", "expected"),
    [
        (COMPLETED, "engine", 5, "settle"),
        (CLIENT_CLOSED, "engine", 0, "settle"),
        (CLIENT_CLOSED, "none", 0, "void"),
        (SHUTDOWN, "none", 0, "void"),
        (SHUTDOWN, "none", 1, "settle"),
        (EXPIRED, "none", 0, "expire"),
        (EXPIRED, "progress_file", 3, "expire"),
        (LATE, "engine", 3, "settle"),
    ],
)
def test_what_the_journal_calls_an_end(ending: Ending, source: str, tokens: int, expected: str) -> None:
    final = record(outcome=ending.outcome, count_source=source, prompt_tokens=tokens, completion_tokens=0)
    assert kind_of(final) == expected


def test_nothing_ran_nothing_charged() -> None:
    final = close(reservation(), CLIENT_CLOSED, NOTHING, worker_id=None, end_ts=1)
    assert (final.charged_prompt_tokens, final.charged_completion_tokens) == (0, 0)
    assert kind_of(final) == "void"


@pytest.mark.parametrize("tokens", [-1, 10**30])
def test_nonsense_of_a_foreign_server_can_be_recorded_all_the_same(tokens: int) -> None:
    counts = Counts(
        source="upstream_usage", prompt_tokens=tokens, prompt_tokens_cached=tokens, completion_tokens=tokens
    )
    final = close(reservation(), COMPLETED, counts, worker_id=None, end_ts=1)
    expected = 0 if tokens < 0 else TOKENS_MAX
    assert (final.prompt_tokens, final.prompt_tokens_cached, final.completion_tokens) == (expected,) * 3
    assert flaw_of(final) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": -1},
        {"completion_tokens": -1},
        {"prompt_tokens_cached": -1},
        {"delivered_tokens": -1},
        {"charged_prompt_tokens": -1},
        {"charged_completion_tokens": -1},
        {"charged_prompt_tokens": 91},
        {"charged_completion_tokens": 11},
        {"prompt_tokens": TOKENS_MAX + 1},
        {"num_requests": 0},
    ],
)
def test_flaws_are_named(changes: dict[str, int]) -> None:
    flaw = flaw_of(record(**changes))
    assert flaw is not None
    assert str(next(iter(changes.values()))) in flaw
    assert flaw_of(record()) is None


@pytest.mark.parametrize(
    "changes", [{"reserved_tokens": -1}, {"reserved_tokens": TOKENS_MAX + 1}, {"prompt_tokens_estimated": -1}]
)
def test_flaws_of_a_reservation(changes: dict[str, int]) -> None:
    assert flaw_of_reservation(reservation(**changes)) is not None
    assert flaw_of_reservation(reservation()) is None


def full(outcome: Outcome, completion_tokens: int) -> OperationRecord:
    return record(
        outcome=outcome,
        completion_tokens=completion_tokens,
        charged_prompt_tokens=90,
        charged_completion_tokens=completion_tokens,
    )


def test_the_row_is_the_latest_state_and_a_refund_outlives_a_late_settlement() -> None:
    expired, late = full("expired", 1), full("late", 9)
    refund = Refund(request_id="req_1", reason="ours", actor="me", at_ts=5)
    assert History(reservation(), expired).row == expired
    assert History(reservation(), expired, late).row == late
    row = History(reservation(), expired, late, refund).row
    assert row == without_charge(late)
    assert (row.charged_prompt_tokens, row.charged_completion_tokens, row.refunded) == (0, 0, True)
    assert row.completion_tokens == 9, "what was used still stands"
