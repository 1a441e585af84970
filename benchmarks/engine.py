"""headrace against llama.cpp's own server, and vLLM's if there is one, over HTTP, side by side.

    python -m benchmarks.engine [--rounds 3] [--threads N] [--concurrency 1,4,16,32] [--library native] [--vllm PYTHON]

headrace and llama.cpp's server load the same converted weights (Q8_0) through the same library (but with `--library
native`, when headrace takes the one that was compiled here), with the same threads, slots, KV layout (per sequence), batch size and requests: distinct prompts of about 200 tokens, 64 new tokens, greedy,
streamed, closed loop. Servers take turns, a fresh start for each round. Prints one JSON object.

`--vllm` names a Python that has vLLM's CPU build (benchmarks/vllm_server.py says how to make one). vLLM gets the same
requests, template, threads, sequences, context, batch tokens and room for KV, and the same weights made plain from the
same file. What its figures can be compared with, and not:

- The arithmetic is another. vLLM computes in bfloat16 or float32 with weights of 269 or 538 MB, the others in 8-bit
  integers with 138 MB. The comparison is of what a user of this machine gets from either, not of schedulers: for that,
  read how each one gains with more requests at a time (`batching_gain`).
- bfloat16 is the faster one where the processor has instructions for it, float32 otherwise (`--vllm-dtype` decides
  differently). Figures from machines that differ in this say nothing about each other.
- Greedy answers are not the same texts, so some end earlier: `tokens` has each server's counts. Those of the prompts
  must be equal.
- vLLM uses a process for HTTP, one for scheduling and one for the model. `threads` are those of the model;
  `processor_s` of each sample is what all processes of a server used. The scheduling process may wait for the model
  by spinning: with one thread vLLM can keep two cores busy, where the others keep one.
- Its first start compiles the model; the times until it is ready are no measurement of it.
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
from benchmarks.processes import processor_s, proportional_mb, tree
from benchmarks.servers import Running, headrace, llama_server, resident_mb, vllm_server
from benchmarks.weights import DTYPES, add_library, converted_builtin, faster_dtype, for_vllm

SEQUENCES = 32
CONTEXT = 512
BATCH = 512
WORDS = 145
"""Words of a prompt: about 200 tokens with the chat template."""
MAX_TOKENS = 64
REQUESTS = {1: 12, 4: 24, 16: 48, 32: 96}


def main() -> None:
    arguments = _arguments()
    levels = [int(level) for level in arguments.concurrency.split(",")]
    samples: dict[str, dict[int, list[dict[str, Any]]]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        weights = converted_builtin(Path(scratch))
        if arguments.vllm:
            _say(f"weights for vLLM in {arguments.vllm_dtype}")
            for_vllm(arguments.vllm, weights, Path(scratch) / "plain", arguments.vllm_dtype)
        for number in range(arguments.rounds):
            for server in _servers(weights, Path(scratch), number, arguments):
                with server as running:
                    _say(f"round {number + 1}: {running.name} ready after {running.ready_s:.1f} s")
                    for level in levels:
                        figures = _measure(running, level, arguments.requests)
                        _say(f"  {level:3d} at a time: {figures['new_tokens_per_s']} new tokens/s")
                        samples.setdefault(running.name, {}).setdefault(level, []).append(figures)
                    memory.setdefault(running.name, []).append(_memory(running))
    print(json.dumps(_report(samples, memory, arguments), indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--concurrency", default="1,4,16,32")
    parser.add_argument("--requests", type=int, help="for each concurrency, instead of the usual number")
    parser.add_argument("--cached", action="store_true", help="leave the servers' prompt caches on")
    parser.add_argument("--ours-only", action="store_true", help="without the other servers; no ratios")
    parser.add_argument("--target-step-ms", type=float, help="another time for a step than the default")
    add_library(parser)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="a Python with vLLM's CPU build")
    parser.add_argument("--vllm-dtype", choices=DTYPES, help="default: the faster one on this machine")
    arguments = parser.parse_args()
    if arguments.vllm and arguments.ours_only:
        parser.error("--ours-only leaves vLLM out: give either it or --vllm")
    if arguments.vllm and not arguments.vllm_dtype:
        arguments.vllm_dtype = faster_dtype()
    return arguments


def _servers(weights: Path, scratch: Path, number: int, arguments: argparse.Namespace) -> list[Any]:
    data = scratch / f"data{number}"
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
                    "library": arguments.library,
                },
            }
        ]
    }
    if arguments.target_step_ms:
        config["models"][0]["engine"]["target_step_ms"] = arguments.target_step_ms
        config["models"][0]["engine"]["idle_step_ms"] = arguments.target_step_ms
    if arguments.ours_only:
        return [headrace(data, config=config)]
    same = {
        "threads": arguments.threads,
        "sequences": SEQUENCES,
        "context": CONTEXT,
        "batch": BATCH,
        "is_cached": arguments.cached,
    }
    servers = [headrace(data, config=config), llama_server(weights, **same)]
    if arguments.vllm:
        plain, kept, dtype = scratch / "plain", scratch / "vllm", arguments.vllm_dtype
        servers.append(vllm_server(arguments.vllm, plain, kept, dtype=dtype, **same))
    return servers


def _measure(running: Running, level: int, requests: int | None) -> dict[str, Any]:
    before_s = processor_s(running.pid)
    outcome = asyncio.run(
        load.run(
            running.base_url,
            key=running.key,
            model=running.model,
            concurrency=level,
            requests=requests or REQUESTS.get(level, 4 * level),
            words=WORDS,
            max_tokens=MAX_TOKENS,
            first_number=1000 * level,
        )
    )
    if outcome.errors:
        raise RuntimeError(f"{running.name}: {outcome.errors[0]}")
    return {**outcome.figures(), "processor_s": round(processor_s(running.pid) - before_s, 2)}


def _memory(running: Running) -> tuple[float, float]:
    """Resident in the process that has the model, the largest; and of all of the server's."""
    return max(map(resident_mb, tree(running.pid))), proportional_mb(running.pid)


def _report(
    samples: dict[str, dict[int, list[dict[str, Any]]]],
    memory: dict[str, list[tuple[float, float]]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    ours, theirs = samples["headrace"], samples.get("llama.cpp server", samples["headrace"])
    report = {
        "benchmark": "engine",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "threads": arguments.threads,
        "library": arguments.library,
        "rounds": arguments.rounds,
        "is_server_cache_on": arguments.cached,
        "ratio_of_medians": _ratios(ours, theirs),
        "batching_gain": {
            name: round(_median(by_level[max(by_level)]) / _median(by_level[min(by_level)]), 2)
            for name, by_level in samples.items()
        },
        "tokens": {
            name: {
                level: {kind: figures[0][f"{kind}_tokens"] for kind in ("prompt", "completion")}
                for level, figures in by_level.items()
            }
            for name, by_level in samples.items()
        },
        "resident_mb": {name: median(one for one, _ in pairs) for name, pairs in memory.items()},
        "all_processes_mb": {name: median(every for _, every in pairs) for name, pairs in memory.items()},
        "samples": samples,
    }
    if "vLLM" in samples:
        report["vllm_dtype"] = arguments.vllm_dtype
        report["ratio_of_medians_to_vllm"] = _ratios(ours, samples["vLLM"])
    return report


def _ratios(
    ours: dict[int, list[dict[str, Any]]], theirs: dict[int, list[dict[str, Any]]]
) -> dict[int, float]:
    return {level: round(_median(ours[level]) / _median(theirs[level]), 3) for level in ours}


def _median(figures: list[dict[str, Any]]) -> float:
    return median(one["new_tokens_per_s"] for one in figures)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
