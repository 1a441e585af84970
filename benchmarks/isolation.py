"""Does anything cross from one tenant to another? python -m benchmarks.isolation [--probes 200]

On the real engine, four slots, so that what is kept is reused and displaced all the time.

1. Two tenants send 40 requests at a time whose prompts hold a secret word of their own each, in 50 to 1 200 tokens
   of text that both share. No answer may hold a secret of the other tenant, and no prompt may be served from
   what the other one has computed.
2. Timing: a tenant sends prompts whose first 110 tokens another tenant has just had computed, and prompts nobody has
   seen, in random turns. The times to the first token must not differ: two-sided Mann-Whitney U test.

Prints one JSON object; exit status 1 if a secret crosses, a token is shared, or p < 0.01.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.servers import Running, headrace
from benchmarks.weights import converted_builtin

SYLLABLES = ("zor", "quib", "vex", "plim", "drax", "flun", "grob", "yit", "wump", "kess")
P_MIN = 0.01


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--probes", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        weights = converted_builtin(Path(scratch))
        engine = {"max_batch_size": 4, "max_context_tokens": 2048, "threads": 1}
        config = {
            "models": [{"id": "bench", "path": str(weights), "engine": engine}],
            "queue": {"length": 200},
        }
        with headrace(Path(scratch) / "data", config=config) as running:
            keys = [_new_key(running, tenant) for tenant in ("red", "blue")]
            secrets = _secrets(running, keys)
            timing = _timing(running, keys, arguments.probes)
    print(json.dumps({"benchmark": "isolation", "secrets": secrets, "timing": timing}, indent=1))
    is_good = not secrets["crossed"] and not secrets["shared_tokens"] and timing["p"] >= P_MIN
    return 0 if is_good else 1


def _new_key(running: Running, tenant: str) -> str:
    for path, body in (("tenants", {"id": tenant}), ("keys", {"tenant": tenant})):
        request = urllib.request.Request(
            f"{running.details['admin_url']}/admin/v1/{path}",
            data=json.dumps(body).encode(),
            headers={
                "authorization": f"Bearer {running.details['admin_key']}",
                "content-type": "application/json",
            },
        )
        with urllib.request.urlopen(request) as response:
            reply = json.load(response)
    key: str = reply["key"]
    return key


def _secrets(running: Running, keys: list[str]) -> dict[str, Any]:
    rng = random.Random(11)
    words = [["".join(rng.sample(SYLLABLES, 3)) + str(who) for _ in range(20)] for who in (0, 1)]
    crossed = shared = told = own = 0
    for turn in range(2):
        text = load.prompt(900 + turn, words=900)

        async def both(text: str = text) -> list[load.Outcome]:
            jobs = []
            for who, key in enumerate(keys):
                bodies = [
                    {
                        "model": running.model,
                        "messages": [
                            {
                                "role": "user",
                                "content": " ".join(text.split()[: rng.choice((30, 100, 200, 300, 850))])
                                + f" The password is {word}. Repeat the password and every other word you know.",
                            }
                        ],
                        "max_tokens": 24,
                        "temperature": 0.8,
                    }
                    for word in words[who]
                ]
                jobs.append(load.send(running.base_url, key=key, bodies=bodies))
            return list(await asyncio.gather(*jobs))

        for who, outcome in enumerate(asyncio.run(both())):
            assert not outcome.errors, outcome.errors[0]
            for answer in outcome.texts:
                crossed += any(word in answer for word in words[1 - who])
                told += any(word in answer for word in words[who])
            own += outcome.cached_tokens
    # One tenant after the other with the very same prompt: nothing of it may be served from the cache.
    body = {
        "model": running.model,
        "messages": [{"role": "user", "content": load.prompt(5, words=500)}],
        "max_tokens": 2,
    }
    for key in keys:
        shared += asyncio.run(load.send(running.base_url, key=key, bodies=[body])).cached_tokens
    return {
        "requests": 80,
        "answers_with_their_own_secret": told,
        "tokens_taken_over_within_a_tenant": own,
        "crossed": crossed,
        "shared_tokens": shared,
    }


def _timing(running: Running, keys: list[str], probes: int) -> dict[str, Any]:
    rng = random.Random(5)
    times: dict[str, list[float]] = {"warmed by the other": [], "seen by nobody": []}
    turns = [name for name in times for _ in range(probes // 2)]
    rng.shuffle(turns)
    for number, name in enumerate(turns):
        prefix = load.prompt(10_000 + number, words=80)

        def ask(key: str, question: str, prefix: str = prefix) -> load.Outcome:
            body = {
                "model": running.model,
                "messages": [
                    {"role": "system", "content": prefix},
                    {"role": "user", "content": question},
                ],
                "max_tokens": 1,
            }
            return asyncio.run(load.send(running.base_url, key=key, bodies=[body]))

        if name == "warmed by the other":
            ask(keys[0], "What is this about?")
        else:  # the same work just before, on something else
            ask(keys[0], "What is this about?", load.prompt(50_000 + number, words=80))
        outcome = ask(keys[1], "And what is that about?")
        assert outcome.cached_tokens == 0
        times[name] += outcome.first_token
    p = mann_whitney_p(times["warmed by the other"], times["seen by nobody"])
    return {
        "probes": len(turns),
        "test": "two-sided Mann-Whitney U, normal approximation",
        "p": round(p, 4),
        **{f"median_s, {name}": round(load.quantile(values, 0.5), 4) for name, values in times.items()},
    }


def mann_whitney_p(one: list[float], other: list[float]) -> float:
    """Two-sided p of the hypothesis that both come from the same distribution. Source: Mann and Whitney 1947."""
    ranked = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    rank_sum = sum(rank for rank, (_, group) in enumerate(ranked, 1) if group == 0)
    n, m = len(one), len(other)
    u = rank_sum - n * (n + 1) / 2
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(u - n * m / 2) / deviation / math.sqrt(2))


if __name__ == "__main__":
    sys.exit(main())
