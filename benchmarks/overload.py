"""Ten times more clients than places: python -m benchmarks.overload [--seconds 30]. Prints one JSON object.

The stub engine with 100 slots stands for a server whose engine is the bottleneck: its most, measured first
with 100 clients in a closed loop, is far below what the gateway can carry. Then 1 024 clients of one tenant
come, each with the next chat as soon as it has its answer. Whoever is refused tries again after a pause of
`--pause-ms` (50 to 100 by default, drawn evenly): impatient on purpose, `Retry-After` asks for more. A second
tenant sends a short chat every quarter of a second all the time, from a process of its own.

What refuses is the length of the queue (`queue.length`, 256 as by default); no tenant has limits. The clients
need processor time too: on a machine of two cores they take one of them from the server.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.load import quantile
from benchmarks.servers import Running, headrace, resident_mb
from headrace.http import HttpClient

SLOTS = 100
CLIENTS = 1024
QUEUE = 256
TOKENS = 25
STEP_US = 20_000
WARM_UP_S = 3.0
"""At the beginning of a load, not counted."""
LAG_EVERY_S = 0.01
QUIET_SHORT_EVERY_S = 0.25
QUIET_TOKENS = 5
GOALS = {"goodput_ratio": 0.97, "refusal_p99_ms": 50.0, "memory_growth_ratio": 1.05}
CONFIG: dict[str, Any] = {
    "models": [
        {
            "id": "stub",
            "engine": {
                "max_batch_size": SLOTS,
                "max_context_tokens": 256,
                "stub": {
                    "prefill_us_per_token": 10,
                    "decode_us_per_step": STEP_US,
                    "decode_us_per_sequence": 0,
                    "output_tokens": 200,
                },
            },
        }
    ],
    "queue": {"length": QUEUE},
}

Result = dict[str, Any]
_spawn = multiprocessing.get_context("spawn")


# --- the clients, each load in a process of its own ----------------------------------------------------------


async def _closed_loop(
    url: str, key: str, clients: int, seconds: float, pause_ms: tuple[float, float], seed: int
) -> Result:
    """So many clients without a pause, but after a refusal."""
    client = HttpClient(url, connections_max=clients, idle_timeout_s=60)
    chance = random.Random(seed)
    began = time.monotonic()
    counted_from, end = began + WARM_UP_S, began + WARM_UP_S + seconds
    answers: list[float] = []
    refusals: list[float] = []
    statuses: Counter[str] = Counter()

    async def one_after_another(number: int) -> None:
        body = _body(TOKENS, is_stream=number % 2 == 0)
        while (sent := time.monotonic()) < end:
            status, is_whole = await _chat(client, key, body)
            now = time.monotonic()
            is_counted = counted_from <= now < end
            if is_counted:
                statuses[str(status) if is_whole else "broken"] += 1
            if status == 200 and is_whole:
                if is_counted:
                    answers.append(now - sent)
                continue
            if is_counted and status == 429:
                refusals.append(now - sent)
            await asyncio.sleep(chance.uniform(*pause_ms) / 1000)

    lags: list[float] = []
    watching = asyncio.ensure_future(_watch_lag(lags))
    await asyncio.gather(*(one_after_another(number) for number in range(clients)))
    watching.cancel()
    client.close()
    return {
        "lag_s": lags,
        "answers_per_s": len(answers) / seconds,
        "answer_s": answers,
        "refusal_s": refusals,
        "statuses": dict(statuses),
    }


async def _watch_lag(lags: list[float]) -> None:
    """How late this process is itself: so much of every latency is its own."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(LAG_EVERY_S)
        lags.append(time.monotonic() - began - LAG_EVERY_S)


async def _steady(url: str, key: str, seconds: float) -> Result:
    """A short chat every so often, whatever becomes of the others. Latencies of those answered."""
    client = HttpClient(url, connections_max=256, idle_timeout_s=60)
    statuses: Counter[str] = Counter()
    answers: list[float] = []
    body = _body(QUIET_TOKENS, is_stream=False)

    async def one() -> None:
        sent = time.monotonic()
        status, is_whole = await _chat(client, key, body)
        statuses[str(status) if is_whole else "broken"] += 1
        if status == 200 and is_whole:
            answers.append(time.monotonic() - sent)

    began = time.monotonic()
    running = []
    for number in range(int(seconds / QUIET_SHORT_EVERY_S)):
        await asyncio.sleep(max(0.0, began + number * QUIET_SHORT_EVERY_S - time.monotonic()))
        running.append(asyncio.ensure_future(one()))
    await asyncio.gather(*running)
    client.close()
    return {"answer_s": answers, "statuses": dict(statuses)}


async def _chat(client: HttpClient, key: str, body: bytes) -> tuple[int, bool]:
    """Status, and whether the reply came to its proper end."""
    headers = b"content-type: application/json\r\nauthorization: Bearer " + key.encode() + b"\r\n"
    try:
        with await client.request("POST", "/chat/completions", headers, body) as response:
            data = await response.read()
    except Exception:  # noqa: BLE001 - whatever it was, it is counted
        return 0, False
    if response.status != 200:
        return response.status, True
    return 200, b"[DONE]" in data or b'"usage"' in data


def _body(max_tokens: int, *, is_stream: bool) -> bytes:
    message = {"role": "user", "content": "How deep is the river?"}
    return json.dumps(
        {"model": "stub", "messages": [message], "max_tokens": max_tokens, "stream": is_stream}
    ).encode()


def _run_load(connection: Connection, name: str, arguments: tuple[Any, ...]) -> None:
    loads: dict[str, Callable[..., Coroutine[Any, Any, Result]]] = {
        "closed_loop": _closed_loop,
        "steady": _steady,
    }
    connection.send(uvloop.run(loads[name](*arguments)))


class Load:
    """A load that is running in its process."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self._connection, other = _spawn.Pipe(duplex=False)
        self._process = _spawn.Process(target=_run_load, args=(other, name, arguments), daemon=True)
        self._process.start()
        other.close()

    def result(self) -> Result:
        result: Result = self._connection.recv()
        self._process.join()
        return result


# --- the trial ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="overload of the stub engine")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of overload; a third for the other parts"
    )
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--generators", type=int, default=1, help="processes that make the overload")
    parser.add_argument("--pause-ms", type=float, nargs=2, default=(50.0, 100.0), metavar=("MIN", "MAX"))
    arguments = parser.parse_args()
    pause_ms = (arguments.pause_ms[0], arguments.pause_ms[1])
    load_before = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as scratch, headrace(Path(scratch), config=CONFIG) as running:
        short = arguments.seconds / 3
        quiet_key = _tenant(running, "quiet")
        flood_key = _tenant(running, "flood")
        alone = Load("steady", running.base_url, quiet_key, short).result()
        most, beside = _unloaded(running, flood_key, quiet_key, short, pause_ms)
        floods, during, memory, cpu_s = _overloaded(running, flood_key, quiet_key, arguments, pause_ms)
        left = _left_behind(running, flood_key)
    flood = _merged(floods)
    refusals = flood["refusal_s"]
    figures = {
        "goodput_ratio": round(flood["answers_per_s"] / most["answers_per_s"], 4),
        "refusal_p99_ms": round(quantile(refusals, 0.99) * 1000, 1),
        "memory_growth_ratio": round(memory["end_mb"] / memory["after_10_s_mb"], 3),
    }
    report = {
        "benchmark": "overload",
        "slots": SLOTS,
        "queue_length": QUEUE,
        "limits": "none but queue.length; every refusal is queue_full",
        "clients": arguments.clients,
        "pause_after_refusal_ms": list(pause_ms),
        "seconds": arguments.seconds,
        "machine": {"cores": os.cpu_count(), "load_average_before": load_before},
        "unloaded_answers_per_s": round(most["answers_per_s"], 1),
        "overloaded_answers_per_s": round(flood["answers_per_s"], 1),
        **figures,
        "refusals_per_s": round(len(refusals) / arguments.seconds, 1),
        "refusal_p50_ms": round(quantile(refusals, 0.5) * 1000, 1),
        "clients_own_lag_p50_ms": round(quantile(flood["lag_s"], 0.5) * 1000, 1),
        "clients_own_lag_p99_ms": round(quantile(flood["lag_s"], 0.99) * 1000, 1),
        "answer_p50_s": round(quantile(flood["answer_s"], 0.5), 3),
        "statuses": flood["statuses"],
        "server_memory": memory,
        "server_cpu_share": round(cpu_s / (arguments.seconds + WARM_UP_S), 2),
        "other_tenant": {
            "alone": _quiet_figures(alone),
            "beside_100_clients": _quiet_figures(beside),
            "during_overload": _quiet_figures(during),
        },
        "left_behind_when_idle": left,
        "goals": GOALS,
        "goals_met": {
            "goodput": figures["goodput_ratio"] >= GOALS["goodput_ratio"],
            "refusals": figures["refusal_p99_ms"] < GOALS["refusal_p99_ms"],
            "memory": figures["memory_growth_ratio"] <= GOALS["memory_growth_ratio"],
        },
    }
    print(json.dumps(report, indent=1))


def _unloaded(
    running: Running, flood_key: str, quiet_key: str, seconds: float, pause_ms: tuple[float, float]
) -> tuple[Result, Result]:
    """As many clients as slots: the most the engine gives, and the other tenant beside it."""
    full = Load("closed_loop", running.base_url, flood_key, SLOTS, seconds, pause_ms, 1)
    time.sleep(WARM_UP_S / 2)
    beside = Load("steady", running.base_url, quiet_key, seconds).result()
    return full.result(), beside


def _overloaded(
    running: Running,
    flood_key: str,
    quiet_key: str,
    arguments: argparse.Namespace,
    pause_ms: tuple[float, float],
) -> tuple[list[Result], Result, dict[str, Any], float]:
    """All clients; (loads, the other tenant, memory of the server process, its processor time)."""
    memory: dict[str, Any] = {"start_mb": resident_mb(running.pid)}
    before_s = _cpu_seconds(running.pid)
    share = arguments.clients // arguments.generators
    loads = [
        Load("closed_loop", running.base_url, flood_key, share, arguments.seconds, pause_ms, 2 + number)
        for number in range(arguments.generators)
    ]
    quiet = Load("steady", running.base_url, quiet_key, arguments.seconds)
    series = []
    for _ in range(int(arguments.seconds + WARM_UP_S) - 1):
        time.sleep(1.0)
        series.append(resident_mb(running.pid))
    memory |= {
        "after_10_s_mb": series[min(9, len(series) - 1)],
        "end_mb": series[-1],
        "every_second_mb": series,
    }
    results = [load.result() for load in loads]
    return results, quiet.result(), memory, _cpu_seconds(running.pid) - before_s


def _left_behind(running: Running, key: str) -> dict[str, int]:
    """What the flooding tenant still holds when all is over. Zeros, if all is well."""
    request = urllib.request.Request(running.base_url + "/limits", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as response:
        tenant = next(one for one in json.load(response)["data"] if one["level"] == "tenant")
    return {name: tenant[name] for name in ("tokens_held", "requests_running")}


def _tenant(running: Running, name: str) -> str:
    """A tenant of its own; its key."""

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            running.details["admin_url"] + path,
            data=json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {running.details['admin_key']}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request) as response:
            made: dict[str, Any] = json.load(response)
            return made

    post("/admin/v1/tenants", {"id": name})
    key: str = post("/admin/v1/keys", {"tenant": name})["key"]
    return key


def _merged(results: list[Result]) -> Result:
    statuses: Counter[str] = Counter()
    for one in results:
        statuses.update(one["statuses"])
    return {
        "answers_per_s": sum(one["answers_per_s"] for one in results),
        "answer_s": [value for one in results for value in one["answer_s"]],
        "refusal_s": [value for one in results for value in one["refusal_s"]],
        "lag_s": [value for one in results for value in one["lag_s"]],
        "statuses": dict(statuses),
    }


def _quiet_figures(result: Result) -> dict[str, Any]:
    sent = sum(result["statuses"].values())
    return {
        "sent": sent,
        "answered": round(len(result["answer_s"]) / sent, 3),
        "p50_s": round(quantile(result["answer_s"], 0.5), 3),
        "p99_s": round(quantile(result["answer_s"], 0.99), 3),
        "statuses": result["statuses"],
    }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    main()
