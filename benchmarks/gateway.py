"""What the gateway path costs: python -m benchmarks.gateway [--seconds 4] [--rounds 3]. Prints one JSON object.

A foreign upstream that answers at once, 32 connections of 1 KB chats in a closed loop, and 64 streams of
64 chunks. Between them: nothing (`direct`), a bare relay made of headrace.http alone (`relay`), and the
whole of headrace (`headrace`: key, queue, reservation and final record in the ledger, metrics, log). The
load and the upstream are Python too and share one core, so requests per second say how fast the slowest of
the three is; what a gateway costs is its processor time per request. Gateway on core 0, the rest on core 1.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.servers import headrace
from headrace.http import HttpClient, HttpRequest, HttpServer, Responder

CONNECTIONS = 32
STREAMS = 64
CHUNKS = 64
CONTENT = "x" * 900
ANSWER = json.dumps(
    {
        "id": "u",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201},
    }
).encode()
CHUNK = b'data: {"id":"u","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
USAGE = b'data: {"id":"u","choices":[],"usage":{"prompt_tokens":200,"completion_tokens":64}}\n\n'
JSON = b"content-type: application/json\r\n"

Handler = Callable[[HttpRequest, Responder], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    upstream_port = _start(upstream, core=1)
    samples: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(arguments.rounds):
        for name, (url, key, model, pid) in _targets(upstream_port):
            for load in ("chat", "stream"):
                figures = _measure(load, url, key, model, pid, arguments.seconds)
                samples.setdefault(load, {}).setdefault(name, []).append(figures)
    medians = {
        load: {
            name: {field: median(one[field] for one in runs) for field in runs[0]}
            for name, runs in by.items()
        }
        for load, by in samples.items()
    }
    print(json.dumps({"benchmark": "gateway", "rounds": arguments.rounds, "medians": medians}, indent=1))


def _targets(upstream_port: int) -> Any:
    """(name, (url, key, model, pid)) of each, running while it is used."""
    url = f"http://127.0.0.1:{upstream_port}/v1"
    yield "direct", (url, "none", "m", 0)
    relay_port = _start(relay, url, core=0)
    yield "relay", (f"http://127.0.0.1:{relay_port}/v1", "none", "m", _processes[-1].pid)
    _processes.pop().kill()
    with tempfile.TemporaryDirectory() as data:
        config = {"models": [{"id": "m", "upstream": url}]}
        with headrace(Path(data), config=config, log_level="info", core=0) as running:
            yield "headrace", (running.base_url, running.key, "m", running.pid)


def _measure(load: str, url: str, key: str, model: str, pid: int, seconds: float) -> dict[str, float]:
    os.sched_setaffinity(0, {1})
    before = _cpu_seconds(pid)
    count, elapsed = uvloop.run(_load(load, url, key, model, seconds))
    spent = _cpu_seconds(pid) - before
    unit = "chunk" if load == "stream" else "request"
    return {
        f"{unit}s_per_s": round(count / elapsed, 1),
        f"gateway_us_per_{unit}": round(spent / count * 1e6, 2),
    }


async def _load(load: str, url: str, key: str, model: str, seconds: float) -> tuple[int, float]:
    """Closed loop for so long; requests or chunks done, and the time it took."""
    is_stream = load == "stream"
    connections = STREAMS if is_stream else CONNECTIONS
    client = HttpClient(url, connections_max=connections)
    headers = JSON + b"authorization: Bearer " + key.encode() + b"\r\n"
    message = {"role": "user", "content": CONTENT}
    body = json.dumps({"model": model, "messages": [message], "stream": is_stream}).encode()
    end = time.perf_counter() + seconds
    count = 0

    async def one_after_another() -> None:
        nonlocal count
        while time.perf_counter() < end:
            with await client.request("POST", "/chat/completions", headers, body) as response:
                data = await response.read()
            assert response.status == 200, data
            count += CHUNKS if is_stream else 1

    began = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(connections)))
    client.close()
    return count, time.perf_counter() - began


# --- child processes ------------------------------------------------------------------------------------

_processes: list[Any] = []


def _start(role: Callable[..., Handler], *arguments: str, core: int) -> int:
    """Start a server process; its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(role, arguments, core, theirs), daemon=True)
    process.start()
    _processes.append(process)
    port: int = ours.recv()
    return port


def _serve(role: Callable[..., Handler], arguments: tuple[str, ...], core: int, pipe: Any) -> None:
    os.sched_setaffinity(0, {core})

    async def run() -> None:
        server = HttpServer(role(*arguments), render_refusal=lambda *_: (b"", b""), on_error=lambda *_: None)
        await server.start("127.0.0.1", 0)
        pipe.send(server.port)
        await asyncio.Event().wait()

    uvloop.run(run())


def upstream() -> Handler:
    """Answers at once; streams its chunks a millisecond apart."""

    async def answer(request: HttpRequest, responder: Responder) -> None:
        if b'"stream": true' not in request.body:
            responder.send(200, JSON, ANSWER)
            return
        responder.start(200, b"content-type: text/event-stream\r\n")
        for _ in range(CHUNKS):
            responder.write(CHUNK)
            await asyncio.sleep(0.001)
        responder.write(USAGE + b"data: [DONE]\n\n")
        responder.end()

    return answer


def relay(url: str) -> Handler:
    """The least a gateway can do."""
    client = HttpClient(url)

    async def answer(request: HttpRequest, responder: Responder) -> None:
        with await client.request("POST", "/chat/completions", JSON, request.body) as response:
            if b"content-length" in response.headers:
                responder.send(response.status, JSON, await response.read())
                return
            responder.start(200, b"content-type: text/event-stream\r\n")
            await response.pump(responder.write, responder.drain)
            responder.end()

    return answer


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process; 0 for none."""
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
