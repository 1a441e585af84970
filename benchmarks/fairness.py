"""Does the queue keep its promises on the real engine? python -m benchmarks.fairness [--seconds 60] [--only NAME …]

One worker, one thread, eight slots, the built-in model; two tenants of equal weight unless said.

- short: A has 200 long jobs waiting at any time, B sends one short chat every 2 s. B's time to the first token, 95 %,
  alone, then beside the flood under each policy. Bound: alone plus two engine steps, or three times alone.
- both: both flood, A with long prompts, B with long answers. Jain index of what each got (prompt tokens plus twice the
  tokens of the answer), at least 0.95.
- weights: both flood, weights 3 and 1: three times the service, within 10 %.
- classes: B's batch jobs behind A's interactive flood keep their floor of a tenth; the longest wait of one is printed.
- long: one prompt of 6 000 tokens after the other beside short chats: their first token, 99 %, at most twice as late,
  and long prompts are answered meanwhile. With steps of 200 ms and without flash attention, as docs/models.md advises for
  long contexts on a CPU; with the default engine beside it.

Prints one JSON object; exit status 1 if a bound is missed.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load import prompt, quantile
from benchmarks.servers import Running, admin, headrace
from benchmarks.weights import add_library, converted_builtin
from headrace.config.settings import EngineLibrary
from headrace.http import HttpClient, SseSplitter, data_of

SLOTS = 8
FAIR = {"interactive_reserve": 0, "reserve_output_tokens_max": None, "preemption": False}
POLICIES: dict[str, dict[str, Any]] = {
    "fifo": {"scheduler_policy": "fifo"},
    "fair": {},
    "reserve": {"interactive_reserve": 1, "reserve_output_tokens_max": 32},
    "preemption": {"preemption": True},
}
LONG_SECONDS_MAX = 300
"""So long it is waited for the first of the long prompts."""


def long_engines(library: EngineLibrary) -> dict[str, dict[str, Any]]:
    """What docs/models.md advises for long contexts, and the default."""
    steps = {"flash_attention": library == "native", "target_step_ms": 200, "idle_step_ms": 200}
    return {"for long contexts": steps, "default": {}}


SCENES = ("short", "both", "weights", "classes", "long")


@dataclass
class Client:
    """A tenant's chats against one server, counted as their tokens arrive."""

    running: Running
    key: str
    cost: int = 0
    """Prompt tokens (at the first token) plus twice the tokens of the answer."""
    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    """How long each chat took, those too whose answer was empty."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def chat(self, text: str, *, max_tokens: int, http: HttpClient, **more: Any) -> None:
        """One streamed chat to its end."""
        fields = {
            "model": self.running.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0.7,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        headers = b"content-type: application/json\r\nauthorization: Bearer " + self.key.encode() + b"\r\n"
        began = last = time.perf_counter()
        guessed = len(text) // 5  # until the usage says it
        async for chunk in _chunks(http, headers, json.dumps(fields).encode()):
            if chunk.get("error"):
                raise RuntimeError(str(chunk["error"]))
            if chunk.get("usage"):
                self.cost += chunk["usage"]["prompt_tokens"] - guessed
            if not chunk["choices"] or not chunk["choices"][0]["delta"].get("content"):
                continue
            now = time.perf_counter()
            if last == began:
                self.first_token.append(now - began)
                self.cost += guessed
            else:
                self.gaps.append(now - last)
            self.cost += 2
            last = now
        self.ended.append(time.perf_counter() - began)

    def flood(
        self, http: HttpClient, number: int, make: Callable[[int], tuple[str, int]], **more: Any
    ) -> None:
        """Keep so many chats open until `stop`."""

        async def one_after_another(first: int) -> None:
            for count in range(first, 1_000_000_000, number):
                text, max_tokens = make(count)
                await self.chat(text, max_tokens=max_tokens, http=http, **more)

        for first in range(number):
            task = asyncio.ensure_future(one_after_another(first))
            self._tasks.add(task)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for one in ended:
            if isinstance(one, Exception):
                raise one


async def _chunks(http: HttpClient, headers: bytes, body: bytes) -> AsyncIterator[dict[str, Any]]:
    response = await http.request("POST", "/chat/completions", headers, body)
    with response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.read())[:300]!r}")
        splitter = SseSplitter()
        async for data in response:
            for event in splitter.feed(data):
                content = data_of(event)
                if content is not None and content != b"[DONE]":
                    yield json.loads(content)


def tenant(running: Running, name: str, **sharing: Any) -> Client:
    admin(running, "POST", "tenants", {"id": name, **sharing})
    return Client(running, admin(running, "POST", "keys", {"tenant": name})["key"])


def long_job(number: int) -> tuple[str, int]:
    return prompt(number, words=60), 200


async def short(running: Running, http: HttpClient, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def every_two_seconds(client: Client, count: int) -> None:
        tasks = []
        for number in range(count):
            text = prompt(10_000 + number, words=12)
            tasks.append(asyncio.ensure_future(client.chat(text, max_tokens=8, http=http)))
            await asyncio.sleep(2)
        await asyncio.wait(tasks, timeout=60)
        for task in tasks:
            task.cancel()

    alone = tenant(running, "alone")
    await every_two_seconds(alone, max(10, int(seconds / 4)))
    alone_s = quantile(alone.first_token, 0.95)
    found["alone_p95_s"] = round(alone_s, 3)
    for name, scheduling in POLICIES.items():
        admin(running, "PATCH", f"models/{running.model}", {"scheduler_policy": None, **FAIR, **scheduling})
        flood = tenant(running, f"a-{name}")
        sparse = tenant(running, f"b-{name}")
        flood.flood(http, 200, long_job)
        await asyncio.sleep(10)
        count = int(seconds / 2) if name != "fifo" else 5
        await every_two_seconds(sparse, count)
        await flood.stop()
        waits = sparse.first_token or [float("inf")]
        step_s = quantile(flood.gaps, 0.95)
        bound = max(alone_s + 2 * step_s, 3 * alone_s)
        found[name] = {
            "p50_s": round(quantile(waits, 0.5), 3),
            "p95_s": round(quantile(waits, 0.95), 3),
            "served": f"{len(sparse.first_token)} of {count}",
            "step_p95_s": round(step_s, 3),
            "bound_s": round(bound, 3),
            "is_met": len(sparse.first_token) == count and quantile(waits, 0.95) <= bound,
        }
        await asyncio.sleep(1)
    found["is_met"] = found["reserve"]["is_met"] and found["preemption"]["is_met"]
    return found


async def shares(
    running: Running, http: HttpClient, seconds: float, name: str, *, weights: tuple[float, float]
) -> dict[str, Any]:
    """What two tenants that flood get, from 15 s on."""
    admin(running, "PATCH", f"models/{running.model}", {"scheduler_policy": "fair", **FAIR})
    a = tenant(running, f"{name}-a", weight=weights[0])
    b = tenant(running, f"{name}-b", weight=weights[1])
    a.flood(http, 60, lambda number: (prompt(number, words=150), 40))
    b.flood(http, 60, lambda number: (prompt(500_000 + number, words=15), 120))
    await asyncio.sleep(15)
    before = (a.cost, b.cost)
    await asyncio.sleep(seconds)
    got = [(a.cost - before[0]) / weights[0], (b.cost - before[1]) / weights[1]]
    await asyncio.gather(a.stop(), b.stop())
    await asyncio.sleep(1)
    jain = sum(got) ** 2 / (2 * sum(one * one for one in got))
    ratio = got[0] / got[1] * weights[0] / weights[1]
    wanted = weights[0] / weights[1]
    return {
        "service_per_s": [round(one * weight / seconds, 1) for one, weight in zip(got, weights, strict=True)],
        "jain": round(jain, 4),
        "ratio": round(ratio, 3),
        "is_met": jain >= 0.95 and abs(ratio / wanted - 1) <= 0.1,
    }


async def classes(running: Running, http: HttpClient, seconds: float) -> dict[str, Any]:
    admin(
        running,
        "PATCH",
        f"models/{running.model}",
        {"scheduler_policy": "fair", **FAIR, "batch_aging_s": 3600},
    )
    day, night = tenant(running, "day"), tenant(running, "night", service_class="batch")
    night.flood(http, 20, long_job)
    day.flood(http, 60, lambda number: long_job(700_000 + number))
    await asyncio.sleep(15)
    before = (day.cost, night.cost)
    await asyncio.sleep(seconds)
    got = (day.cost - before[0], night.cost - before[1])
    aged_s = 5.0
    admin(running, "PATCH", f"models/{running.model}", {"batch_aging_s": aged_s})
    night.first_token.clear()
    await asyncio.sleep(seconds / 2)
    await asyncio.gather(day.stop(), night.stop())
    admin(running, "PATCH", f"models/{running.model}", {"batch_aging_s": None})
    share = got[1] / sum(got)
    return {
        "batch_share": round(share, 3),
        "floor": 0.1,
        "longest_wait_with_aging_of_5_s": round(max(night.first_token, default=float("inf")), 1),
        "is_met": share >= 0.09,
    }


async def long(running: Running, http: HttpClient, seconds: float) -> dict[str, Any]:
    """Short chats beside one prompt of 6 000 tokens after the other."""
    budget = {"long_prompt_tokens": 2000, "long_prompts_max": 1}
    admin(running, "PATCH", f"models/{running.model}", {"scheduler_policy": "fair", **FAIR, **budget})
    few, bulky = tenant(running, "few"), tenant(running, "bulky")
    few.flood(http, 2, lambda number: (prompt(900_000 + number, words=30), 12))
    await asyncio.sleep(seconds / 2)
    alone = quantile(few.first_token, 0.99)
    few.first_token.clear()
    bulky.flood(http, 3, lambda number: (prompt(number, words=5_950), 4))
    for _ in range(int(LONG_SECONDS_MAX / 5)):
        await asyncio.sleep(5)
        if bulky.ended:
            break
    beside = quantile(few.first_token, 0.99)
    served = len(few.first_token)
    await asyncio.gather(few.stop(), bulky.stop())
    return {
        "alone_p99_s": round(alone, 3),
        "beside_p50_s": round(quantile(few.first_token, 0.5), 3),
        "beside_p99_s": round(beside, 3),
        "short_chats_served": served,
        "first_long_prompt_s": round(min(bulky.ended, default=float("inf")), 1),
        "is_met": beside <= 2 * alone and len(bulky.ended) > 0,
    }


async def long_prompts(seconds: float, weights: Path, folder: Path, library: EngineLibrary) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (name, engine) in enumerate(long_engines(library).items()):
        settings = {"max_context_tokens": 8192, "library": library, **engine}
        async with served(weights, folder / str(number), settings) as (running, http):
            found[name] = await long(running, http, seconds)
        print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    found["is_met"] = found["for long contexts"]["is_met"]
    return found


@asynccontextmanager
async def served(
    weights: Path, folder: Path, engine: dict[str, Any]
) -> AsyncIterator[tuple[Running, HttpClient]]:
    """A server with one worker, and a client for many chats at once."""
    settings = {"max_batch_size": SLOTS, "threads": 1, **engine}
    config = {
        "models": [{"id": "bench", "path": str(weights), "engine": settings}],
        "queue": {"length": 1000, "timeout_s": 600},
    }
    with headrace(folder, config=config) as running:
        http = HttpClient(running.base_url, connections_max=400, idle_timeout_s=600)
        try:
            yield running, http
        finally:
            http.close()


async def scene_found(
    scene: str, seconds: float, weights: Path, folder: Path, library: EngineLibrary
) -> dict[str, Any]:
    if scene == "long":
        return await long_prompts(seconds, weights, folder, library)
    async with served(weights, folder, {"max_context_tokens": 1024, "library": library}) as (running, http):
        if scene == "short":
            return await short(running, http, seconds)
        if scene == "classes":
            return await classes(running, http, seconds)
        even = (1.0, 1.0) if scene == "both" else (3.0, 1.0)
        return await shares(running, http, seconds, scene, weights=even)


async def run(
    scenes: list[str], seconds: float, weights: Path, folder: Path, library: EngineLibrary
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scene in scenes:
        found[scene] = await scene_found(scene, seconds, weights, folder / scene, library)
        print(json.dumps({scene: found[scene]}), file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", action="append", choices=SCENES)
    add_library(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        weights = converted_builtin(Path(scratch))
        scenes = arguments.only or list(SCENES)
        found = asyncio.run(run(scenes, arguments.seconds, weights, Path(scratch), arguments.library))
    print(json.dumps({"benchmark": "fairness", **found}, indent=1))
    return 0 if all(scene["is_met"] for scene in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
