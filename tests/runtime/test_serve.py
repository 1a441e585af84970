"""`headrace serve` from start to stop: announcement, drain, second start, and what keeps it from starting."""

import json
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.platform_harness import STUB, Platform, platform, start, until

SLOW = {"decode_us_per_step": 20_000, "output_tokens": 400}


def refused(tmp_path: Path, **settings: Any) -> str:
    """Start a server that must not start; what it says."""
    with start(tmp_path / "data", **settings) as (process, line, log):
        assert not line
        assert process.wait(60) == 2
        text = log.read_text()
    assert "Traceback" not in text
    return text


def test_the_announcement_holds_what_a_script_needs(tmp_path: Path) -> None:
    with platform(tmp_path / "data") as served:
        said = served.said
        assert set(said) >= {"url", "admin_url", "key", "admin_key", "tenant", "model", "pid"}
        assert (said["tenant"], said["model"], said["pid"]) == ("default", "stub", served.process.pid)
        run = served.data / "run"
        assert json.loads((run / "server.json").read_text())["url"] == said["url"]
        assert stat.S_IMODE((run / "admin.key").stat().st_mode) == 0o600
        assert stat.S_IMODE(served.data.stat().st_mode) == 0o700
        worker = served.workers()[0]
        assert (worker["status"], worker["slots"], worker["kind"]) == ("ready", 8, "embedded")


def test_ctrl_c_lets_running_requests_finish_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = {"id": "slow", "engine": {"max_batch_size": 4, "stub": SLOW}}
    with platform(tmp_path / "data", models=[model]) as served:
        running = served.open_chat(max_tokens=60, stream=True)
        assert running.response.status == 200
        idle = served.connect()
        children = served.children()
        assert len(children) == 2
        served.process.send_signal(signal.SIGINT)
        until(lambda: not accepts(served.url), what="no new connections")
        reply = running.reply()
        assert reply.events[-1] == "[DONE]"
        assert served.process.wait(20) == 0
        idle.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
        assert not (served.data / "run" / "server.json").exists()
        assert not list((served.data / "progress").iterdir())
        (row,) = served.rows()
        assert (row["outcome"], row["completion_tokens"]) == ("completed", 60)


def accepts(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False


def test_after_the_drain_time_requests_are_cut_and_recorded(tmp_path: Path) -> None:
    model = {"id": "slow", "engine": {"max_batch_size": 4, "stub": SLOW}}
    with platform(tmp_path / "data", models=[model], drain_s=0.3) as served:
        running = served.open_chat(max_tokens=390, stream=True)
        assert running.response.readline()
        assert served.stop(signal.SIGTERM, seconds=20) == 0
        running.close()
        (row,) = served.rows()
        assert (row["status"], row["outcome"], row["count_source"]) == (503, "shutdown", "engine")
        assert 0 < row["completion_tokens"] < 390
        assert served.num_open() == 0


def test_the_admin_process_may_die_and_comes_back_on_its_port(tmp_path: Path) -> None:
    with platform(tmp_path / "data") as served:
        admin = next(
            pid
            for pid in served.children()
            if "admin" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        )
        os.kill(admin, signal.SIGKILL)
        assert served.chat(max_tokens=1).status == 200, "traffic does not notice"
        until(lambda: admin_answers(served), what="the admin API is back on its port")
        assert admin not in served.children()


def admin_answers(served: Platform) -> bool:
    try:
        return served.admin("GET", "/admin/v1/tenants").status == 200
    except OSError:
        return False


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for setting in ("port", "admin_port", "metrics_port"):
            text = refused(tmp_path / setting, **{setting: port})
            assert str(port) in text
            assert "in use" in text


def test_one_server_for_a_data_directory(tmp_path: Path) -> None:
    with platform(tmp_path / "data"):
        text = refused(tmp_path)
        assert "another headrace server is running" in text


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ([{"id": "gone", "path": "/nowhere/model.gguf"}], "/nowhere/model.gguf"),
        ([{"id": "dir", "path": "/"}], "/"),
        ([{"id": "text", "path": __file__}], "GGUF"),
        ([{"id": "x"}], "exactly one of path, upstream, engine.stub"),
        ([STUB, STUB], "another model with this id"),
        ([{"id": "x", "colour": 1, "path": "y"}], "colour"),
        ([{"id": "x", "path": "builtin", "engine": {"max_batch_size": 0}}], "max_batch_size"),
        ([{"id": "x", "path": "builtin", "engine": {"max_context_tokens": 500_000}}], "context"),
        ([{"id": "x", "path": "builtin", "engine": {"max_batch_size": 256, "max_context_tokens": 8192}}], "MiB are available"),
        ([{"id": "x", "path": "builtin", "engine": {"chat_template": "/nowhere"}}], "/nowhere"),
        ([{"id": "x", "upstream": "http://127.0.0.1:1/v1", "upstream_key_env": "NOT_SET_HERE"}], "NOT_SET_HERE"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, models: list[dict[str, Any]], says: str
) -> None:
    text = refused(tmp_path, models=models)
    assert text.rstrip().splitlines()[-1].startswith("headrace: ")
    assert says in text
