"""The promises of the first page on the real engine: python -m benchmarks.acceptance (a minute).

Thirty-two chats in one batch; clients that vanish in the queue, in prefill, after some tokens and while a
whole reply is made; `kill -9` of the worker under load. Prints what was seen, one JSON object a line.
"""

import contextlib
import http.client
import json
import os
import signal
import sqlite3
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.servers import Running, headrace


class Client:
    """Asks a running server, and looks into its ledger."""

    def __init__(self, running: Running, data: Path) -> None:
        self.running = running
        self.data = data
        self.said = running.details

    def open(self, content: str, **fields: Any) -> http.client.HTTPConnection:
        address = urlsplit(self.running.base_url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        messages = [{"role": "user", "content": content}]
        body = {"model": self.running.model, "messages": messages, "temperature": 0, **fields}
        headers = {"Authorization": f"Bearer {self.running.key}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection

    def rows(self) -> list[dict[str, Any]]:
        uri = f"file:{self.data}/ledger.db?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute("SELECT * FROM operations ORDER BY settle_seq")]

    def metric(self, name: str, url: str | None = None) -> float:
        with urllib.request.urlopen(url or self.said["metrics_url"]) as response:
            lines = response.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{"))
        )

    def worker(self) -> dict[str, Any]:
        request = urllib.request.Request(
            self.said["admin_url"] + "/admin/v1/workers",
            headers={"Authorization": f"Bearer {self.said['admin_key']}"},
        )
        with urllib.request.urlopen(request) as response:
            found: dict[str, Any] = json.load(response)["data"][0]
            return found


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        with headrace(data) as running:
            client = Client(running, data)
            _show("together", together(client))
            for phase, seen in vanishing(client):
                _show(f"client gone {phase}", seen)
            _show("worker killed", killed(client))


def together(client: Client) -> dict[str, Any]:
    """Thirty-two chats of different lengths, and one alone."""
    began = time.perf_counter()

    def one(number: int) -> tuple[int, int, float]:
        connection = client.open(f"Tell me a story about the number {number}.", max_tokens=10 + 4 * number)
        response = connection.getresponse()
        tokens = json.loads(response.read())["usage"]["completion_tokens"]
        return response.status, tokens, time.perf_counter() - began

    with ThreadPoolExecutor(32) as pool:
        ends = list(pool.map(one, range(32)))
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    _, alone, _ = one(20)
    return {
        "statuses": sorted({status for status, _, _ in ends}),
        "batch_max": client.metric("headrace_worker_batch_size_max", client.worker()["metrics_url"]),
        "first_end_s": round(min(end for _, _, end in ends), 2),
        "last_end_s": round(seconds, 2),
        "tokens_per_s": round(sum(tokens for _, tokens, _ in ends) / seconds, 1),
        "alone_tokens_per_s": round(alone / (time.perf_counter() - began), 1),
    }


def vanishing(client: Client) -> list[tuple[str, dict[str, Any]]]:
    """A client that goes away, in every phase."""
    long = "Write the numbers from one to five hundred in words."
    seen = [
        ("in prefill", _vanish(client, client.open("word " * 1500, stream=True), lambda _: time.sleep(0.7))),
        (
            "after 11 tokens",
            _vanish(client, client.open(long, stream=True), lambda one: _read_tokens(one, 11)),
        ),
        (
            "while a whole reply is made",
            _vanish(client, client.open(long, temperature=1.3, seed=4), lambda _: time.sleep(0.6)),
        ),
    ]
    busy = [client.open(f"A very long story {number}.", max_tokens=300, stream=True) for number in range(32)]
    while client.metric("headrace_running") < 32:
        time.sleep(0.05)
    waiting = client.open("queued", max_tokens=5)
    seen.append(("in the queue", _vanish(client, waiting, lambda _: time.sleep(0.3))))
    for connection in busy:
        connection.close()
    while client.metric("headrace_running"):
        time.sleep(0.05)
    return seen


def _vanish(
    client: Client,
    connection: http.client.HTTPConnection,
    before: Callable[[http.client.HTTPConnection], None],
) -> dict[str, Any]:
    number = len(client.rows())
    before(connection)
    assert connection.sock is not None
    connection.sock.shutdown(2)
    connection.close()
    began = time.perf_counter()
    while len(client.rows()) == number:
        time.sleep(0.01)
    row = client.rows()[-1]
    fields = ("status", "outcome", "count_source", "prompt_tokens", "completion_tokens")
    return {"row_after_s": round(time.perf_counter() - began, 2), **{name: row[name] for name in fields}}


def _read_tokens(connection: http.client.HTTPConnection, number: int) -> None:
    response = connection.getresponse()
    while number:
        line = response.readline()
        number -= b'"content":"' in line and b'"content":""' not in line


def killed(client: Client) -> dict[str, Any]:
    """`kill -9` of the worker under 32 streams."""
    number = len(client.rows())
    streams = [client.open(f"A very long story {one}.", max_tokens=400, stream=True) for one in range(32)]
    time.sleep(4)
    began = time.perf_counter()
    os.kill(client.worker()["pid"], signal.SIGKILL)
    bodies = [stream.getresponse().read() for stream in streams]
    told_s = time.perf_counter() - began
    with contextlib.closing(client.open("Back?", max_tokens=2)) as again:
        status = again.getresponse().status
    rows = client.rows()[number:]
    lost = [row for row in rows if row["outcome"] == "worker_lost"]
    return {
        "told_after_s": round(told_s, 2),
        "with_error_event": sum(b'"worker_lost"' in body for body in bodies),
        "with_clean_end": sum(b"[DONE]" in body for body in bodies),
        "next_chat": status,
        "serving_again_s": round(time.perf_counter() - began, 2),
        "rows": len(rows),
        "rows_lost_by_source": {source: sum(row["count_source"] == source for row in lost) for source in
                                sorted({row["count_source"] for row in lost})},
    }  # fmt: skip


def _show(what: str, seen: dict[str, Any]) -> None:
    print(json.dumps({"seen": what, **seen}), flush=True)


if __name__ == "__main__":
    main()
