"""How long running streams stop while a prompt of 4 000 tokens is read in. python -m benchmarks.stall

Eight streams of long answers run; two seconds later the prompt arrives. Gaps between a stream's tokens from then until the
prompt's first token, beside those before; and the prompt's time to its first token. headrace as it is configured by
default, headrace as it is advised for long contexts, and llama.cpp's own server, on the same weights, one thread.
Prints one JSON object.
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
from benchmarks.servers import Running, headrace, llama_server
from benchmarks.weights import add_library, converted_builtin
from headrace.config.settings import EngineLibrary

STREAMS, CONTEXT, BATCH = 8, 5120, 512
SHORT_WORDS, LONG_WORDS = 30, 3950
"""About 60 and 4 000 tokens."""
CALM_S = 6.0


async def measure(running: Running) -> dict[str, Any]:
    client = load.HttpClient(running.base_url, connections_max=STREAMS + 1, idle_timeout_s=600)
    streams = load.Outcome()
    tasks = [
        asyncio.ensure_future(
            load.chat(
                client,
                running.key,
                load.body_of(running.model, number, words=SHORT_WORDS, max_tokens=3000, temperature=0.8),
                streams,
            )
        )
        for number in range(STREAMS)
    ]
    for _ in range(600):
        await asyncio.sleep(0.1)
        if len(streams.first_token) == STREAMS:
            break
    streams.gaps.clear()
    await asyncio.sleep(CALM_S)
    calm, streams.gaps = streams.gaps, []
    bulky = load.Outcome()
    began = time.perf_counter()
    await load.chat(
        client, running.key, load.body_of(running.model, 99, words=LONG_WORDS, max_tokens=1), bulky
    )
    took = time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    client.close()
    if bulky.errors or streams.errors:
        raise RuntimeError((bulky.errors + streams.errors)[0])
    return {
        "gap_p50_ms_before": round(load.quantile(calm, 0.5) * 1000),
        "gap_p50_ms": round(load.quantile(streams.gaps, 0.5) * 1000),
        "gap_p99_ms": round(load.quantile(streams.gaps, 0.99) * 1000),
        "gap_max_ms": round(max(streams.gaps) * 1000),
        "tokens_of_streams_meanwhile": len(streams.gaps),
        "prompt_tokens": bulky.prompt_tokens,
        "prompt_first_token_s": round(took, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_library(parser)
    library = parser.parse_args().library
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        weights = converted_builtin(Path(scratch))
        for name, server in servers(weights, Path(scratch), library):
            with server as running:
                found[name] = asyncio.run(measure(running))
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "stall", "servers": found}, indent=1))


def servers(weights: Path, scratch: Path, library: EngineLibrary) -> Any:
    for name, more in (
        ("headrace", {}),
        (
            "headrace, for long contexts",
            # What docs/models.md advises for either library.
            {"flash_attention": library == "native", "target_step_ms": 200, "idle_step_ms": 200},
        ),
    ):
        engine = {
            "max_batch_size": STREAMS + 1,
            "max_context_tokens": CONTEXT,
            "threads": 1,
            "library": library,
            **more,
        }
        config = {"models": [{"id": "bench", "path": str(weights), "engine": engine}]}
        yield name, headrace(scratch / name, config=config)
    yield (
        "llama.cpp server",
        llama_server(
            weights, threads=1, sequences=STREAMS + 1, context=CONTEXT, batch=BATCH, is_cached=False
        ),
    )


if __name__ == "__main__":
    main()
