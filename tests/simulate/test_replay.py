"""SI-3: a log is decided again by its own fleet and policy, and what differs first is said."""

from typing import Any

import msgspec
import pytest

from headrace.scheduling.counters import TenantCounters
from headrace.scheduling.policy import QueuePolicy, TokenPrices
from headrace.simulate.decision_log import DecisionLog, TraceError, log_of, read_log, write_log
from headrace.simulate.engine import EngineModel
from headrace.simulate.fleet import simulate
from headrace.simulate.logged_setup import (
    LoggedEngine,
    LoggedPolicy,
    LoggedPrices,
    LoggedSetup,
    logged,
    setup_of,
)
from headrace.simulate.outcome import Setup
from headrace.simulate.replay import DECIDED, replay
from headrace.simulate.workload import LOADS, merged
from tests.scheduling import fair_bugs

ODD = Setup(
    name="fair,odd",
    policy=QueuePolicy(
        prices=TokenPrices(input=0.7, output=3, cached_input=0.3),
        batch_floor=0.25,
        aging_us=7,
        quantum=1.5,
        long_prompt_tokens=300,
        interactive_reserve=1,
    ),
    prediction="none",
    engine=EngineModel(
        prefill_us_per_token=0.1, slots=3, kv_tokens=4000, cache_blocks=None, reads_short_first=True
    ),
    workers=3,
    queue_length=150,
    has_preemption=True,
    seed=7,
)


def decided(setup: Setup) -> DecisionLog:
    """As it is read from its file."""
    load = [
        msgspec.structs.replace(one, blocks=(number % 3, 9), service_class="batch" if number % 5 == 0 else "interactive")
        for number, one in enumerate(merged(LOADS["flood-and-visitors"](), 30))
    ]  # fmt: skip
    return read_log([line.decode() for line in write_log(*log_of(simulate(setup, load)))], name="log")


@pytest.mark.parametrize(
    ("logged_as", "real"),
    [(LoggedSetup, Setup), (LoggedPolicy, QueuePolicy), (LoggedPrices, TokenPrices), (LoggedEngine, EngineModel)],
)  # fmt: skip
def test_every_field_of_a_setup_is_logged(logged_as: Any, real: Any) -> None:
    assert logged_as.__struct_fields__ == real.__struct_fields__


def test_a_setup_comes_back_as_it_was() -> None:
    assert setup_of(msgspec.json.decode(msgspec.json.encode(logged(ODD)), type=LoggedSetup)) == ODD


def test_the_same_again() -> None:
    log = decided(ODD)
    assert len(log.lines) > 150
    assert {line.outcome for line in log.lines} == {"served", "refused"}
    assert any(line.preemptions for line in log.lines)
    found = replay(log, name="log")
    assert (found.policy, found.requests, found.differing, found.first) == (
        "fair,odd",
        len(log.lines),
        0,
        None,
    )


@pytest.mark.parametrize("field", DECIDED)
def test_whatever_differs_is_found(field: str) -> None:
    log = decided(ODD)
    place = next(number for number, line in enumerate(log.lines) if line.preemptions)
    line = log.lines[place]
    value = "other" if field in ("replica", "outcome") else getattr(line, field) + 1
    log.lines[place] = msgspec.structs.replace(line, **{field: value})
    found = replay(log, name="log")
    assert found.differing == 1
    assert found.first is not None
    assert (found.first.request, found.first.field, found.first.logged) == (place + 1, field, value)
    assert found.first.decided == getattr(line, field)


def test_the_first_difference_is_the_first_in_time() -> None:
    log = decided(Setup(name="fair", engine=EngineModel(slots=4)))
    late, early = sorted(range(len(log.lines)), key=lambda one: -(log.lines[one].granted_us or 0))[:2]
    for place in (late, early):
        line = log.lines[place]
        log.lines[place] = msgspec.structs.replace(line, granted_us=(line.granted_us or 0) + 5)
    found = replay(log, name="log")
    assert found.differing == 2
    assert found.first is not None
    assert found.first.request == early + 1
    assert found.first.at_us == (found.first.decided or 0)


@pytest.mark.parametrize("bug", ["swapped-weights", "charged-at-the-end"])
def test_a_queue_that_decides_otherwise_is_found_out(bug: str) -> None:
    load = merged(LOADS["weighted"](), 30)
    header, lines = log_of(simulate(Setup(name="fair"), load))
    with fair_bugs.planted(bug):
        found = replay(DecisionLog(header, lines), name="log")
    assert found.differing > 10
    assert found.first is not None
    assert replay(DecisionLog(header, lines), name="log").first is None
    assert TenantCounters.grant is fair_bugs._GRANT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 100_000}, "workers"),
        ({"workers": 0}, "workers"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"policy.batch_floor": 1.0}, "batch_floor"),
        ({"policy.name": "best"}, "best"),
        ({"policy.prices.cached_input": 5.0}, "costs more than one that is computed"),
        ({"engine.slots": 10**6}, "slots"),
        ({"engine.decode_us": 0}, "decode_us"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_setup_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    header, lines = log_of(simulate(Setup(name="fair"), merged(LOADS["overload"](), 2)))
    found = msgspec.to_builtins(header)
    for path, value in change.items():
        *folders, name = path.split(".")
        inner = found["setup"]
        for folder in folders:
            inner = inner[folder]
        inner[name] = value
    text = [msgspec.json.encode(found).decode(), *(msgspec.json.encode(line).decode() for line in lines)]
    with pytest.raises(TraceError, match=f"log: line 1: .*{message}"):
        read_log(text, name="log")


def test_a_log_that_does_not_say_how_it_was_made() -> None:
    log = decided(Setup(name="fair"))
    with pytest.raises(TraceError, match="has lost its first line"):
        replay(DecisionLog(None, log.lines), name="log")
    assert log.header is not None
    served = msgspec.structs.replace(log.header, source="ledger", setup=None)
    with pytest.raises(TraceError, match="came out of a ledger"):
        replay(DecisionLog(served, log.lines), name="log")
