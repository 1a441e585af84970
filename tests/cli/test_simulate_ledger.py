"""SI-3: a server's own traffic, replayed beside the running server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platform_harness import Platform, platform


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headrace.cli", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ, check=False)


def traffic(server: Platform, number: int = 30) -> None:
    """Chats of two tenants, one of them left early."""
    assert server.admin("POST", "/admin/v1/tenants", {"id": "other"}).status == 201
    key = server.admin("POST", "/admin/v1/keys", {"tenant": "other", "user": "mary"}).json["key"]
    for one in range(number):
        reply = server.chat(f"secret words {one}", key=key if one % 3 == 0 else "", max_tokens=8 + one)
        assert reply.status == 200, reply.body
    gone = server.open_chat("and one that leaves", max_tokens=400, stream=True)
    assert gone.response.read(10)
    gone.close()


def test_a_policy_change_is_seen_before_it_is_applied(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with platform(data) as server:
        traffic(server)
        found = run(
            "run", "--from-ledger", str(data), "--policy", "fair", "--policy", "fair,weight.other=3", "--json",
            "--decisions", str(tmp_path / "decided"),
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
        shown = json.loads(found.stdout)
        # The server has not noticed.
        assert server.chat("still there").status == 200
        log = tmp_path / "traffic"
        assert run("log", str(data), "--tenant", "other", "--output", str(log)).returncode == 0
        rows = server.rows()
    assert [one["name"] for one in shown["runs"]] == ["recorded", "fair", "fair,weight.other=3"]
    assert shown["comparison"]["base"] == "fair"
    everybody = shown["comparison"]["tenants"][0]
    assert [row["run"] for row in everybody["runs"]] == ["recorded", "fair", "fair,weight.other=3"]
    assert {row["tenant"] for row in shown["comparison"]["tenants"]} == {None, server.said["tenant"], "other"}
    assert shown["ledger"]["replayed"] == shown["runs"][0]["requests"]
    assert shown["ledger"]["operations"] in (30, 31)  # the one that left may still be on its way
    # The engine of the simulation is as fast as the one that served.
    assert shown["engine"]["prefill_us_per_token"] != 218.0

    header, *lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert header["source"] == "ledger"
    real = [row for row in rows if row["tenant_id"] == "other"]
    assert sorted((line["prompt_tokens"], line["output_tokens"], line.get("cached_tokens", 0)) for line in lines) == sorted(
        (row["prompt_tokens"], row["completion_tokens"], row["prompt_tokens_cached"]) for row in real
    )  # fmt: skip
    for path in (log, tmp_path / "decided"):
        text = path.read_text()
        assert not any(word in text for word in ("secret", "mary", "req_", "key"))
    # And without the server.
    refused = run("run", "--replay", str(log))
    assert (refused.returncode, "came out of a ledger" in refused.stderr) == (2, True)
    assert run("run", "--replay", str(tmp_path / "decided")).returncode == 0
    again = run("run", "--trace", str(log), "--policy", "fair", "--json")
    assert json.loads(again.stdout)["runs"][1]["requests"] == 10
    text = run("run", "--from-ledger", str(data), "--policy", "fair", "--policy", "fifo")
    assert "requests in the ledger are replayed; 1 of these ended early" in text.stderr
    assert "in brackets: compared with fair" in text.stdout
    # The file does as well as its directory.
    same = run("run", "--from-ledger", str(data / "ledger.db"), "--policy", "fair", "--policy", "fifo")
    assert same.stdout == text.stdout
    empty = run("run", "--from-ledger", str(data), "--to", "2020-01-01")
    assert (empty.returncode, "no operations in this period" in empty.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from-ledger", "{}"], "there is no ledger at"),
        (["--from-ledger", "{}/none"], "does not exist"),
        (["--from-ledger", __file__], "cannot read "),
        (["--from-ledger", "{}", "--from", "soon"], "from is a date (2026-10-01)"),
        (["--from-ledger", "{}", "--from", "2026-01-02", "--to", "2026-01-01"], "to must be later than from"),
        (["--from-ledger", "{}", "--load", "overload"], "one of --trace FILE, --load NAME and --from-ledger"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, tmp_path: Path) -> None:
    found = run("run", *(argument.format(tmp_path) for argument in arguments))
    assert found.returncode == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == []
