"""A closed-loop load of chats over HTTP, the same for every server that is measured."""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field

from headrace.http import HttpClient, SseSplitter, data_of

WORDS = [
    "river",
    "stone",
    "meter",
    "gate",
    "lake",
    "wheel",
    "bridge",
    "valve",
    "field",
    "house",
    "garden",
    "winter",
    "letter",
    "engine",
    "paper",
    "window",
    "market",
    "island",
    "forest",
    "signal",
    "copper",
    "harbour",
    "mirror",
    "ladder",
    "silver",
    "morning",
    "thunder",
    "orchard",
    "village",
]


def prompt(number: int, *, words: int) -> str:
    """A prompt of its own for each number: no two share a beginning."""
    state = (number + 1) * 2_654_435_761 % 2**32
    chosen = []
    for _ in range(words):
        state = (state * 1_103_515_245 + 12_345) % 2**31
        chosen.append(WORDS[state % len(WORDS)])
    return f"{number}: " + " ".join(chosen) + ". Write a long story about these words."


def body_of(model: str, number: int, *, words: int, max_tokens: int, temperature: float = 0.0) -> bytes:
    """A streamed chat with a prompt of its own that asks for its usage."""
    fields = {
        "model": model,
        "messages": [{"role": "user", "content": prompt(number, words=words)}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


@dataclass
class Outcome:
    """What a load of chats gave. Times in seconds."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, float | int]:
        return {
            "new_tokens_per_s": round(self.completion_tokens / self.seconds, 2),
            "all_tokens_per_s": round((self.completion_tokens + self.prompt_tokens) / self.seconds, 2),
            "completion_tokens": self.completion_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_p50_s": round(quantile(self.first_token, 0.5), 4),
            "ttft_p99_s": round(quantile(self.first_token, 0.99), 4),
            "gap_p50_ms": round(quantile(self.gaps, 0.5) * 1000, 2),
            "gap_p99_ms": round(quantile(self.gaps, 0.99) * 1000, 2),
            "seconds": round(self.seconds, 2),
            "errors": len(self.errors),
        }


def quantile(values: list[float], share: float) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


async def run(
    base_url: str,
    *,
    key: str,
    model: str,
    concurrency: int,
    requests: int,
    words: int,
    max_tokens: int,
    first_number: int = 0,
    temperature: float = 0.0,
) -> Outcome:
    """`requests` streamed chats, `concurrency` at a time."""
    outcome = Outcome()
    client = HttpClient(base_url, connections_max=concurrency, idle_timeout_s=600)
    numbers = iter(range(first_number, first_number + requests))
    began = time.perf_counter()

    async def one_after_another() -> None:
        for number in numbers:
            body = body_of(model, number, words=words, max_tokens=max_tokens, temperature=temperature)
            await chat(client, key, body, outcome)

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    outcome.seconds = time.perf_counter() - began
    client.close()
    return outcome


async def send(
    base_url: str, *, key: str, bodies: list[dict[str, object]], over_s: float = 0.0, concurrency: int = 0
) -> Outcome:
    """These chats, spread evenly over a time, or so many at a time. Each is streamed and asks for its usage."""
    outcome = Outcome()
    client = HttpClient(base_url, connections_max=concurrency or len(bodies), idle_timeout_s=600)
    gate = asyncio.Semaphore(concurrency or len(bodies))
    began = time.perf_counter()

    async def one(number: int, fields: dict[str, object]) -> None:
        await asyncio.sleep(over_s * number / len(bodies))
        body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()
        async with gate:
            await chat(client, key, body, outcome)

    await asyncio.gather(*(one(number, fields) for number, fields in enumerate(bodies)))
    outcome.seconds = time.perf_counter() - began
    client.close()
    return outcome


async def chat(client: HttpClient, key: str, body: bytes, outcome: Outcome) -> None:
    """One streamed chat, added to an outcome."""
    began = time.perf_counter()
    headers = b"content-type: application/json\r\nauthorization: Bearer " + key.encode() + b"\r\n"
    response = await client.request("POST", "/chat/completions", headers, body)
    with response:
        if response.status != 200:
            outcome.errors.append((await response.read()).decode()[:200])
            return
        splitter = SseSplitter()
        last = 0.0
        text = ""
        async for data in response:
            for event in splitter.feed(data):
                content = data_of(event)
                if content is None or content == b"[DONE]":
                    continue
                chunk = json.loads(content)
                if chunk.get("error"):
                    outcome.errors.append(str(chunk["error"]))
                    return
                usage = chunk.get("usage")
                if usage:
                    outcome.prompt_tokens += usage["prompt_tokens"]
                    outcome.completion_tokens += usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    outcome.cached_tokens += details.get("cached_tokens") or 0
                if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    now = time.perf_counter()
                    text += chunk["choices"][0]["delta"]["content"]
                    if last:
                        outcome.gaps.append(now - last)
                    else:
                        outcome.first_token.append(now - began)
                    last = now
        outcome.texts.append(text)
