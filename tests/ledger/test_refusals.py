"""ME-2: refusals are recorded one by one up to a rate, above it in sums, and none is lost."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from headrace.ledger.history import flaw_of
from headrace.ledger.records import OperationRecord
from headrace.ledger.refusals import RefusalSummary
from tests.store.ledger_samples import BASE_TS, record

SECOND_US = 1_000_000


def refusal(number: int, **changes: object) -> OperationRecord:
    fields: dict[str, object] = {
        "status": 429,
        "outcome": "refused",
        "code": "rate_limit_exceeded",
        "count_source": "none",
        "prompt_tokens": 0,
        "completion_tokens": 0,
    }
    return record(f"req_{number}", **(fields | changes))


def test_up_to_the_rate_each_is_recorded_alone_and_the_rest_of_the_second_is_one() -> None:
    summary = RefusalSummary(singles_per_s=3)
    alone = [summary.take(refusal(number), BASE_TS + number) for number in range(10)]
    assert alone == [True] * 3 + [False] * 7
    assert summary.due(BASE_TS + SECOND_US - 1) == []
    (summed,) = summary.due(BASE_TS + SECOND_US)
    assert (summed.request_id, summed.num_requests) == ("req_3", 7)
    assert (summed.code, summed.tenant_id, summed.model) == ("rate_limit_exceeded", "demo", "smol")
    assert summary.due(BASE_TS + SECOND_US) == []
    assert summary.take(refusal(11), BASE_TS + SECOND_US), "a new second begins anew"


def test_each_tenant_key_model_and_code_is_counted_by_itself() -> None:
    summary = RefusalSummary(singles_per_s=1)
    kinds = [{}, {"tenant_id": "b"}, {"api_key_id": "b"}, {"model": "b"}, {"code": "queue_full"}]
    for number, changes in enumerate(kinds):
        assert summary.take(refusal(number, **changes), 0)
    for number, changes in enumerate(kinds):
        assert not summary.take(refusal(10 + number, **changes), 1)
    assert [one.request_id for one in summary.drain()] == [f"req_{10 + number}" for number in range(5)]


def test_what_a_sum_does_not_share_is_left_empty() -> None:
    summary = RefusalSummary(singles_per_s=0)
    summary.take(refusal(1, user_id="ann", department="x", trace_id="a", end_ts=5, latency_us=2), 0)
    summary.take(refusal(2, user_id="bob", department="x", trace_id="b", end_ts=9, latency_us=1), 0)
    (summed,) = summary.drain()
    assert (summed.user_id, summed.department, summed.trace_id) == (None, "x", "")
    assert (summed.end_ts, summed.latency_us) == (9, 2)


def test_too_many_kinds_are_folded_by_tenant() -> None:
    summary = RefusalSummary(singles_per_s=1, sums_max=2)
    alone = 0
    for number in range(30):
        alone += summary.take(refusal(number, tenant_id=f"t{number % 2}", api_key_id=f"key_{number}"), number)
    assert alone == 2, "kinds beyond the bound are not even counted one by one"
    sums = summary.drain()
    assert len(sums) == 4
    folded = sums[2:]
    assert {one.tenant_id: (one.api_key_id, one.model, one.num_requests) for one in folded} == {
        "t0": ("", "smol", 13),
        "t1": ("", "smol", 13),
    }
    assert summary.drain() == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "due"]),
        st.integers(0, 3_000_000),
        st.sampled_from("ab"),
        st.sampled_from("xyz"),
        st.sampled_from(["queue_full", None]),
    ),
    max_size=200,
)


@given(STEPS, st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_what_goes_in_comes_out_for_any_timing(
    steps: list[tuple[str, int, str, str, str | None]], singles: int, sums_max: int, is_ordered: bool
) -> None:
    summary = RefusalSummary(singles_per_s=singles, sums_max=sums_max)
    taken: Counter[str] = Counter()
    out: list[OperationRecord] = []
    per_second: dict[tuple[object, ...], int] = defaultdict(int)
    now_us = 0
    for number, (what, time, tenant, key, code) in enumerate(steps):
        now_us = max(now_us, now_us // 2 + time) if is_ordered else time
        if what == "due":
            out += summary.due(now_us)
            continue
        one = refusal(number, tenant_id=tenant, api_key_id=key, code=code)
        taken[tenant] += 1
        if summary.take(one, now_us):
            out.append(one)
            per_second[now_us // SECOND_US, tenant, key, code] += 1
        assert len(summary._sums) <= sums_max
        assert len(summary._num_singles) <= sums_max
        assert len(summary._tenant_sums) <= 2
    out += summary.drain()
    found: Counter[str] = Counter()
    for one in out:
        found[one.tenant_id] += one.num_requests
        assert flaw_of(one) is None
    assert found == taken
    assert len({one.request_id for one in out}) == len(out), "each id is on one record"
    if is_ordered:
        assert all(number <= singles for number in per_second.values())
