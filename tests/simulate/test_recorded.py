"""SI-3: what the rows of a ledger amount to as a decision log."""

from typing import Any

import msgspec
import pytest

from headrace.simulate.decision_log import TraceError, served_of
from headrace.simulate.engine import EngineModel
from headrace.simulate.recorded import engine_speed, record
from headrace.store.traffic import TrafficRow

START_TS = 1_790_000_000_000_000


def row(number: int = 0, **changes: Any) -> TrafficRow:
    enter_ts = START_TS + 1000 * number
    fields: dict[str, Any] = {
        "request_id": f"req_{number}",
        "num_requests": 1,
        "tenant_id": "acme",
        "model": "smol",
        "priority": "interactive",
        "prompt_tokens": 100,
        "prompt_tokens_cached": 40,
        "completion_tokens": 11,
        "prefill_us": 6_000,
        "decode_us": 50_000,
        "queue_enter_ts": enter_ts,
        "start_ts": enter_ts + 30,
        "first_token_ts": enter_ts + 6_030,
        "end_ts": enter_ts + 56_030,
        "outcome": "completed",
        "worker_id": "smol-0",
    }
    return TrafficRow(**(fields | changes))


def test_sizes_and_times_are_the_real_ones() -> None:
    found = record([row(0), row(5, tenant_id="other", priority="batch")], {"acme": 2.5}, name="ledger.db")
    first, second = found.log.lines
    assert msgspec.to_builtins(first) == {
        "arrival_us": 0, "tenant": "acme", "prompt_tokens": 100, "output_tokens": 11, "cached_tokens": 40, "weight": 2.5,
        "granted_us": 30, "first_us": 6_030, "last_us": 56_030, "replica": "smol-0",
    }  # fmt: skip
    assert (second.arrival_us, second.weight, second.service_class) == (5000, 1.0, "batch")
    assert found.log.header is not None
    assert (found.log.header.source, found.log.header.start_ts) == ("ledger", START_TS)
    assert served_of(first).waited_us == 30


def test_who_ended_early_comes_with_what_it_used() -> None:
    rows = [
        row(0, outcome="client_closed", completion_tokens=4),
        row(1, outcome="worker_lost", prompt_tokens=64, prompt_tokens_cached=0, completion_tokens=0, first_token_ts=None),
        row(2, outcome="refused", num_requests=7, prompt_tokens=0, prompt_tokens_cached=0, completion_tokens=0, start_ts=None, first_token_ts=None),
        row(3, outcome="client_closed", prompt_tokens=0, prompt_tokens_cached=0, completion_tokens=0, start_ts=None, first_token_ts=None),
        row(4),
    ]  # fmt: skip
    found = record(rows, {}, name="ledger.db")
    assert [(line.outcome, line.prompt_tokens, line.output_tokens) for line in found.log.lines] == [
        ("client_closed", 100, 4),
        ("worker_lost", 64, 0),
        ("served", 100, 11),
    ]
    assert found.counts() == {"operations": 11, "replayed": 3, "aborted": 2, "refused": 7, "uncounted": 1}
    # Without a first token it was not served; with one it was, however it ended.
    assert [bool(served_of(line).last_us) for line in found.log.lines] == [True, False, True]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no operations in this period"),
        ([row(outcome="refused")], "nothing to replay: of 1 operations 1 were refused"),
        ([row(prompt_tokens=0, prompt_tokens_cached=0, completion_tokens=0)], "the others used nothing"),
        ([row(0), row(1, completion_tokens=-3)], "operation req_1: completion_tokens is -3; .*ledger verify"),
        ([row(prompt_tokens_cached=101)], "prompt_tokens_cached 101 is more than prompt_tokens 100"),
        ([row(end_ts=START_TS - 1)], "it ended .* before it came"),
        ([row(num_requests=0)], "num_requests is 0"),
        ([row(0), row(1, model="large"), row(2)], r"several models, and a fleet serves one: smol \(2\), large \(1\)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(rows: list[TrafficRow], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        record(rows, {}, name="ledger.db")


def test_the_speed_is_that_of_the_least_disturbed() -> None:
    calm = [row(number) for number in range(20)]
    busy = [row(number, prefill_us=60_000, decode_us=500_000) for number in range(20, 100)]
    model = EngineModel()
    found = engine_speed([*calm, *busy], model)
    assert found is not None
    assert found.prefill_us_per_token == 100
    assert found.decode_us + found.decode_us_per_sequence == pytest.approx(5000)
    assert found.slots == model.slots
    assert engine_speed(calm[:19], model) is None
    assert engine_speed([row(number, completion_tokens=1) for number in range(50)], model) is None
