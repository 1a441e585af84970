"""Starts what is measured: headrace itself, llama.cpp's own server from the same library, and vLLM's."""

import contextlib
import json
import os
import signal
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
            url = _announced(process, Path(log.name))
            _wait_until_healthy(url, process, Path(log.name), seconds=60)
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


@contextlib.contextmanager
def vllm_server(
    python: Path,
    weights_folder: Path,
    scratch: Path,
    *,
    threads: int,
    sequences: int,
    context: int,
    batch: int,
    is_cached: bool,
    dtype: str,
) -> Iterator[Running]:
    """vLLM's own HTTP server, run by a Python that has its CPU build, on weights from `weights.for_vllm`.

    It computes in `dtype`, holds the KV of as many tokens as the others' slots, and compiles the model at its first
    start: what was compiled stays in `scratch`, and later starts there are faster.
    """
    began = time.perf_counter()
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        process = subprocess.Popen(
            [
                str(python), str(Path(__file__).with_name("vllm_server.py")), str(weights_folder), str(threads),
                str(sequences), str(context), str(batch), str(int(is_cached)), dtype, str(scratch),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # its engine and worker are processes of their own
        )  # fmt: skip
        try:
            url = _announced(process, Path(log.name))
            _wait_until_healthy(url, process, Path(log.name), seconds=600)
            yield Running(
                "vLLM",
                url + "/v1",
                "none",
                "default",
                process.pid,
                time.perf_counter() - began,
                {"dtype": dtype},
            )
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End a server and every process of its group; none is left to disturb the next server's turn."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()  # reaps it: as long as it is not, the group exists
            time.sleep(0.1)


def _announced(process: subprocess.Popen[str], log: Path) -> str:
    """The address that a server says it listens at."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("LISTENING "):
            return line.split()[1]
    raise RuntimeError(log.read_text()[-2000:])


def _wait_until_healthy(url: str, process: subprocess.Popen[str], log: Path, *, seconds: int) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(log.read_text()[-2000:])
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
