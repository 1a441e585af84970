"""Does an answer depend on what else runs or is cached? python -m benchmarks.reproducible [--prompts 32] [--tokens 48]

The real engine under the worker's own loop, in this process. Each prompt's greedy answer alone, with an empty
cache, is the reference. Then the same prompts: all at once; all at once again with everything cached; in another
order with short noise between them; each preempted in the middle of its answer, half of them twice, and resumed some
steps later; with so few KV cells that some are preempted for want of them; with so few slots that what is kept is
parked in files and restored; and after a new life of the worker found the parked files. Each answer is compared token
by token, in reproducible mode and in the default mode. Prints one JSON object; exit status 1 if an answer differs in
reproducible mode.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from benchmarks.weights import add_library, converted_builtin
from headrace.caching.slots import CacheOrder
from headrace.clock import SystemClock
from headrace.config.settings import EngineLibrary
from headrace.engine.llama import LlamaEngine, LlamaSettings
from headrace.request.sampling import Sampling
from headrace.scheduling.memory import GROWTH_TOKENS
from headrace.scheduling.steps import StepLimits
from headrace.worker.loop import EngineLoop
from headrace.worker.parking import Parking
from headrace.worker.process import REPRODUCIBLE_CHUNK_TOKENS
from headrace.worker.progress import ProgressFile
from headrace.worker.sequence import Sequence
from headrace.worker.slots import EngineSlots
from headrace.worker.stats import StepStats

CONTEXT = 1024
SLOTS = 32
FEW_SLOTS = 4
PAUSE_STEPS = 5
WORDS = [
    "water",
    "river",
    "gate",
    "meter",
    "flow",
    "stone",
    "mill",
    "wheel",
    "bridge",
    "lock",
    "spring",
    "channel",
    "lake",
    "rain",
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "was",
    "he",
    "for",
    "it",
    "with",
    "as",
    "his",
    "on",
    "be",
    "at",
    "by",
    "had",
    "not",
    "are",
    "but",
    "from",
    "or",
    "have",
    "an",
    "they",
    "which",
    "one",
    "you",
    "were",
    "all",
    "her",
    "she",
]


class Weights(NamedTuple):
    path: Path
    library: EngineLibrary


class Bench:
    """An engine with its loop; `run` takes prompts to their ends and returns the tokens of each answer."""

    def __init__(self, engine: LlamaEngine, directory: Path, *, is_reproducible: bool) -> None:
        self._engine = engine
        self._directory = directory
        self._is_reproducible = is_reproducible
        self._number = 0
        self.cached = self.prompt = 0
        self.preempted: list[int] = []
        """Of the last run, how often each was preempted."""
        self.seconds = 0.0
        self._steps = 0
        self._paused: dict[str, int] = {}
        """Preempted attempts, and the step in which they are to be resumed."""
        self.parking: Parking | None = None
        self.new_life()

    def new_life(self) -> None:
        for slot in range(self._engine.info.sequences):
            self._engine.close(slot)
        self._number += 1
        self._directory.mkdir(exist_ok=True)
        clock = SystemClock()
        stats = StepStats(CollectorRegistry(), kv_bytes_per_token=self._engine.info.kv_bytes_per_token)
        chunk = REPRODUCIBLE_CHUNK_TOKENS if self._is_reproducible else None
        self.parking = Parking(
            self._directory / "kv", state_key=self._engine.info.state_key, bytes_max=2_000_000_000
        )
        self.slots = EngineSlots(
            self._engine, clock=clock, stats=stats, parking=self.parking, grain=chunk or 1
        )
        self._loop = EngineLoop(
            self._engine,
            limits=StepLimits(batch_tokens_max=512, target_step_ms=500, idle_step_ms=500),
            clock=clock,
            progress=ProgressFile(self._directory / f"progress{self._number}"),
            on_news=lambda news: None,
            stats=stats,
            slots=self.slots,
            chunk_tokens=chunk,
        )

    def run(
        self,
        prompts: list[list[int]],
        tokens: int,
        *,
        order: CacheOrder,
        tenants: Callable[[int], str],
        preempt_at: list[list[int]] | None = None,
    ) -> list[list[int]]:
        """`preempt_at`: for each prompt, after how many tokens of its answer it is preempted."""
        sequences = []
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self._number += 1
            one = Sequence(
                attempt_id=f"a{self._number}",
                tenant_id=tenants(number),
                connection_id=0,
                prompt=prompt,
                max_tokens=tokens,
                sampling=Sampling(temperature=0),
                stop=[],
                arrived_us=0,
                order=order,
            )
            sequences.append(one)
            self._loop.submit(one)
        stops = {one.attempt_id: list(at) for one, at in zip(sequences, preempt_at or [], strict=False)}
        while self._loop.num_running or self._loop.num_waiting or self._loop.num_suspended:
            self._preempt_and_resume(sequences, stops)
            self._loop.step()
        self.seconds = time.perf_counter() - began
        self.cached = sum(one.cached for one in sequences)
        self.prompt = sum(len(prompt) for prompt in prompts)
        self.preempted = [one.preemptions for one in sequences]
        return [one.tokens for one in sequences]

    def _preempt_and_resume(self, sequences: list[Sequence], stops: dict[str, list[int]]) -> None:
        """Preempt whoever is as far as it should be; whoever is preempted goes on once `PAUSE_STEPS` steps are over."""
        for one in sequences:
            attempt_id = one.attempt_id
            paused = self._paused.get(attempt_id)
            if paused is not None and self._steps >= paused:
                del self._paused[attempt_id]
                self._loop.resume(attempt_id)
            at = stops.get(attempt_id)
            if at and paused is None and one.generated >= at[0]:
                at.pop(0)
                self._paused[attempt_id] = self._steps + PAUSE_STEPS
                self._loop.preempt(attempt_id)
        self._steps += 1


def make_prompts(engine: LlamaEngine, num: int) -> list[list[int]]:
    """Of 10 to 700 tokens; half of them share a beginning of 300."""
    rng = random.Random(7)

    def text(words: int) -> list[int]:
        sentence = " ".join(rng.choice(WORDS) for _ in range(words))
        return engine.vocabulary.tokenize(sentence, is_special_parsed=False, is_start=True)

    shared = text(300)[:300]
    lengths = [rng.randrange(10, 400) for _ in range(num)]
    return [(shared if at % 2 else []) + text(length)[:length] for at, length in enumerate(lengths)]


def compare(weights: Weights, num: int, tokens: int, *, is_reproducible: bool) -> dict[str, Any]:
    full, off = CacheOrder(), CacheOrder(mode="off")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        engine = load(weights, SLOTS)
        bench = Bench(engine, Path(scratch), is_reproducible=is_reproducible)
        prompts = make_prompts(engine, num)

        def alone(prompt: list[int]) -> list[int]:
            return bench.run([prompt], tokens, order=off, tenants=lambda number: "t")[0]

        reference = [alone(prompt) for prompt in prompts]

        def note(name: str, answers: list[list[int]], order: list[int] | None = None) -> None:
            order = order or list(range(num))
            differ = [at for at, answer in zip(order, answers, strict=True) if answer != reference[at]]
            results[name] = {
                "same": num - len(differ),
                "of": num,
                "cached_share": round(bench.cached / bench.prompt, 3),
                "seconds": round(bench.seconds, 2),
            }

        note("all at once, cold", bench.run(prompts, tokens, order=off, tenants=str))
        note("all at once, sharing", bench.run(prompts, tokens, order=full, tenants=lambda _: "t"))
        note("again, all cached", bench.run(prompts, tokens, order=full, tenants=lambda _: "t"))
        shuffled = list(range(num))
        random.Random(3).shuffle(shuffled)
        mixed = [prompts[at] for at in shuffled] + [prompt[:20] for prompt in prompts]
        answers = bench.run(mixed, tokens, order=full, tenants=lambda _: "t")[:num]
        note("other order, with noise", answers, shuffled)
        # Half of them twice.
        halves = [
            [len(answer) // 2, len(answer) * 3 // 4][: 1 + at % 2] for at, answer in enumerate(reference)
        ]
        for name, cache in (("preempted", full), ("preempted, nothing kept", off)):
            answers = bench.run(prompts, tokens, order=cache, tenants=lambda _: "t", preempt_at=halves)
            note(name, answers)
            results[name]["preempted"] = sum(times > 0 for times in bench.preempted)
        engine.shutdown()
        engine = load(weights, SLOTS, kv_tokens=few_cells(prompts, tokens))
        bench = Bench(engine, Path(scratch) / "cells", is_reproducible=is_reproducible)
        note("few cells", bench.run(prompts, tokens, order=off, tenants=lambda number: str(number % 3)))
        results["few cells"]["preempted_for_memory"] = sum(times > 0 for times in bench.preempted)
        engine.shutdown()
        engine = load(weights, FEW_SLOTS)
        bench = Bench(engine, Path(scratch) / "few", is_reproducible=is_reproducible)
        for name in ("few slots, parking", "few slots, restoring"):
            note(name, bench.run(prompts, tokens, order=full, tenants=lambda _: "t"))
        bench.slots.park_all()
        bench.new_life()
        note("after a restart", bench.run(prompts, tokens, order=full, tenants=lambda _: "t"))
        engine.shutdown()
    return results


def few_cells(prompts: list[list[int]], tokens: int) -> int:
    """Half of them begin together, and have room for half of their answers."""
    begin = prompts[: (len(prompts) + 1) // 2]
    least = max(map(len, prompts)) + tokens
    return max(least, sum(map(len, begin)) + len(begin) * max(tokens // 2, GROWTH_TOKENS + 1))


def load(weights: Weights, slots: int, *, kv_tokens: int | None = None) -> LlamaEngine:
    return LlamaEngine.load(
        LlamaSettings(
            model_path=weights.path,
            library=weights.library,
            sequences=slots,
            context_tokens=CONTEXT,
            batch_tokens=512,
            threads=1,
            kv_tokens=kv_tokens,
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--mode", choices=("reproducible", "default"), help="only this one")
    add_library(parser)
    arguments = parser.parse_args()
    kept = Path(tempfile.gettempdir()) / "headrace-weights"
    weights = Weights(converted_builtin(kept), arguments.library)
    results = {
        mode: compare(weights, arguments.prompts, arguments.tokens, is_reproducible=mode == "reproducible")
        for mode in ("reproducible", "default")
        if arguments.mode in (None, mode)
    }
    print(json.dumps({"benchmark": "reproducible", "chunk": REPRODUCIBLE_CHUNK_TOKENS, **results}, indent=1))
    is_proven = all(
        one["same"] == one.get("preempted", one["of"]) == one["of"] and one.get("preempted_for_memory", 1)
        for one in results.get("reproducible", {}).values()
    )
    return 0 if is_proven else 1


if __name__ == "__main__":
    sys.exit(main())
