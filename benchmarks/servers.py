"""Starts what is measured: headrace itself, and llama.cpp's own server from the same library."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass
class Running:
    """A server that answers chats at `base_url`."""

    name: str
    base_url: str
    key: str
    model: str
    pid: int
    ready_s: float
    details: dict[str, Any]


@contextlib.contextmanager
def headrace(
    data: Path, *, config: dict[str, Any] | None = None, log_level: str = "warning", core: int | None = None
) -> Iterator[Running]:
    """The real thing: `headrace serve`, on free ports, all of it on one core if one is given."""
    path = data / "bench.json"
    data.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config or {}))  # JSON is YAML
    began = time.perf_counter()
    command = [sys.executable, "-m", "headrace.cli", "serve", "--json", "--port", "0", "--admin-port", "0"]
    process = subprocess.Popen(
        [*command, "--data", str(data), "--config", str(path), "--log-level", log_level],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if log_level == "info" else None,
        text=True,
    )
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready_s = time.perf_counter() - began
        if not line:
            raise RuntimeError(f"headrace did not start: status {process.wait()}")
        said = json.loads(line)
        yield Running("headrace", said["url"] + "/v1", said["key"], said["model"], process.pid, ready_s, said)
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def llama_server(
    model: Path, *, threads: int, sequences: int, context: int, batch: int, is_cached: bool
) -> Iterator[Running]:
    """llama.cpp's own HTTP server, with the same weights, threads, slots and KV layout."""
    began = time.perf_counter()
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        process = subprocess.Popen(
            [
                sys.executable, str(Path(__file__).with_name("llama_server.py")), str(model), str(threads),
                str(sequences), str(context), str(batch), str(int(is_cached)),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("LISTENING "):
                    break
            else:
                raise RuntimeError(Path(log.name).read_text()[-2000:])
            url = line.split()[1]
            _wait_until_healthy(url)
            yield Running(
                "llama.cpp server",
                url + "/v1",
                "none",
                "default",
                process.pid,
                time.perf_counter() - began,
                {},
            )
        finally:
            process.kill()
            process.wait()


def _wait_until_healthy(url: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url + "/health", timeout=2):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"{url} does not become healthy")


def admin(running: Running, method: str, path: str, body: dict[str, Any]) -> Any:
    """A call of the admin API of a running headrace."""
    request = urllib.request.Request(
        f"{running.details['admin_url']}/admin/v1/{path}",
        data=json.dumps(body).encode(),
        method=method,
        headers={
            "authorization": f"Bearer {running.details['admin_key']}",
            "content-type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as reply:
        return json.loads(reply.read())


def resident_mb(pid: int) -> float:
    """Resident memory of one process, MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def children(pid: int) -> dict[str, int]:
    """Role and pid of a headrace server's child processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[1]) == pid:
                found[(entry / "cmdline").read_text().split("\0")[-2]] = int(entry.name)
    return found
