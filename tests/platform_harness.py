"""Starts the real platform for tests: `headrace serve` as a process, with the stub engine or a model."""

import contextlib
import http.client
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

STUB: dict[str, Any] = {"id": "stub", "engine": {"max_batch_size": 8, "stub": {}}}
START_SECONDS_MAX = 60


def until(condition: Callable[[], Any], *, seconds: float = 20.0, what: str = "") -> Any:
    """Poll until the condition is true; its value. Fails the test when it never becomes so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"never happened: {what or condition}")


class Reply:
    """An HTTP reply, read to its end."""

    def __init__(self, response: http.client.HTTPResponse, body: bytes) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data events of a stream; `[DONE]` as a string."""
        found = []
        for event in self.body.decode().split("\n\n"):
            if event.startswith("data: "):
                data = event.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found

    @property
    def text(self) -> str:
        """The text of a stream."""
        return "".join(
            choice["delta"].get("content") or ""
            for event in self.events
            if isinstance(event, dict)
            for choice in event.get("choices", ())
        )


class OpenChat:
    """A chat that has been sent. The connection is closed with the object."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """Waits for the head of the reply."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def reply(self) -> Reply:
        """The whole reply; closes."""
        reply = Reply(self.response, self.response.read())
        self.close()
        return reply

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()


class Platform:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[str]", said: dict[str, Any], data: Path, log: Path) -> None:
        self.process = process
        self.said = said
        self.data = data
        self.log = log
        self.url: str = said["url"]
        self.key: str = said["key"]
        self.admin_key: str = said["admin_key"]
        self.admin_url: str = said["admin_url"]
        self.model: str = said["model"]

    def connect(self, *, timeout: float = 30.0) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        return http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = "",
        headers: dict[str, str] | None = None,
        url: str | None = None,
    ) -> Reply:
        """One request. `key` empty: the one printed at the start; None: none at all."""
        address = urlsplit(url or self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        sent = dict(headers or {})
        if key is not None:
            sent.setdefault("Authorization", f"Bearer {key or self.key}")
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        with contextlib.closing(connection):
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Reply(response, response.read())

    def chat(self, content: str = "Hello", **fields: Any) -> Reply:
        key = fields.pop("key", "")
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **fields}
        return self.request("POST", "/v1/chat/completions", body, key=key)

    def open_chat(self, content: str = "Hello", *, key: str | None = None, **fields: Any) -> "OpenChat":
        """Send a chat and do not wait for the reply. Close it to go away."""
        connection = self.connect()
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **fields}
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"},
        )
        return OpenChat(connection)

    def admin(self, method: str, path: str, body: Any = None) -> Reply:
        return self.request(method, path, body, key=self.admin_key, url=self.admin_url)

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.admin("GET", "/admin/v1/workers").json["data"]
        return workers

    def rows(self) -> list[dict[str, Any]]:
        """All final records, straight from the ledger's file."""
        with contextlib.closing(sqlite3.connect(f"file:{self.data}/ledger.db?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute("SELECT * FROM operations ORDER BY end_ts")]

    def num_open(self) -> int:
        with contextlib.closing(sqlite3.connect(f"file:{self.data}/ledger.db?mode=ro", uri=True)) as database:
            number: int = database.execute("SELECT count(*) FROM held").fetchone()[0]
            return number

    def metric(self, name: str, *, url: str | None = None, **labels: str) -> float:
        """The sum of a metric over those of its labels that are not given."""
        import urllib.request

        with urllib.request.urlopen(url or self.said["metrics_url"], timeout=5) as response:
            lines = response.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((name + " ", name + "{"))
            and all(f'{label}="{value}"' in line for label, value in labels.items())
        )

    def children(self) -> list[int]:
        """Process ids of all descendants."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == self.process.pid:
                        found.append(int(entry.name))
        return found

    def stop(self, number: signal.Signals = signal.SIGINT, *, seconds: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextlib.contextmanager
def platform(
    data: Path, *, models: list[dict[str, Any]] | None = None, **settings: Any
) -> Iterator[Platform]:
    """Run a server on `data` for the length of the block."""
    with start(data, models=models, **settings) as (process, line, log):
        if not line:
            raise AssertionError(f"the server did not start: {log.read_text()[-3000:]}")
        yield Platform(process, json.loads(line), data, log)


@contextlib.contextmanager
def start(
    data: Path, *, models: list[dict[str, Any]] | None = None, **settings: Any
) -> Iterator[tuple["subprocess.Popen[str]", str, Path]]:
    """Start a server and wait for its first line, which is empty if it could not start."""
    data.mkdir(parents=True, exist_ok=True)
    config = {"models": models if models is not None else [STUB], **settings}
    log = data / f"log-{len(list(data.glob('log-*')))}"
    config = {"port": 0, "admin_port": 0, **config}
    (data / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "headrace.cli", "serve", "--json"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--config", str(data / "config.yaml"), "--data", str(data)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline(), log
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
