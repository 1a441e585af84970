"""UX-2: commands against a real admin process, as text and as JSON, and without a server."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli.main import main
from tests.admin.admin_world import AdminWorld

Run = Callable[..., Result]


def test_tenants(run: Run) -> None:
    made = run("tenants", "create", "demo", "--name", "Demo", "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["id"] == "demo"
    assert json.loads(run("tenants", "show", "demo", "--json").output) == json.loads(made.output)
    assert json.loads(run("tenants", "disable", "demo", "--json").output)["status"] == "disabled"
    assert json.loads(run("tenants", "enable", "demo", "--json").output)["status"] == "active"
    assert json.loads(run("tenants", "update", "demo", "--name", "New", "--json").output)["name"] == "New"
    assert json.loads(run("tenants", "update", "demo", "--name", "", "--json").output)["name"] is None
    lines = run("tenants", "list").output.splitlines()
    assert lines[0].split() == ["id", "name", "status", "created", "updated", "version"]
    row = next(line for line in lines if line.startswith("demo "))
    assert row.split()[:3] == ["demo", "-", "active"]
    assert "status" in run("tenants", "show", "demo").output


def test_limits_inside_a_tenant(run: Run) -> None:
    made = run(
        "tenants", "create", "inside", "--limit", "tpm=900", "--department", "law", "--department-limit",
        "sales:tpm=100", "--department-limit", "sales:rps=2.5", "--user-limit", "rps=1", "--user-limit-of",
        "a=b:c:tpm=50", "--model-limit", "org/smol:q4:concurrency=3", "--json",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert (
        json.loads(made.output).items()
        >= {
            "limits": {"tpm": 900},
            "departments": {"law": {}, "sales": {"rps": 2.5, "tpm": 100}},
            "user_limits": {"rps": 1.0},
            "users": {"a=b:c": {"tpm": 50}},
            "model_limits": {"org/smol:q4": {"concurrency": 3}},
        }.items()
    )
    lines = [line.split(maxsplit=1) for line in run("tenants", "show", "inside").output.splitlines()]
    assert ["limits", "tpm=900"] in lines
    position = lines.index(["departments", "law: -"])
    assert " ".join(lines[position + 1]) == "sales: rps=2.5 tpm=100"
    assert ["user_limits", "rps=1.0"] in lines
    assert ["users", "a=b:c: tpm=50"] in lines
    assert ["model_limits", "org/smol:q4: concurrency=3"] in lines
    changed = run(
        "tenants", "update", "inside", "--remove-department", "law", "--department-limit", "sales:tpm=none",
        "--user-limit-of", "a=b:c:tpm=none", "--user-limit", "rps=none", "--json",
    )  # fmt: skip
    assert (
        json.loads(changed.output).items()
        >= {
            "limits": {"tpm": 900},
            "departments": {"sales": {"rps": 2.5}},
            "user_limits": {},
            "users": {},
            "model_limits": {"org/smol:q4": {"concurrency": 3}},
        }.items()
    )
    assert ["users", "-"] in [line.split() for line in run("tenants", "show", "inside").output.splitlines()]


def test_what_the_cache_keeps_of_a_tenant(run: Run) -> None:
    made = run(
        "tenants", "create", "kept", "--cache", "prefix_only", "--shared-prefix", "the house", "--json"
    )
    assert made.exit_code == 0, made.output
    assert json.loads(made.output).items() >= {"cache": "prefix_only", "shared_prefix": "the house"}.items()
    lines = [line.split(maxsplit=1) for line in run("tenants", "show", "kept").output.splitlines()]
    assert ["cache", "prefix_only"] in lines
    assert ["shared_prefix", "the house"] in lines
    changed = json.loads(run("tenants", "update", "kept", "--cache", "off", "--json").output)
    assert (changed["cache"], changed["shared_prefix"]) == ("off", "the house")
    changed = json.loads(run("tenants", "update", "kept", "--shared-prefix", "", "--json").output)
    assert (changed["cache"], changed["shared_prefix"], changed["version"]) == ("off", None, 3)
    changed = json.loads(run("tenants", "update", "kept", "--name", "Kept", "--json").output)
    assert (changed["cache"], changed["shared_prefix"]) == ("off", None)
    plain = json.loads(run("tenants", "create", "unkept", "--json").output)
    assert (plain["cache"], plain["shared_prefix"]) == ("full", None)


def test_bad_caches(run: Run) -> None:
    run("tenants", "create", "miskept")
    refused = run("tenants", "update", "miskept", "--cache", "all")
    assert refused.exit_code == 2
    assert all(mode in refused.stderr for mode in ("full", "prefix_only", "off"))
    refused = run("tenants", "update", "miskept", "--shared-prefix", "x" * 65)
    assert refused.exit_code == 1
    assert "[invalid_shared_prefix]" in refused.stderr
    refused = run("tenants", "update", "miskept")
    assert refused.exit_code == 2
    assert "--shared-prefix" in refused.stderr


def test_keys_of_a_department(run: Run) -> None:
    run("tenants", "create", "parted", "--department", "sales")
    made = json.loads(run("keys", "create", "parted", "--department", "sales", "--json").output)
    assert made["department"] == "sales"
    header, row = (line.split() for line in run("keys", "list", "--tenant", "parted").output.splitlines())
    assert row[header.index("department")] == "sales"
    refused = run("keys", "create", "parted", "--department", "law")
    assert refused.exit_code == 1
    assert "[department_not_found]" in refused.stderr
    refused = run("tenants", "update", "parted", "--remove-department", "sales")
    assert refused.exit_code == 1
    assert "'sales' (1)" in refused.stderr


@pytest.mark.parametrize("text", ["", "tpm", "tpm=x", "tpm=", "tpm=inf", "tpm=nan", "tpm=1e999"])
def test_bad_limits(run: Run, text: str) -> None:
    for option, prefix in (("--limit", ""), ("--user-limit-of", "ann:")):
        result = run("tenants", "update", "demo", option, prefix + text)
        assert result.exit_code == 2
        assert "is not like" in result.output


@pytest.mark.parametrize("text", ["tpm=1", ":tpm=1", "ann:=1", "ann:tpm"])
def test_bad_limits_of_something_named(run: Run, text: str) -> None:
    result = run("tenants", "update", "demo", "--model-limit", text)
    assert result.exit_code == 2
    assert "NAME:tpm=1000" in result.output


def test_nothing_to_update_is_wrong_usage(run: Run) -> None:
    assert run("tenants", "update", "demo").exit_code == 2


def test_keys(run: Run, world: AdminWorld) -> None:
    run("tenants", "create", "keyed")
    made = run(
        "keys", "create", "keyed", "--user", "ann", "--scope", "chat:read", "--scope", "usage:read",
        "--expires-in", "2h", "--json",
    )  # fmt: skip
    issued = json.loads(made.output)
    assert issued["key"].startswith("hr_live_")
    assert issued["scopes"] == ["chat:read", "usage:read"]
    assert round((issued["expires_ts"] - issued["created_ts"]) / 1e6) in (7200, 7201)
    listed = run("keys", "list", "--tenant", "keyed")
    assert issued["jti"] in listed.output
    assert issued["key"] not in listed.output
    assert run("keys", "revoke", issued["jti"]).output == f"revoked {issued['jti']}\n"
    assert json.loads(run("keys", "revoke", issued["jti"], "--json").output)["revoked"] is True
    (key,) = json.loads(run("keys", "list", "--tenant", "keyed", "--json").output)
    assert key["revoked_ts"] is not None
    shown = run("keys", "create", "keyed").output
    assert "hr_live_" in shown


@pytest.mark.parametrize("text", ["", "x", "1w", "-5", "1.5h", "9" * 13])
def test_bad_durations(run: Run, text: str) -> None:
    result = run("keys", "create", "demo", "--expires-in", text)
    assert result.exit_code == 2
    assert "not a duration" in result.output


def test_lists_longer_than_a_page(run: Run, world: AdminWorld) -> None:
    async def make() -> None:
        world.directory._store._connection.execute("PRAGMA synchronous=OFF")
        for number in range(1003):
            world.directory.create_tenant(f"many{number:04}", None, actor="test")

    world.on_core(make)
    found = json.loads(run("tenants", "list", "--json").output)
    assert sum(tenant["id"].startswith("many") for tenant in found) == 1003


def test_usage(run: Run, world: AdminWorld) -> None:
    for number in range(3):
        world.record(f"cli_{number}", tenant_id="cli", completion_tokens=number)
    report = json.loads(run("usage", "report", "--tenant", "cli", "--json").output)
    assert report["total"]["operations"] == 3
    lines = run("usage", "report", "--tenant", "cli", "--group-by", "tenant,model").output.splitlines()
    assert lines[0].split()[:4] == ["tenant_id", "model", "operations", "prompt_tokens"]
    assert lines[1].split()[:3] == ["cli", "smol", "3"]
    later = run("usage", "report", "--tenant", "cli", "--from", "2027-01-01", "--group-by", "day", "--json")
    assert json.loads(later.output)["data"] == []
    assert run("usage", "report", "--from", "2027-01-01", "--group-by", "day").exit_code == 0
    record = json.loads(run("usage", "show", "cli_2", "--json").output)
    assert (record["request_id"], record["completion_tokens"]) == ("cli_2", 2)
    assert "2026-09-21" in run("usage", "show", "cli_2").output


def test_a_refund(run: Run, world: AdminWorld) -> None:
    world.record("cli_refund", tenant_id="cli_refund")
    said = run("ledger", "refund", "cli_refund", "--reason", "our fault")
    assert said.exit_code == 0, said.output
    assert said.output == (
        "refunded cli_refund: nothing of its 10 prompt and 5 completion tokens is charged any more\n"
    )
    record = json.loads(run("ledger", "refund", "cli_refund", "--reason", "our fault", "--json").output)
    assert (record["refunded"], record["charged_completion_tokens"]) == (True, 0)
    total = json.loads(run("usage", "report", "--tenant", "cli_refund", "--json").output)["total"]
    assert (total["completion_tokens"], total["charged_completion_tokens"]) == (5, 0)
    unknown = run("ledger", "refund", "none", "--reason", "x")
    assert (unknown.exit_code, unknown.stderr) == (
        1,
        "headrace: there is no operation 'none' [operation_not_found]\n",
    )
    other = run("ledger", "refund", "cli_refund", "--reason", "another")
    assert other.exit_code == 1
    assert "was refunded before" in other.stderr
    world.open("cli_running")
    running = run("ledger", "refund", "cli_running", "--reason", "x")
    assert running.exit_code == 1
    assert "has not ended" in running.stderr
    assert run("ledger", "refund", "cli_refund").exit_code == 2


def test_workers_and_models(run: Run) -> None:
    assert [worker["id"] for worker in json.loads(run("workers", "list", "--json").output)] == ["w0"]
    assert run("workers", "list").output.splitlines()[1].split()[:4] == ["w0", "smol", "embedded", "ready"]
    assert json.loads(run("models", "list", "--json").output) == [{"id": "smol", "workers": 1, "ready": 1}]
    assert "smol" in run("models", "list").output


def test_the_queue(run: Run) -> None:
    shown = run("queue")
    assert shown.exit_code == 0, shown.output
    models, tenants, requests = (part.splitlines() for part in shown.output.strip().split("\n\n"))
    assert dict(zip(models[0].split(), models[1].split(), strict=True))["length"] == "1"
    assert dict(zip(tenants[0].split(), tenants[1].split(), strict=True))["received_60s"] == "70.5"
    row = dict(zip(requests[0].split(), requests[1].split(), strict=True))
    assert (row["position"], row["tenant"], row["reason"]) == ("1", "a", "replicas_full")
    assert (
        json.loads(run("queue", "--model", "smol", "--json").output)[0]["requests"][0]["request_id"]
        == "req_1"
    )
    refused = run("queue", "--model", "nothing")
    assert refused.exit_code == 1
    assert "[model_not_found]" in refused.stderr
    assert run("queue", "--limit", "0").exit_code == 2


def test_refusals_are_said_and_exit_with_1(run: Run) -> None:
    refused = run("tenants", "show", "nobody")
    assert refused.exit_code == 1
    assert refused.stderr == "headrace: there is no tenant 'nobody' [tenant_not_found]\n"
    assert refused.stdout == ""
    as_json = run("tenants", "create", "No", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["code"] == "invalid_tenant_id"
    bad = run("usage", "report", "--group-by", "week")
    assert bad.exit_code == 1
    assert "tenant, key, model, user, department, day, hour, outcome" in bad.stderr


COMMANDS = [
    ("tenants", "list"),
    ("keys", "list"),
    ("usage", "report"),
    ("usage", "show", "x"),
    ("ledger", "refund", "x", "--reason", "y"),
    ("workers", "list"),
    ("models", "list"),
    ("models", "list", "--key", "hr_live_x"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_server_commands_exit_with_3(command: tuple[str, ...], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*command, "--data", str(tmp_path)])
    assert result.exit_code == 3
    assert "no server is running" in result.stderr
    assert "headrace serve" in result.stderr


@pytest.mark.parametrize("content", ["", "[]", "{}", "\xff", '{"url": 1}'])
def test_a_damaged_server_file_is_no_server(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "server.json").write_text(content, encoding="latin-1")
    assert CliRunner().invoke(main, ["tenants", "list", "--data", str(tmp_path)]).exit_code == 3


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    server = {"url": "http://127.0.0.1:9", "admin_url": "http://127.0.0.1:9", "pid": 1, "started_ts": 1}
    (tmp_path / "run" / "server.json").write_text(json.dumps(server))
    result = CliRunner().invoke(main, ["tenants", "list", "--data", str(tmp_path)])
    assert result.exit_code == 3
    assert "admin.key cannot be read" in result.stderr
    (tmp_path / "run" / "admin.key").write_text("hr_admin_x")
    result = CliRunner().invoke(main, ["tenants", "list", "--data", str(tmp_path)])
    assert result.exit_code == 3
    assert "does not answer" in result.stderr


def test_address_and_key_from_options_and_environment(world: AdminWorld, tmp_path: Path) -> None:
    options = ["tenants", "list", "--json", "--data", str(tmp_path)]
    given = CliRunner().invoke(main, [*options, "--admin-url", world.url, "--admin-key", world.key])
    assert given.exit_code == 0
    environment = {"HEADRACE_ADMIN_URL": world.url, "HEADRACE_ADMIN_KEY": world.key}
    assert CliRunner().invoke(main, options, env=environment).output == given.output


def test_the_key_file_is_sent_to_its_own_server_only(run: Run, world: AdminWorld) -> None:
    result = run("tenants", "list", "--admin-url", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "--admin-key" in result.output
    assert run("tenants", "list", "--admin-url", "nonsense", "--admin-key", "x").exit_code == 2


def test_what_a_server_says_cannot_play_with_the_terminal(run: Run, world: AdminWorld) -> None:
    world.record("odd", tenant_id="odd", user_id="a\x1b[31mb\nc")
    output = run("usage", "report", "--tenant", "odd", "--group-by", "user").output
    assert "\x1b" not in output
    assert len(output.splitlines()) == 2


def test_a_model_file_is_described_without_a_server() -> None:
    shown = CliRunner().invoke(
        main, ["models", "inspect", "--batch-size", "4", "--context", "1024", "--context", "999999", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.output)
    assert (report["architecture"], report["layers"], report["kv_bytes_per_token"]) == ("llama", 30, 23040)
    assert [(one["sequences"], one["context_tokens"], one["kv_mib"]) for one in report["fits"]] == [
        (4, 1024, 90)
    ], "a context longer than the model was trained for is left out"
    assert report["fits"][0]["fits"] is True
    text = CliRunner().invoke(main, ["models", "inspect"])
    assert "kv_bytes_per_token" in text.output and "sequences" in text.output


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model")
    refused = CliRunner().invoke(main, ["models", "inspect", str(tmp_path / "x.gguf")])
    assert refused.exit_code == 1
    assert "x.gguf" in refused.output
    assert CliRunner().invoke(main, ["models", "inspect", str(tmp_path / "none")]).exit_code == 1
