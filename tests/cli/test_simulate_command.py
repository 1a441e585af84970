"""`headrace simulate` as it is called."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from headrace.cli import simulate as command
from headrace.cli import simulation_load
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


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")
    shown = call("run", "--load", "overload").output
    assert f"$ headrace simulate run --load overload\n{shown}```" in page


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
        (["run", "--load", "overload", "--policy", "fair", "--policy", "fair"], "'fair' is there twice"),
        (["run", "--load", "overload", "--policy", "fair,aging=nan"], "aging: 'nan' is not a number"),
        (["run", "--load", "overload", "--duration", "nan"], "'nan' is not a number"),
        (["run", "--load", "overload", "--duration", "-5"], "-5.0 is not in the range"),
        (
            ["run", "--load", "overload", "--duration", "10000000"],
            "are more than 10,000,000: a shorter --duration",
        ),
        (["run", "--load", "overload", "--quantum", "inf"], "inf"),
        (["run", "--load", "overload", "--workers", "-1"], "-1 is not in the range"),
        (["run", "--load", "overload", "--kv-tokens", "-1"], "-1 is not in the range"),
        (["run", "--load", "overload", "--price", "-1"], "-1.0 is not in the range"),
        (["run", "--load", "overload", "--seed", "-1"], "-1 is not in the range"),
        (["run", "--load", "overload", "--weight", "c1=-3"], "above 0"),
        (
            ["run", "--load", "overload", "--decisions", "/nowhere/x"],
            "cannot write /nowhere/x: there is no directory /nowhere",
        ),
        (["run", "--load", "overload", "--decisions", "/"], "is a directory"),
        (["run", "--replay", "/nowhere/x"], "does not exist"),
        (["run", "--replay", __file__], "line 1: Expected `object`"),
        (
            ["run", "--replay", __file__, "--load", "overload", "--workers", "2"],
            "it does not go with --load, --workers",
        ),
        (["tables", "--trace", __file__], "line 1 is of no known trace"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; known are Azure"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
        (b"\x1f\x8bxx", "cannot be read: "),
        (gzip.compress(b"req_time_s,client,prompt_len,output_len\n1,2,3,4\n", mtime=0)[:-9], "cannot be read: "),
        (b'{"timestamp":1,"input_length":5,"output_length":3}\n{bad\n', "line 2: JSON is malformed"),
        (b"req_time_s,client,prompt_len,output_len\ninf,a,1,2\n", "line 2: req_time_s is 'inf'"),
        (b'{"format":"headrace-decisions","version":2,"source":"ledger"}\n', "this headrace reads version 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said_with_its_name(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    result = call("run", "--trace", str(path))
    assert result.exit_code == 2
    assert result.output.startswith(f"headrace: {path}: "), result.output
    assert message in result.output


def test_traces_may_be_packed_and_begin_with_a_mark(tmp_path: Path) -> None:
    text = "\ufeffreq_time_s,client,prompt_len,output_len\r\n1,a,30,4\r\n2,b,3,4\r\n"
    for name, content in (("plain", text.encode()), ("packed", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(content)
        result = call("run", "--trace", str(tmp_path / name), "--json")
        assert result.exit_code == 0, result.output
        assert [one["tenant"] for one in json.loads(result.output)["runs"][0]["tenants"]] == ["a", "b"]


def test_a_file_that_unpacks_to_too_much_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation_load, "TRACE_BYTES_MAX", 2 * 1024 * 1024)
    (tmp_path / "bomb").write_bytes(gzip.compress(b"req_time_s,client\n" + b"0" * 3 * 1024 * 1024, mtime=0))
    result = call("run", "--trace", str(tmp_path / "bomb"))
    assert result.exit_code == 2
    assert result.output == f"headrace: {tmp_path / 'bomb'}: has more than 2 MiB\n"


def test_a_log_is_decided_again_or_what_differs_first_is_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    made = call(
        "run", "--load", "weighted", "--duration", "20", "--policy", "fair,preemption=on,slots=4,weight.w1=3",
        "--decisions", str(log),
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    same = call("run", "--replay", str(log))
    assert (same.exit_code, same.output) == (
        0,
        "fair,preemption=on,slots=4,weight.w1=3: all 160 requests are decided as in the log\n",
    )
    lines = log.read_text().splitlines()
    line = json.loads(lines[100])
    lines[100] = json.dumps({**line, "granted_us": line["granted_us"] + 1})
    log.write_text("\n".join(lines))
    other = call("run", "--replay", str(log))
    assert other.exit_code == 1
    assert "1 of 160 requests are decided differently" in other.output
    assert f"request 100, of tenant {line['tenant']}, which came at 12.000000 s" in other.output
    assert f"granted_us is {line['granted_us'] + 1} in the log and {line['granted_us']} now" in other.output
    found = json.loads(call("run", "--replay", str(log), "--json").output)
    assert (found["differing"], found["first"]["field"]) == (1, "granted_us")
    log.write_text("\n".join(lines[1:]))
    lost = call("run", "--replay", str(log))
    assert (lost.exit_code, "has lost its first line" in lost.output) == (2, True)


def test_a_fleet_has_a_cost_once_there_is_a_price() -> None:
    arguments = (
        "run",
        "--load",
        "overload",
        "--duration",
        "60",
        "--policy",
        "fair",
        "--policy",
        "fair,workers=2",
    )
    one, two = json.loads(call(*arguments, "--price", "3", "--json").output)["runs"]
    for run, workers in ((one, 1), (two, 2)):
        assert run["worker_hours"] == pytest.approx(workers * run["end_s"] / 3600)
        assert run["cost"] == pytest.approx(3 * run["worker_hours"])
        tokens = run["throughput_tokens_per_s"] * run["end_s"]
        assert run["cost_per_million_tokens"] == pytest.approx(1e6 * run["cost"] / tokens)
    assert "cost_per_million_tokens" in call(*arguments, "--price", "3").output
    assert "cost" not in call(*arguments).output.partition("by tenant")[0]


def test_requests_larger_than_a_worker_are_said_to_be() -> None:
    result = call("run", "--load", "overload", "--duration", "5", "--policy", "fair,kv-tokens=100")
    assert result.exit_code == 0
    assert (
        "fair,kv-tokens=100: 23 of 23 requests are larger than a worker's memory (--kv-tokens 100)"
        in result.output
    )


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
