"""SI-3: the decision log says what was decided, and the same policy decides the same again."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.policy import QueuePolicy
from headrace.simulate.decision_log import (
    DecisionLine,
    Header,
    TraceError,
    arrival_of,
    log_of,
    read_log,
    served_of,
    write_log,
)
from headrace.simulate.engine import EngineModel
from headrace.simulate.fleet import simulate
from headrace.simulate.outcome import Outcome, Setup
from headrace.simulate.traces import read
from headrace.simulate.workload import LOADS, Arrival, Client, merged

HEADER = '{"format":"headrace-decisions","version":1,"source":"simulation"}\n'
REQUEST = '{"arrival_us":3,"tenant":"t","prompt_tokens":1,"output_tokens":2}\n'


def text_of(outcome: Outcome) -> list[str]:
    return [line.decode() for line in write_log(*log_of(outcome))]


@pytest.mark.parametrize(
    "setup",
    [
        Setup(name="fair", workers=2, prediction="half", seed=3),
        Setup(name="fifo", policy=QueuePolicy(name="fifo")),
        Setup(name="grows", prediction="none", engine=EngineModel(slots=4)),
        Setup(name="stops", has_preemption=True, engine=EngineModel(slots=4), prediction="half"),
        Setup(name="caches", engine=EngineModel(cache_blocks=4), policy=QueuePolicy(quantum=50)),
    ],
    ids=lambda setup: setup.name,
)
def test_a_replay_decides_the_same(setup: Setup) -> None:
    arrivals = [
        msgspec.structs.replace(one, blocks=(number % 3, 9), weight=2.0 if one.tenant == "flood" else 1.0)
        for number, one in enumerate(merged(LOADS["flood-and-visitors"](), 30))
    ]
    first = simulate(setup, arrivals)
    log = read_log(text_of(first), name="log")
    # Another seed: what was expected of each answer comes out of the log.
    again = simulate(msgspec.structs.replace(setup, seed=99), [arrival_of(line) for line in log.lines])
    assert [served_of(line) for line in log.lines] == [
        msgspec.structs.replace(one, cached_tokens=0) for one in again.served
    ]
    assert text_of(again)[1:] == text_of(first)[1:]


lines_lists = st.lists(
    st.builds(
        DecisionLine,
        arrival_us=st.integers(0, 10**12),
        tenant=st.text(min_size=1, max_size=5),
        prompt_tokens=st.integers(10, 100),
        output_tokens=st.integers(0, 100),
        cached_tokens=st.integers(0, 10),
        expected_output_tokens=st.none() | st.integers(0, 9),
        weight=st.floats(0.01, 100),
        service_class=st.sampled_from(["interactive", "batch"]),
        priority=st.integers(-3, 3),
        blocks=st.sampled_from([(), (1, 2)]),
        outcome=st.sampled_from(["served", "refused", "client_closed"]),
        granted_us=st.none() | st.integers(0, 10**12),
        last_us=st.none() | st.integers(0, 10**12),
        replica=st.none() | st.just("w"),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=100)
@given(lines_lists)
def test_what_is_written_is_read(lines: list[DecisionLine]) -> None:
    header = Header(format="headrace-decisions", version=1, source="ledger", start_ts=7)
    lines[0] = msgspec.structs.replace(lines[0], arrival_us=0)
    lines.sort(key=lambda line: line.arrival_us)
    found = read_log([line.decode() for line in write_log(header, lines)], name="log")
    assert (found.header, found.lines) == (header, lines)


def test_times_begin_with_the_first_request() -> None:
    moved = REQUEST.replace("3", "8").replace("}", ',"granted_us":10,"first_us":11,"last_us":12}')
    early, late = read_log([HEADER, moved, REQUEST], name="log").lines
    assert (early.arrival_us, late.arrival_us) == (0, 5)
    assert (late.granted_us, late.first_us, late.last_us) == (7, 8, 9)
    assert served_of(late).waited_us == 2
    assert served_of(early).last_us == 0


def test_a_part_of_a_log_and_fields_to_come_are_read() -> None:
    assert len(read_log([REQUEST, REQUEST], name="log").lines) == 2
    more = REQUEST.replace("}", ',"new":1}')
    assert read([HEADER, "\n", more], name="log") == [
        Arrival(arrival_us=0, tenant="t", prompt_tokens=1, output_tokens=2)
    ]


def test_nothing_but_sizes_and_times_is_written() -> None:
    """Whoever adds a field to the log has to think of this."""
    outcome = simulate(Setup(name="x", queue_length=1), merged([Client(tenant="a", rate_rps=500)], 1))
    names = {name for line in text_of(outcome)[1:] for name in json.loads(line)}
    assert names <= {
        "arrival_us", "tenant", "prompt_tokens", "output_tokens", "cached_tokens", "expected_output_tokens", "weight",
        "service_class", "priority", "blocks", "outcome", "granted_us", "waited_us", "first_us", "last_us", "replica",
        "preemptions", "lost_tokens",
    }  # fmt: skip
    assert {json.loads(line).get("outcome") for line in text_of(outcome)[1:]} == {None, "refused"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER], "has no requests"),
        ([HEADER.replace("1", "2"), REQUEST], "line 1: is a decision log of version 2; this headrace reads version 1"),
        ([HEADER.replace('"simulation"', '"x"'), REQUEST], "line 1: .*source"),
        ([HEADER, REQUEST, "{"], "line 3"),
        ([HEADER, REQUEST.replace("3", '"x"')], "line 2: .*arrival_us"),
        ([HEADER, REQUEST.replace("1", "-1")], "line 2: prompt_tokens is -1; allowed are 0 to 10,000,000"),
        ([HEADER, REQUEST.replace("2", "20000000")], "line 2: output_tokens is 20000000; allowed are"),
        ([HEADER, REQUEST.replace("}", ',"priority":101}')], "line 2: priority is 101; allowed are -100 to 100"),
        ([HEADER, REQUEST.replace("3", str(10**16))], "line 2: arrival_us is 10000000000000000; allowed is"),
        ([HEADER, REQUEST, REQUEST.replace("3", str(2 * 10**14))], "more than 100,000,000 s after its first one"),
        ([HEADER, REQUEST.replace("}", ',"cached_tokens":2}')], "more than prompt_tokens 1"),
        ([HEADER, REQUEST.replace("}", ',"expected_output_tokens":-2}')], "expected_output_tokens is -2"),
        ([HEADER, REQUEST.replace("}", ',"weight":0}')], "not a positive number"),
        ([HEADER, REQUEST.replace("}", ',"service_class":"x"}')], "allowed are interactive, batch"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(lines, name="log")
