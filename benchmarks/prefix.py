"""Shared beginnings: headrace against llama.cpp's own server. python -m benchmarks.prefix [--vllm PYTHON]

1. A system prompt of about 1 500 tokens and questions of about 50: 32 requests within one second, first when nothing
   has been computed (cold), then other questions (warm). Time to first token, total, new tokens/s.
2. Where three quarters of each prompt are shared (300 of 400 tokens), 32 at a time, 64 requests: tokens/s.
3. A conversation of ten turns: how many prompt tokens each turn had to compute.

Servers: headrace as it is configured by default, headrace in reproducible mode, llama.cpp's server with its own prompt
cache on, and with it off. The same weights, threads, slots and layout. Prints one JSON object.

With `--vllm` vLLM's too, with its prefix cache on. Its figures compare as benchmarks/engine.py says. It caches whole
blocks of 128 tokens, so what it computes of a prompt is up to 127 tokens more than what is new. Ratios within a server
(cold to warm) and counts of computed tokens do not depend on the arithmetic; times do.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.servers import Running, headrace, llama_server, vllm_server
from benchmarks.weights import DTYPES, add_library, converted_builtin, faster_dtype, for_vllm

SLOTS, CONTEXT, BATCH = 32, 2048, 512
LONG_WORDS, QUESTION_WORDS = 1470, 30
"""About 1 500 and 50 tokens."""
SHARED_WORDS, OWN_WORDS = 215, 66
"""About 300 and 100 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--only", default="", help="part of a server's name")
    add_library(parser)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="a Python with vLLM's CPU build")
    parser.add_argument("--vllm-dtype", choices=DTYPES, help="default: the faster one on this machine")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        weights = converted_builtin(Path(scratch))
        for name, server in _servers(weights, Path(scratch), arguments):
            if arguments.only not in name:
                continue
            with server as running:
                print(f"{name} ready", file=sys.stderr, flush=True)
                results[name] = {
                    "burst": _burst(running),
                    "three_quarters_shared": _three_quarters(running),
                    "conversation": _conversation(running),
                }
                print(json.dumps(results[name]), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "prefix", "threads": arguments.threads, "results": results}, indent=1))


def _servers(weights: Path, scratch: Path, arguments: argparse.Namespace) -> Any:
    threads, library = arguments.threads, arguments.library

    def engine(**more: Any) -> dict[str, Any]:
        settings = {"max_batch_size": SLOTS, "max_context_tokens": CONTEXT, "threads": threads, **more}
        settings["library"] = library
        return {"models": [{"id": "bench", "path": str(weights), "engine": settings}]}

    yield "headrace", headrace(scratch / "a", config=engine())
    yield "headrace, reproducible", headrace(scratch / "b", config=engine(reproducible=True))
    yield "headrace, prefix cache off", headrace(scratch / "c", config=engine(prefix_cache=False))
    same = {"threads": threads, "sequences": SLOTS, "context": CONTEXT, "batch": BATCH}
    for is_cached in (True, False):
        name = f"llama.cpp server, cache {'on' if is_cached else 'off'}"
        yield name, llama_server(weights, is_cached=is_cached, **same)
    dtype = arguments.vllm_dtype or faster_dtype()
    name = f"vLLM, cache on, {dtype}"
    if arguments.vllm and arguments.only in name:
        plain = for_vllm(arguments.vllm, weights, scratch / "plain", dtype)
        kept = scratch / "vllm"
        yield name, vllm_server(arguments.vllm, plain, kept, dtype=dtype, is_cached=True, **same)


def _burst(running: Running) -> dict[str, Any]:
    system = load.prompt(1, words=LONG_WORDS)
    figures = {}
    for name, first in (("cold", 1000), ("warm", 2000)):
        bodies = [
            _body(running, [("system", system), ("user", load.prompt(first + at, words=QUESTION_WORDS))], 16)
            for at in range(32)
        ]
        figures[name] = _checked(
            asyncio.run(load.send(running.base_url, key=running.key, bodies=bodies, over_s=1.0))
        )
    figures["ttft_p50_cold_to_warm"] = round(
        figures["cold"]["ttft_p50_s"] / max(1e-6, figures["warm"]["ttft_p50_s"]), 1
    )
    return figures


def _three_quarters(running: Running) -> dict[str, Any]:
    shared = load.prompt(2, words=SHARED_WORDS)
    bodies = [
        _body(running, [("system", shared), ("user", load.prompt(3000 + at, words=OWN_WORDS))], 32)
        for at in range(64)
    ]
    return _checked(asyncio.run(load.send(running.base_url, key=running.key, bodies=bodies, concurrency=32)))


def _conversation(running: Running) -> list[dict[str, Any]]:
    turns: list[tuple[str, str]] = []
    figures = []
    for number in range(10):
        turns.append(("user", load.prompt(4000 + number, words=40)))
        outcome = asyncio.run(
            load.send(running.base_url, key=running.key, bodies=[_body(running, turns, 24)])
        )
        _checked(outcome)
        turns.append(("assistant", outcome.texts[0]))
        figures.append(
            {
                "prompt_tokens": outcome.prompt_tokens,
                "computed": outcome.prompt_tokens - outcome.cached_tokens,
                "ttft_s": round(outcome.first_token[0], 3),
            }
        )
    return figures


def _body(running: Running, messages: list[tuple[str, str]], max_tokens: int) -> dict[str, Any]:
    return {
        "model": running.model,
        "messages": [{"role": role, "content": content} for role, content in messages],
        "max_tokens": max_tokens,
        "temperature": 0.0,
    }


def _checked(outcome: load.Outcome) -> dict[str, Any]:
    if outcome.errors:
        raise RuntimeError(outcome.errors[0])
    return outcome.figures()


if __name__ == "__main__":
    main()
