"""`headrace simulate` as it is called."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from headrace.cli import simulate as command
from headrace.cli.main import main
from headrace.simulate.published import OVERLOAD
from headrace.simulate.tables import line_of


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_two_policies_side_by_side() -> None:
    result = call("run", "--load", "overload", "--duration", "200", "--json")
    assert result.exit_code == 0, result.output
    fifo, fair = json.loads(result.output)["runs"]
    assert (fifo["name"], fair["name"]) == ("fifo", "fair")
    assert fair["jain"] > fifo["jain"]
    text = call("run", "--load", "overload", "--duration", "200").output
    assert text.splitlines()[0].split() == ["fifo", "fair"]
    assert "by tenant (in brackets: compared with fifo)" in text


def test_decisions_are_written_without_content_and_replayed(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    first = call("run", "--load", "weighted", "--duration", "20", "--policy", "fair", "--decisions", str(log), "--json")  # fmt: skip
    assert first.exit_code == 0, first.output
    header, *lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert header["format"] == "headrace-decisions"
    assert {*lines[0]} == {
        "arrival_us",
        "tenant",
        "prompt_tokens",
        "output_tokens",
        "expected_output_tokens",
        "weight",
        "granted_us",
        "waited_us",
        "first_us",
        "last_us",
        "replica",
    }
    again = call(
        "run", "--trace", str(log), "--policy", "fair", "--decisions", str(tmp_path / "again"), "--json"
    )
    recorded, replayed = json.loads(again.output)["runs"]
    assert recorded["requests"] == replayed["requests"] == len(lines) == 160
    assert (recorded["name"], replayed["name"]) == ("recorded", "fair")
    for field in ("wait_s", "ttft_s", "latency_s", "jain", "tenants", "accumulated_difference"):
        assert recorded[field] == replayed[field], field
    assert (tmp_path / "again").read_bytes() == log.read_bytes()


def test_weights_classes_and_every_policy() -> None:
    result = call(
        "run", "--load", "overload", "--duration", "60", "--weight", "c1=2.5", "--batch", "c2", "--json",
        "--policy", "priority", "--policy", "shortest-remaining", "--reserve", "2", "--speed", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    runs = json.loads(result.output)["runs"]
    assert [run["name"] for run in runs] == ["priority", "shortest-remaining"]
    assert runs[0]["tenants"][0]["weight"] == 2.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "one of --trace FILE, --load NAME and --from-ledger"),
        (
            ["run", "--load", "overload", "--trace", __file__],
            "one of --trace FILE, --load NAME and --from-ledger",
        ),
        (["run", "--load", "nothing"], "overload"),
        (["run", "--trace", "/nowhere.csv"], "does not exist"),
        (["run", "--trace", __file__], "line 1 is of no known trace"),
        (["run", "--load", "overload", "--weight", "c1"], "TENANT=WEIGHT"),
        (["run", "--load", "overload", "--tenant", "c1"], "--tenant goes with --from-ledger"),
        (["run", "--load", "overload", "--policy", "best"], "'best' is no policy; allowed are fifo"),
        (["run", "--load", "overload", "--policy", "fair,reserve"], "OPTION=VALUE"),
        (["run", "--load", "overload", "--policy", "fair,reserve=x"], "reserve: 'x' is not a valid integer"),
        (["run", "--load", "overload", "--policy", "fair,seed=1"], "allowed are prediction, workers"),
        (["run", "--load", "overload", "--policy", "fair,weight.c1=0"], "above 0"),
        (["run", "--load", "overload", "--policy", "fair,weight.c9=1"], "no requests of tenant c9"),
        (["run", "--load", "overload", "--weight", "c1=0"], "above 0"),
        (["run", "--load", "overload", "--weight", "c9=2"], "no requests of tenant c9"),
        (["tables", "--trace", __file__], "line 1 is of no known trace"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_policy_may_have_options_of_its_own() -> None:
    result = call(
        "run", "--load", "flood-and-visitors", "--duration", "60", "--slots", "4", "--policy", "fair", "--policy",
        "fair,preemption=on", "--policy", "fair,workers=3,weight.flood=2.5,reserve=1", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    plain, preempting, larger = found["runs"]
    assert (plain["preemptions"], larger["preemptions"]) == (0, 0)
    assert preempting["preemptions"] > 0
    assert [one["tenants"][0]["weight"] for one in found["runs"]] == [1.0, 1.0, 2.5]
    assert larger["end_s"] < plain["end_s"] / 2
    comparison = found["comparison"]
    assert comparison["base"] == "fair"
    everybody, *tenants = comparison["tenants"]
    assert everybody["tenant"] is None
    assert {row["tenant"] for row in tenants} == {one["tenant"] for one in plain["tenants"]}
    for row in comparison["tenants"]:
        base, *others = row["runs"]
        for one, change in zip(others, row["changes"], strict=True):
            for field in ("wait_s_p50", "wait_s_p95", "ttft_s_p50", "ttft_s_p95", "service_per_s"):
                assert change[field] == pytest.approx(one[field] - base[field])
    assert everybody["changes"][0]["jain"] == pytest.approx(preempting["jain"] - plain["jain"])
    visitor = next(row for row in tenants if row["tenant"] == "visitor3")
    assert visitor["changes"][0]["ttft_s_p95"] < -1


def test_tables_and_claims_exit_with_1_if_a_bound_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = msgspec.structs.replace(
        OVERLOAD,
        runs=[
            msgspec.structs.replace(OVERLOAD.runs[1], rows=[row])
            for row in OVERLOAD.runs[1].rows
            if row.figure == "accumulated difference"
        ],
    )
    row = table.runs[0].rows[0]
    missed = msgspec.structs.replace(row, bound=("<=", 0.001))
    for rows, status, word in (([row], 0, "met"), ([row, missed], 1, "NOT MET")):
        runs = [msgspec.structs.replace(table.runs[0], rows=rows)]
        monkeypatch.setattr(command, "TABLES", [msgspec.structs.replace(table, runs=runs)])
        result = call("tables")
        assert (result.exit_code, word in result.output) == (status, True), result.output
        assert "9,050" in result.output
    for limit, status in ((9.0, 0), (1.0, 1)):
        line = line_of("claim", "run", "figure", 5.0, bound=("<=", limit))
        monkeypatch.setattr(command, "check", lambda line=line: [line])
        result = call("claims", "--json")
        assert result.exit_code == status
        assert json.loads(result.output)["lines"][0]["is_met"] is (status == 0)
    assert "published" not in call("claims").output
