"""A running server as `serve` leaves it for the command line, with a real admin process."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli.main import main
from tests.admin.admin_world import AdminWorld

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminWorld]:
    folder: Path = tmp_path_factory.mktemp("world")
    with AdminWorld(folder) as world:
        run = folder / "run"
        run.mkdir(exist_ok=True)
        server = {"url": "http://127.0.0.1:9", "admin_url": world.url, "pid": 1, "started_ts": 1}
        (run / "server.json").write_text(json.dumps(server))
        (run / "admin.key").write_text(world.key + "\n")
        yield world


@pytest.fixture
def run(world: AdminWorld, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against the server."""
    for name in ("URL", "KEY"):
        monkeypatch.delenv(f"HEADRACE_ADMIN_{name}", raising=False)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--data", str(world.folder)])

    return run
