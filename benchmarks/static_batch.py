"""Static batching: what the wait window and alpha do to throughput and waits, on the stub and on the real engine.

    python -m benchmarks.static_batch [--rounds 1] [--threads N] [--stub-only]

Two loads, each on a fresh engine loop. *Bursts*: a few requests within 15 ms, then a pause longer than they take; the
window decides whether the first of them runs alone while the others wait. *Backlog*: all at once, with longest answers
far above what is used; alpha decides how many share a batch. Continuous batching on the same loads is the yardstick.
Rounds take turns over the settings; the median of each figure counts. Under two minutes. Prints one JSON object.
"""

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from headrace.caching.slots import CacheOrder
from headrace.clock import SystemClock
from headrace.config.settings import EngineSettings, StubTiming
from headrace.engine.builtin import builtin_model_path
from headrace.engine.loading import load_engine
from headrace.engine.protocol import Engine
from headrace.request.sampling import Sampling
from headrace.scheduling.steps import StepLimits
from headrace.worker.gate import gate_for
from headrace.worker.loop import EngineLoop, LoopNews
from headrace.worker.messages import AttemptRecord
from headrace.worker.progress import ProgressFile
from headrace.worker.sequence import Sequence
from headrace.worker.stats import StepStats

WINDOWS_MS = (0.0, 5.0, 20.0, 100.0)
ALPHAS = (0.3, 0.5, 1.0)
BURST_SPREAD_S = 0.015
SECONDS_MAX = 100.0
"""A load that takes longer is given up."""
ENGINE = EngineSettings(
    max_batch_size=16,
    max_context_tokens=512,
    max_batch_tokens=1024,
    prefix_cache=False,
    stub=StubTiming(output_tokens=20),
)
WORDS = (
    "river",
    "gate",
    "meter",
    "stone",
    "mill",
    "wheel",
    "bridge",
    "lock",
    "spring",
    "lake",
    "rain",
    "water",
)


@dataclass
class Load:
    """When requests come, and how large they are."""

    name: str
    at_s: list[float]
    prompt_words: int
    max_tokens: int


@dataclass
class Measured:
    """One load under one setting."""

    seconds: float
    compute_s: float
    records: list[AttemptRecord]
    flushed: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        waits = sorted(record.queued_us / 1000 for record in self.records)
        whole = sorted(
            (record.queued_us + record.prefill_us + record.decode_us) / 1000 for record in self.records
        )
        tokens = sum(record.completion_tokens for record in self.records)
        batches = sum(self.flushed.values())
        return {
            "new_tokens_per_s": round(tokens / self.seconds, 1),
            "new_tokens_per_compute_s": round(tokens / self.compute_s, 1),
            "wait_ms_p50": round(_quantile(waits, 0.5), 1),
            "wait_ms_p95": round(_quantile(waits, 0.95), 1),
            "answer_ms_p50": round(_quantile(whole, 0.5), 1),
            "answer_ms_p95": round(_quantile(whole, 0.95), 1),
            "requests_per_batch": round(len(self.records) / batches, 1) if batches else 0.0,
            "flushed": self.flushed,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--stub-only", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = {"stub": _measure_all("stub", ENGINE, None, STUB_LOADS, Path(scratch), arguments.rounds)}
        if not arguments.stub_only:
            real = msgspec.structs.replace(ENGINE, stub=None, threads=arguments.threads)
            model = str(builtin_model_path())
            report["real"] = _measure_all("real", real, model, REAL_LOADS, Path(scratch), arguments.rounds)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(
        json.dumps(
            {
                "benchmark": "static_batch",
                "machine": machine,
                "threads": arguments.threads,
                "rounds": arguments.rounds,
                "max_batch_tokens": ENGINE.max_batch_tokens,
                "max_batch_size": ENGINE.max_batch_size,
                **report,
            },
            indent=1,
        )
    )


def _bursts(number: int, size: int, every_s: float, *, prompt_words: int, max_tokens: int) -> Load:
    rng = random.Random(7)
    at_s = sorted(
        burst * every_s + rng.uniform(0, BURST_SPREAD_S) for burst in range(number) for _ in range(size)
    )
    return Load("bursts", at_s, prompt_words, max_tokens)


STUB_LOADS = (
    _bursts(6, 6, 0.4, prompt_words=40, max_tokens=24),
    Load("backlog", [0.0] * 96, 40, 200),
)
REAL_LOADS = (
    _bursts(4, 4, 1.2, prompt_words=20, max_tokens=12),
    Load("backlog", [0.0] * 32, 20, 100),
)


def _measure_all(
    name: str,
    settings: EngineSettings,
    model: str | None,
    loads: tuple[Load, ...],
    scratch: Path,
    rounds: int,
) -> dict[str, Any]:
    engine = load_engine(model, settings, cache=scratch)
    samples: dict[str, dict[str, list[Measured]]] = {load.name: {} for load in loads}
    try:
        _measure(engine, settings, Load("warm-up", [0.0] * 4, 20, 4), scratch)
        for _ in range(rounds):
            for load in loads:
                for title, variant in _variants(settings, load.name):
                    measured = _measure(engine, variant, load, scratch)
                    _say(
                        f"{name:5} {load.name:8} {title:22} {measured.figures()['new_tokens_per_s']} tokens/s"
                    )
                    samples[load.name].setdefault(title, []).append(measured)
    finally:
        engine.shutdown()
    return {
        load_name: {title: _median(measured) for title, measured in by_title.items()}
        for load_name, by_title in samples.items()
    }


def _variants(settings: EngineSettings, load: str) -> list[tuple[str, EngineSettings]]:
    replace = msgspec.structs.replace
    found = [("continuous", settings)]
    if load == "bursts":
        for window_ms in WINDOWS_MS:
            static = replace(settings, batching="static", batch_wait_ms=window_ms)
            found.append((f"static, {window_ms:g} ms", static))
    else:
        for alpha in ALPHAS:
            static = replace(settings, batching="static", batch_wait_ms=5.0, batch_cost_alpha=alpha)
            found.append((f"static, alpha {alpha:g}", static))
    return found


def _measure(engine: Engine, settings: EngineSettings, load: Load, scratch: Path) -> Measured:
    """Run a load to its end on the loop's own thread, as in a worker."""
    clock = SystemClock()
    registry = CollectorRegistry()
    stats = StepStats(registry, kv_bytes_per_token=engine.info.kv_bytes_per_token)
    path = scratch / "progress"
    path.unlink(missing_ok=True)
    progress = ProgressFile(path)
    records: list[AttemptRecord] = []
    is_done = threading.Event()

    def on_news(news: LoopNews) -> None:
        records.extend(record for _, record in news.records)
        if len(records) == len(load.at_s):
            is_done.set()

    loop = EngineLoop(
        engine,
        limits=StepLimits(
            batch_tokens_max=settings.max_batch_tokens,
            target_step_ms=settings.target_step_ms,
            idle_step_ms=settings.idle_step_ms,
        ),
        clock=clock,
        progress=progress,
        on_news=on_news,
        stats=stats,
        gate=gate_for(settings, stats),
    )
    thread = threading.Thread(target=loop.run, name="engine")
    sequences = [_sequence(engine, number, load) for number in range(len(load.at_s))]
    thread.start()
    began = time.perf_counter()
    try:
        for one, at_s in zip(sequences, load.at_s, strict=True):
            time.sleep(max(0.0, began + at_s - time.perf_counter()))
            one.arrived_us = clock.monotonic_us()
            loop.submit(one)
        if not is_done.wait(SECONDS_MAX):
            raise RuntimeError(f"{load.name}: {len(records)} of {len(load.at_s)} after {SECONDS_MAX:g} s")
        seconds = time.perf_counter() - began
    finally:
        loop.stop()
        thread.join()
        progress.close()
    failed = [record.error for record in records if record.finish_reason not in ("stop", "length")]
    if failed:
        raise RuntimeError(f"{load.name}: {failed[0]}")
    compute_s = registry.get_sample_value("headrace_worker_compute_seconds_total") or 0.0
    return Measured(seconds, compute_s, records, _flushed(registry))


def _sequence(engine: Engine, number: int, load: Load) -> Sequence:
    rng = random.Random(number)
    text = " ".join(rng.choice(WORDS) for _ in range(load.prompt_words)) + ". Tell me more. The"
    return Sequence(
        attempt_id=f"a{number}",
        tenant_id="t",
        connection_id=0,
        prompt=engine.vocabulary.tokenize(text, is_special_parsed=False, is_start=True),
        max_tokens=load.max_tokens,
        sampling=Sampling(temperature=0.0, seed=number),
        stop=["."],  # the real model's answers end with a sentence, the stub's by its settings
        arrived_us=0,
        order=CacheOrder(mode="off"),
    )


def _flushed(registry: CollectorRegistry) -> dict[str, int]:
    name = "headrace_worker_batches_flushed_total"
    counts = {
        reason: int(registry.get_sample_value(name, {"reason": reason}) or 0)
        for reason in ("full", "does_not_fit", "window")
    }
    return {reason: count for reason, count in counts.items() if count}


def _median(measured: list[Measured]) -> dict[str, Any]:
    figures = [one.figures() for one in measured]
    return {
        name: value if name == "flushed" else median(one[name] for one in figures)
        for name, value in figures[0].items()
    }


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
