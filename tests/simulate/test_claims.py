"""SC-3, SC-4, SC-6: what the fair queue promises holds on short loads, and does not without it."""

import msgspec
import pytest

from headrace.scheduling.policy import QueuePolicy
from headrace.simulate.claims import check
from headrace.simulate.engine import Engine, EngineModel, Sequence
from headrace.simulate.fleet import simulate
from headrace.simulate.measure import Window, measure
from headrace.simulate.outcome import Outcome, Setup
from headrace.simulate.tables import Line
from headrace.simulate.workload import LOADS, Arrival, merged

SMALL = EngineModel(slots=4, kv_tokens=100_000)


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return list(check(duration_s=180, idle_s=120))


def test_every_bound_is_met(lines: list[Line]) -> None:
    assert [line for line in lines if line.is_met is False] == []
    assert sum(line.is_met is True for line in lines) >= 10


def test_without_its_means_no_claim_would_hold(lines: list[Line]) -> None:
    """The figures of the lines that are there to compare are outside the bounds of those that promise."""
    promised = {line.figure: line.bound for line in lines if line.bound}
    found = {}
    for line in lines:
        if line.bound is None and line.figure in promised:
            sign, limit = promised[line.figure].split()  # type: ignore[union-attr]
            found[line.figure] = (
                line.obtained > float(limit) if sign == "<=" else line.obtained < float(limit)
            )
    assert found == {
        "batch's part of the service, %": True,
        "batch's longest wait, s": True,
        "first token of short ones, p99, times alone": True,
        # The budget is for the short ones: the long one is a little slower with it.
        "latency of long ones, mean, times alone": False,
        "first token of chats, p95, steps later than alone": True,
    }


def preempting(load: list[Arrival], **changes: object) -> Outcome:
    setup = Setup(name="x", engine=SMALL, has_preemption=True)
    return simulate(msgspec.structs.replace(setup, **changes), load)


def test_who_is_stopped_loses_nothing_but_time() -> None:
    load = merged(LOADS["flood-and-visitors"](), 60)
    outcome = preempting(load)
    stopped = [
        (arrival, one) for arrival, one in zip(load, outcome.served, strict=True) if one.num_preemptions
    ]
    assert stopped
    assert {arrival.tenant for arrival, _ in stopped} == {"flood"}
    assert all(one.lost_tokens > 0 for _, one in stopped)
    for arrival, one in zip(load, outcome.served, strict=True):
        assert arrival.arrival_us <= one.granted_us <= one.first_us <= one.last_us
        # All tokens were generated, each in a step of its own, on top of what it waited.
        computed_us = one.last_us - arrival.arrival_us - one.waited_us
        assert computed_us >= (arrival.output_tokens - 1) * SMALL.decode_us
    figures = measure(outcome, Window(duration_s=60))
    assert figures.preemptions == sum(one.num_preemptions for _, one in stopped)
    assert figures.lost_tokens == sum(one.lost_tokens for _, one in stopped)


def test_nobody_is_stopped_without_being_asked_for() -> None:
    load = merged(LOADS["flood-and-visitors"](), 60)
    fifo = preempting(load, policy=QueuePolicy(name="fifo"))
    off = preempting(load, has_preemption=False)
    batch = [
        msgspec.structs.replace(one, service_class="interactive" if one.tenant == "flood" else "batch")
        for one in load
    ]
    # One that has aged counts as interactive and asks.
    for outcome in (fifo, off, preempting(batch, policy=QueuePolicy(aging_us=10**12))):
        assert not any(one.num_preemptions for one in outcome.served)


def test_a_long_prompt_has_nobody_stopped_it_waits_for_its_budget() -> None:
    load = merged(LOADS["flood-and-visitors"](), 30)
    policy = QueuePolicy(long_prompt_tokens=50)  # the chats' prompts are longer
    outcome = preempting(load, policy=policy)
    assert not any(one.num_preemptions for one in outcome.served)


def test_a_stopped_sequence_goes_on_where_it_was() -> None:
    model = EngineModel(prefill="whole", prefill_us_per_token=10, decode_us=100, decode_us_per_context_token=0, decode_us_per_sequence=0)  # fmt: skip
    engine = Engine("r", model)
    sequence = Sequence(7, Arrival(arrival_us=0, tenant="t", prompt_tokens=5, output_tokens=4))
    engine.start(sequence, 0)
    engine.run(1)
    assert engine.now_us == 150  # the prompt and its first token, and a second one
    assert engine.stop(7) is sequence
    assert engine.is_idle
    assert (sequence.done_tokens, sequence.lost_tokens) == (2, 7)
    engine.start(sequence, 1000)
    engine.run(1e9)
    # Seven tokens read in again, and with them the third; then the fourth.
    assert (sequence.first_us, sequence.last_us) == (50, 1000 + 70 + 100)
