"""What `benchmarks.kills` does from outside: starts and kills a server, and chats with it on threads."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.servers import children

STOP_SECONDS_MAX = 60.0
CLIENT_SECONDS_MAX = 60.0


@dataclass
class Chat:
    """One operation as its client saw it. Written by the client's thread only."""

    content: str
    max_tokens: int
    is_stream: bool
    is_usage_wanted: bool
    status: int = 0
    request_id: str | None = None
    chunks: int = 0
    """Content chunks that arrived."""
    is_answered: bool = False
    """`[DONE]` came, or a whole body with status 200."""
    error_code: str | None = None
    usage: tuple[int, int] | None = None
    """(prompt tokens, completion tokens) as the client was told."""
    is_over: bool = False
    on_event: Callable[["Chat"], None] | None = None
    """Called on the client's thread after each event of its stream."""

    def take_head(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.request_id = response.getheader("x-request-id")

    def take_event(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line.startswith(b"data: [DONE]"):
            self.is_answered = True
            return
        event = json.loads(line[6:])
        if event.get("error"):
            self.error_code = event["error"]["code"]
            return
        if event.get("usage"):
            self._take_usage(event["usage"])
        if event["choices"] and event["choices"][0]["delta"].get("content"):
            self.chunks += 1

    def take_body(self, body: dict[str, Any]) -> None:
        if body.get("error"):
            self.error_code = body["error"]["code"]
            return
        self._take_usage(body["usage"])
        self.is_answered = True

    def _take_usage(self, usage: dict[str, int]) -> None:
        self.usage = (usage["prompt_tokens"], usage["completion_tokens"])


class Server:
    """`headrace serve` on one data directory: one process after the other."""

    def __init__(self, data: Path, config: dict[str, Any], log: Path) -> None:
        self.data = data
        self.log = log
        self._config = data.parent / "config.json"
        self._config.write_text(json.dumps(config))  # JSON is YAML
        self._process: subprocess.Popen[str] | None = None
        self._children: dict[str, int] = {}
        self.said: dict[str, Any] = {}
        self.key = ""
        """Of the first start: it has to outlive every restart."""

    def start(self) -> float:
        """Start and wait until it is ready; seconds that took."""
        began = time.monotonic()
        process = self._launch()
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start, see {self.log}")
        self.said = json.loads(line)
        self.key = self.key or self.said["key"]
        return time.monotonic() - began

    def start_and_kill(self, after_s: float) -> None:
        """Start, and kill it while it recovers and loads."""
        self._launch()
        time.sleep(after_s)
        self.look_up_processes()
        self.strike("server")
        self.wait_until_dead("server")

    def _launch(self) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "headrace.cli",
            "serve",
            "--json",
            "--port",
            "0",
            "--admin-port",
            "0",
        ]
        command += ["--data", str(self.data), "--config", str(self._config)]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            )
        return self._process

    def look_up_processes(self) -> None:
        """Find the processes to kill beforehand: looking takes longer than some phases last."""
        assert self._process is not None
        self._children = children(self._process.pid)

    def strike(self, victim: str) -> int:
        """`kill -9` of `server` (that process alone) or `worker`, from any thread. Wall time, µs."""
        assert self._process is not None
        pid = self._process.pid if victim == "server" else self._children["worker"]
        at_us = time.time_ns() // 1000
        os.kill(pid, signal.SIGKILL)
        return at_us

    def wait_until_dead(self, victim: str) -> None:
        """Until the victim is gone; of the server, until its orphans are gone too."""
        if victim == "worker":
            _wait_until_gone([self._children["worker"]])
            return
        assert self._process is not None and self._process.stdout is not None
        self._process.wait()
        self._process.stdout.close()
        _wait_until_gone(list(self._children.values()))

    def stop(self) -> int:
        """Ask it to stop, as Ctrl-C does; its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def progress_files(self) -> list[Path]:
        return sorted((self.data / "progress").glob("*.progress"))

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.said["metrics_url"], timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{"))
        )

    def limits(self) -> list[dict[str, Any]]:
        """What `GET /v1/limits` says of tenant and key."""
        request = urllib.request.Request(
            self.said["url"] + "/v1/limits", headers={"Authorization": f"Bearer {self.key}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]
            return found

    def begin(self, chat: Chat) -> threading.Thread:
        """Let a client of its own send this chat and read the reply."""
        thread = threading.Thread(target=self._converse, args=(chat, self.said["url"]), daemon=True)
        thread.start()
        return thread

    def _converse(self, chat: Chat, url: str) -> None:
        address = urlsplit(url)
        connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=CLIENT_SECONDS_MAX
        )
        body: dict[str, Any] = {
            "model": self.said["model"],
            "messages": [{"role": "user", "content": chat.content}],
            "max_tokens": chat.max_tokens,
            "temperature": 0,
            "stream": chat.is_stream,
        }
        if chat.is_stream and chat.is_usage_wanted:
            body["stream_options"] = {"include_usage": True}
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        # A server that dies cuts the connection, in whatever way; what came before that counts.
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            chat.take_head(response)
            if chat.is_stream and chat.status == 200:
                while line := response.readline():
                    chat.take_event(line)
                    if chat.on_event is not None:
                        chat.on_event(chat)
            else:
                chat.take_body(json.loads(response.read()))
        connection.close()
        chat.is_over = True


def _wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + STOP_SECONDS_MAX
    while any(_is_alive(pid) for pid in pids):
        if time.monotonic() > end:
            raise RuntimeError(f"processes outlived their server: {pids}")
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
