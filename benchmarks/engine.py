"""headrace against llama.cpp's own server, over HTTP, side by side.

    python -m benchmarks.engine [--rounds 3] [--threads N] [--concurrency 1,4,16,32]

Both load the same converted weights through the same library, with the same threads, slots, KV layout
(per sequence), batch size and requests: distinct prompts of about 200 tokens, 64 new tokens, greedy,
streamed, closed loop. Servers take turns, a fresh start for each round. Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import load
from benchmarks.servers import Running, headrace, llama_server, resident_mb
from benchmarks.weights import converted_builtin

SEQUENCES = 32
CONTEXT = 512
BATCH = 512
WORDS = 145
"""Words of a prompt: about 200 tokens with the chat template."""
MAX_TOKENS = 64
REQUESTS = {1: 12, 4: 24, 16: 48, 32: 96}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--concurrency", default="1,4,16,32")
    parser.add_argument("--cached", action="store_true", help="leave the server's prompt cache on")
    parser.add_argument("--ours-only", action="store_true", help="without llama.cpp's server; no ratios")
    parser.add_argument("--target-step-ms", type=float, help="another time for a step than the default")
    arguments = parser.parse_args()
    levels = [int(level) for level in arguments.concurrency.split(",")]
    samples: dict[str, dict[int, list[dict[str, Any]]]] = {}
    memory: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        weights = converted_builtin(Path(scratch))
        for number in range(arguments.rounds):
            for server in _servers(weights, Path(scratch) / f"data{number}", arguments):
                with server as running:
                    _say(f"round {number + 1}: {running.name} ready after {running.ready_s:.1f} s")
                    for level in levels:
                        figures = _measure(running, level)
                        _say(f"  {level:3d} at a time: {figures['new_tokens_per_s']} new tokens/s")
                        samples.setdefault(running.name, {}).setdefault(level, []).append(figures)
                    memory.setdefault(running.name, []).append(_memory(running))
    print(json.dumps(_report(samples, memory, arguments), indent=1))


def _servers(weights: Path, data: Path, arguments: argparse.Namespace) -> list[Any]:
    config: dict[str, Any] = {
        "models": [
            {
                "id": "bench",
                "path": str(weights),
                "engine": {
                    "max_batch_size": SEQUENCES,
                    "max_context_tokens": CONTEXT,
                    "max_batch_tokens": BATCH,
                    "threads": arguments.threads,
                },
            }
        ]
    }
    if arguments.target_step_ms:
        config["models"][0]["engine"]["target_step_ms"] = arguments.target_step_ms
        config["models"][0]["engine"]["idle_step_ms"] = arguments.target_step_ms
    if arguments.ours_only:
        return [headrace(data, config=config)]
    return [
        headrace(data, config=config),
        llama_server(
            weights,
            threads=arguments.threads,
            sequences=SEQUENCES,
            context=CONTEXT,
            batch=BATCH,
            is_cached=arguments.cached,
        ),
    ]


def _measure(running: Running, level: int) -> dict[str, Any]:
    outcome = asyncio.run(
        load.run(
            running.base_url,
            key=running.key,
            model=running.model,
            concurrency=level,
            requests=REQUESTS.get(level, 4 * level),
            words=WORDS,
            max_tokens=MAX_TOKENS,
            first_number=1000 * level,
        )
    )
    if outcome.errors:
        raise RuntimeError(f"{running.name}: {outcome.errors[0]}")
    return outcome.figures()


def _memory(running: Running) -> float:
    from benchmarks.servers import children

    worker = children(running.pid).get("worker")
    return resident_mb(worker or running.pid)


def _report(
    samples: dict[str, dict[int, list[dict[str, Any]]]],
    memory: dict[str, list[float]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    ours, theirs = samples["headrace"], samples.get("llama.cpp server", samples["headrace"])
    return {
        "benchmark": "engine",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "is_server_cache_on": arguments.cached,
        "ratio_of_medians": {
            level: round(_median(ours[level]) / _median(theirs[level]), 3) for level in ours
        },
        "batching_gain": {
            name: round(_median(by_level[max(by_level)]) / _median(by_level[min(by_level)]), 2)
            for name, by_level in samples.items()
        },
        "resident_mb": {name: median(values) for name, values in memory.items()},
        "samples": samples,
    }


def _median(figures: list[dict[str, Any]]) -> float:
    return median(one["new_tokens_per_s"] for one in figures)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
