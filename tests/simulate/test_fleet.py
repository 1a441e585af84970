"""Runs of a simulated fleet: nothing is lost, the same again is the same, and the policies do what they promise."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.fairness import percentile
from headrace.scheduling.policy import POLICIES, PolicyName, QueuePolicy
from headrace.simulate.engine import EngineModel
from headrace.simulate.fleet import simulate
from headrace.simulate.measure import Figures, Window, measure
from headrace.simulate.outcome import Outcome, Setup, decisions
from headrace.simulate.published import OVERLOAD, TABLES
from headrace.simulate.tables import PUBLISHED_ENGINE, REAL_TRACE, rerun
from headrace.simulate.workload import LOADS, Arrival, Client, merged

SMALL = EngineModel(slots=3, kv_tokens=600, cache_blocks=2, reads_short_first=True)

arrivals_lists = st.lists(
    st.builds(
        Arrival,
        arrival_us=st.integers(0, 3_000_000),
        tenant=st.sampled_from("abc"),
        prompt_tokens=st.integers(0, 700),
        output_tokens=st.integers(0, 300),
        weight=st.sampled_from([1.0, 3.0]),
        service_class=st.sampled_from(["interactive", "batch"]),
        priority=st.integers(0, 2),
        blocks=st.sampled_from([(), (1,), (1, 2)]),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals_lists,
    st.sampled_from(POLICIES),
    st.sampled_from(["exact", "half", "none"]),
    st.integers(1, 3),
    st.sampled_from(["chunked", "whole"]),
    st.booleans(),
    st.integers(0, 2),
)
def test_everybody_is_served_once_in_a_possible_order_of_times(
    arrivals: list[Arrival],
    name: PolicyName,
    prediction: str,
    workers: int,
    prefill: str,
    has_lookahead: bool,
    reserve: int,
) -> None:
    setup = Setup(
        name="x",
        policy=QueuePolicy(name=name, long_prompt_tokens=200, interactive_reserve=reserve, quantum=100),
        prediction=prediction,  # type: ignore[arg-type]
        engine=msgspec.structs.replace(SMALL, prefill=prefill, has_lookahead=has_lookahead),
        workers=workers,
    )
    arrivals.sort(key=lambda one: one.arrival_us)
    outcome = simulate(setup, arrivals)
    for arrival, served in decisions(outcome):
        assert arrival.arrival_us <= served.granted_us <= served.first_us <= served.last_us
        assert served.replica is not None
        assert not served.is_refused
    assert 0 < outcome.busy_share <= 1
    assert simulate(setup, arrivals).served == outcome.served


def test_a_full_queue_refuses() -> None:
    arrivals = merged([Client(tenant="a", rate_rps=50)], 10)
    outcome = simulate(Setup(name="x", queue_length=5), arrivals)
    refused = [served for _, served in decisions(outcome) if served.is_refused]
    assert refused
    assert all(served.last_us == 0 for served in refused)
    figures = measure(outcome, Window(duration_s=10, warm_up_s=0))
    assert figures.served + figures.refused == figures.requests == 500


def figures_of(load: str, policy: QueuePolicy, *, duration_s: float = 600, engine: EngineModel) -> Figures:
    setup = Setup(name=policy.name, policy=policy, prediction="half", engine=engine)
    return measure(simulate(setup, merged(LOADS[load](), duration_s)), Window(duration_s=duration_s))


def test_the_tables_are_met() -> None:
    lines = list(rerun(TABLES, None))
    assert {line.table for line in lines} == {table.name for table in TABLES if table.load != REAL_TRACE}
    assert [line for line in lines if line.is_met is False] == []
    far = [
        (line.run, line.figure, line.expected, line.obtained)
        for line in lines
        if line.expected
        and line.figure.startswith("service/s")
        and abs(line.obtained / line.expected - 1) > 0.06
    ]
    assert far == [], "the engine model is not the one of the tables"


def test_the_overload_table_would_not_be_met_first_in_first_out() -> None:
    setup = Setup(name="fifo", policy=QueuePolicy(name="fifo"), engine=PUBLISHED_ENGINE)
    figures = measure(simulate(setup, merged(LOADS["overload"](), 360)), OVERLOAD.window)
    assert figures.accumulated_difference > 200_000


def test_batch_keeps_its_floor_and_its_longest_wait_is_bounded() -> None:
    policy = QueuePolicy(batch_floor=0.1, aging_us=30_000_000)
    high, low = figures_of("classes", policy, engine=EngineModel()).tenants
    assert low.service_per_s >= 0.1 * (high.service_per_s + low.service_per_s)
    assert low.ttft_s.max < 30 + 10


def test_a_long_prompt_does_not_double_the_first_token_of_short_requests() -> None:
    policy = QueuePolicy(long_prompt_tokens=2000)
    engine = EngineModel(reads_short_first=True)
    short = figures_of("long-prompts", policy, engine=engine).tenants[1]
    setup = Setup(name="alone", policy=policy, engine=engine)
    alone = measure(
        simulate(setup, merged(LOADS["long-prompts"]()[:1], 600)), Window(duration_s=600)
    ).tenants[0]
    assert (short.tenant, alone.tenant) == ("short", "short")
    assert short.ttft_s.p99 < 2 * alone.ttft_s.p99


def test_who_returns_after_a_while_gets_its_share_at_once_and_no_more() -> None:
    setup = Setup(name="fair", engine=PUBLISHED_ENGINE)
    outcome: Outcome = simulate(setup, merged(LOADS["returning"](), 600))
    since = [
        arrival.tenant
        for arrival, served in decisions(outcome)
        # In its first seconds it has fewer waiting than there are places when a wave of answers ends.
        if 310_000_000 <= served.granted_us < 360_000_000
    ]
    assert abs(since.count("back") - since.count("here")) <= 2
    for minute in (7, 8, 9):  # what was running when it came is served in minute 6
        window = Window(duration_s=60.0 * minute, warm_up_s=60.0 * (minute - 1))
        back, here = measure(outcome, window).tenants
        assert back.service_per_s == pytest.approx(here.service_per_s, rel=0.06), minute


def test_a_short_chat_does_not_wait_behind_full_slots_of_long_jobs() -> None:
    engine = EngineModel(slots=8, kv_tokens=100_000)

    def chat(policy: QueuePolicy, load: list[Client]) -> float:
        """95 % of its first tokens come within so many seconds."""
        outcome = simulate(Setup(name="x", policy=policy, engine=engine), merged(load, 300))
        return percentile(
            sorted(
                (served.first_us - arrival.arrival_us) / 1e6
                for arrival, served in decisions(outcome)
                if arrival.tenant == "chat"
            ),
            0.95,
        )

    load = LOADS["flood-and-chat"]()
    alone = chat(QueuePolicy(), load[1:])
    step_s = (
        engine.decode_us + 8 * (engine.decode_us_per_sequence + 1256 * engine.decode_us_per_context_token)
    ) / 1e6
    assert chat(QueuePolicy(name="fifo"), load) > 100 * alone
    assert chat(QueuePolicy(), load) > 10 * (alone + 2 * step_s), (
        "without the reserve there is something to gain"
    )
    assert chat(QueuePolicy(interactive_reserve=1), load) <= alone + 2 * step_s
