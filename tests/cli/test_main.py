"""UX-2: the command group is quick to load, complete and documented."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from headrace.cli.main import COMMANDS, main

HEAVY = ("fastapi", "uvicorn", "httpx", "sqlite3", "cryptography", "msgspec", "asyncio", "numpy")


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from headrace.cli.main import main;"
        "print(CliRunner().invoke(main, ['--help']).output);"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, (_, text) in COMMANDS.items():
        assert name in output
        assert text.split()[0] in output
    assert output.rstrip().endswith("heavy: []")


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("headrace, version ")


def test_unknown_commands() -> None:
    result = CliRunner().invoke(main, ["fly"])
    assert result.exit_code == 2
    assert "No such command" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there(name: str) -> None:
    module = COMMANDS[name][0].partition(":")[0]
    if find_spec(module) is None:
        assert name in ("serve", "worker"), "these are added with the process roles"
        return
    with click.Context(main) as context:
        command = main.get_command(context, name)
    assert isinstance(command, click.Command)
    assert command.help
    subcommands = command.commands.values() if isinstance(command, click.Group) else ()
    assert all(subcommand.help for subcommand in subcommands)


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete "), ("zsh", "compdef"), ("fish", "--command")]
)
def test_completion_scripts(shell: str, word: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert word in result.output
    assert "_HEADRACE_COMPLETE" in result.output


def test_completion_completes() -> None:
    result = CliRunner().invoke(
        main,
        [],
        env={"_HEADRACE_COMPLETE": "bash_complete", "COMP_WORDS": "headrace tenants cr", "COMP_CWORD": "2"},
        prog_name="headrace",
    )
    assert result.output.split() == ["plain,create"]


def test_engine_show_says_of_each_library_whether_it_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.llama.builds.native_directory", lambda: tmp_path)
    done = CliRunner().invoke(main, ["engine", "show", "--json"])
    assert done.exit_code == 0
    wheel, native = json.loads(done.output)["libraries"]
    assert wheel["library"] == "wheel"
    assert wheel["usable"]
    assert wheel["kernels"] == []
    assert not native["usable"]
    assert "headrace engine build" in native["reason"]


def test_engine_build_says_what_is_wrong_with_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.llama.builds.native_directory", lambda: tmp_path)
    done = CliRunner().invoke(main, ["engine", "build", "--source", __file__])
    assert done.exit_code == 1
    assert "is not the source package" in done.output
    assert "Traceback" not in done.output
