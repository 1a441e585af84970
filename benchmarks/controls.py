"""What each control of a model does, changed while the server runs. python -m benchmarks.controls [--seconds 40]

One worker, one thread, the built-in model, 16 chats at a time of about 200 prompt tokens and 64 new ones, closed loop; each
control is set through the admin API, in force with the next step, and taken back. For `batch_wait_ms` the load is bursts:
four chats within 20 ms, then a pause until all are done. Figures of the seconds after the change. Prints one JSON object.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.servers import Running, admin, headrace
from benchmarks.weights import converted_builtin

CHATS = 16
WORDS, MAX_TOKENS = 145, 64
BURST, BURST_SPREAD_S = 4, 0.02
SETTLE_S = 8.0
"""After a change, until what was under way before it has ended."""

CONTROLS: list[tuple[str, dict[str, float]]] = [
    ("as configured", {}),
    ("max_batch_size 4", {"max_batch_size": 4}),
    ("max_concurrent_requests 4", {"max_concurrent_requests": 4}),
    ("max_batch_tokens 96", {"max_batch_tokens": 96}),
    ("target_step_ms 150", {"target_step_ms": 150, "idle_step_ms": 150}),
    ("target_step_ms 1500", {"target_step_ms": 1500, "idle_step_ms": 1500}),
]
WAITS: list[tuple[str, dict[str, float]]] = [
    ("batch_wait_ms 0", {"batch_wait_ms": 0}),
    ("batch_wait_ms 30", {"batch_wait_ms": 30}),
]


async def closed_loop(running: Running, seconds: float, first: int) -> dict[str, Any]:
    """Chats one after another, of which those count that begin and end within the time."""
    outcome = load.Outcome()
    client = load.HttpClient(running.base_url, connections_max=CHATS, idle_timeout_s=600)
    began = time.perf_counter()

    async def one_after_another(place: int) -> None:
        for number in range(first + place, first + 1_000_000, CHATS):
            counted = time.perf_counter() >= began + SETTLE_S
            await load.chat(
                client,
                running.key,
                load.body_of(running.model, number, words=WORDS, max_tokens=MAX_TOKENS),
                outcome if counted else load.Outcome(),
            )
            if time.perf_counter() >= began + SETTLE_S + seconds:
                return

    await asyncio.gather(*(one_after_another(place) for place in range(CHATS)))
    outcome.seconds = time.perf_counter() - began - SETTLE_S
    client.close()
    return shown(outcome)


async def bursts(running: Running, seconds: float, first: int) -> dict[str, Any]:
    """A few chats at nearly the same time, again and again."""
    outcome = load.Outcome()
    client = load.HttpClient(running.base_url, connections_max=BURST, idle_timeout_s=600)
    began = time.perf_counter()
    number = first

    async def later(place: int) -> None:
        await asyncio.sleep(BURST_SPREAD_S * place / BURST)
        await load.chat(
            client,
            running.key,
            load.body_of(running.model, number + place, words=WORDS, max_tokens=MAX_TOKENS),
            outcome,
        )

    while time.perf_counter() < began + seconds:
        await asyncio.gather(*(later(place) for place in range(BURST)))
        number += BURST
    outcome.seconds = time.perf_counter() - began
    client.close()
    return shown(outcome)


def shown(outcome: load.Outcome) -> dict[str, Any]:
    if outcome.errors:
        raise RuntimeError(outcome.errors[0])
    figures = outcome.figures()
    names = ("new_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "gap_p50_ms", "gap_p99_ms")
    return {name: figures[name] for name in names}


def measure(running: Running, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, controls in ((closed_loop, CONTROLS), (bursts, WAITS)):
        for name, changes in controls:
            admin(running, "PATCH", f"models/{running.model}", changes)
            found[name] = asyncio.run(kind(running, seconds, 100_000 * len(found)))
            admin(running, "PATCH", f"models/{running.model}", dict.fromkeys(changes))
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        weights = converted_builtin(Path(scratch))
        engine = {"max_batch_size": CHATS, "max_context_tokens": 512, "threads": 1}
        config = {"models": [{"id": "bench", "path": str(weights), "engine": engine}]}
        with headrace(Path(scratch) / "data", config=config) as running:
            found = measure(running, arguments.seconds)
    print(json.dumps({"benchmark": "controls", "controls": found}, indent=1))


if __name__ == "__main__":
    main()
