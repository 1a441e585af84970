"""Random work against a cache far too small: nothing crashes, every answer is right, all memory comes back.

Lengths, aborts, conversations, evictions, preemptions by the owner and for want of cells, restarts of the worker. The stub's
answer follows from every token a slot holds, so one token of another's shows in the answer; its pool of cells takes nothing
once it is full. After every step the books of cells are compared with the engine's.
Ten thousand operations: `make soak`.
"""

import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from headrace.caching.slots import CacheOrder
from headrace.clock import SystemClock
from headrace.config.settings import EngineSettings, StubTiming
from headrace.engine.protocol import Span
from headrace.engine.stub import StubEngine
from headrace.request.sampling import Sampling
from headrace.scheduling.steps import StepLimits
from headrace.worker.loop import EngineLoop, LoopNews
from headrace.worker.messages import AttemptRecord
from headrace.worker.parking import Parking
from headrace.worker.progress import ProgressFile
from headrace.worker.sequence import Sequence
from headrace.worker.slots import EngineSlots
from headrace.worker.stats import StepStats

OPERATIONS = int(os.environ.get("HEADRACE_TEST_SOAK_OPERATIONS", "1500"))
SEED = int(os.environ.get("HEADRACE_TEST_SOAK_SEED", "0"))
SLOTS, CONTEXT = 5, 400
KV_TOKENS = 420
STATE_BYTES_PER_TOKEN = 8
SETTINGS = EngineSettings(
    max_batch_size=SLOTS,
    max_context_tokens=CONTEXT,
    max_batch_tokens=160,
    stub=StubTiming(output_tokens=90, fault_every_steps=0),
)


class LeapingClock(SystemClock):
    """Runs ahead when told to."""

    ahead_us = 0

    def monotonic_us(self) -> int:
        return super().monotonic_us() + self.ahead_us

    def wall_us(self) -> int:
        return super().wall_us() + self.ahead_us


class Soak:
    def __init__(
        self, folder: Path, seed: int, *, chunk: int | None, engine: dict[str, Any] | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.settings = msgspec.structs.replace(SETTINGS, **(engine or {}))
        self.suspended: set[str] = set()
        self.registries: list[CollectorRegistry] = []
        self.folder = folder
        self.chunk = chunk
        self.clock = LeapingClock()
        self.records: dict[str, AttemptRecord] = {}
        self.sequences: dict[str, Sequence] = {}
        self.number = 0
        self.lives = 0
        self.texts = {
            name: [self.rng.randrange(250) for _ in range(CONTEXT)] for name in ("a", "b", "t1", "t2", "t3")
        }
        self.start()

    def start(self) -> None:
        """A life of the worker. What the one before has parked is found."""
        self.lives += 1
        self.engine = StubEngine(self.settings, sleep=lambda seconds: None)
        # As large as its states are, or none would fit into the few bytes there are for them.
        self.engine.info = msgspec.structs.replace(self.engine.info, kv_bytes_per_token=STATE_BYTES_PER_TOKEN)
        self.registries.append(CollectorRegistry())
        stats = StepStats(self.registries[-1], kv_bytes_per_token=STATE_BYTES_PER_TOKEN)
        parking = Parking(self.folder / "kv", state_key="stub", bytes_max=12_000)
        self.slots = EngineSlots(
            self.engine, clock=self.clock, stats=stats, parking=parking, grain=self.chunk or 1
        )
        self.parking = parking
        self.loop = EngineLoop(
            self.engine,
            limits=StepLimits(batch_tokens_max=160, target_step_ms=50, idle_step_ms=50),
            clock=self.clock,
            progress=ProgressFile(self.folder / f"p{self.lives}"),
            on_news=self.hear,
            stats=stats,
            slots=self.slots,
            chunk_tokens=self.chunk,
            debug=True,
        )

    def hear(self, news: LoopNews) -> None:
        for _, record in news.records:
            assert record.attempt_id not in self.records, "one record each"
            self.suspended.discard(record.attempt_id)
            self.records[record.attempt_id] = record

    def submit(self) -> None:
        rng = self.rng
        tenant = rng.choice(("t1", "t2", "t3"))
        prompt = (
            self.texts[rng.choice("ab")][: rng.choice((0, 5, 40, 64, 130, 200))]
            + self.texts[tenant][: rng.randrange(1, 120)]
        )
        self.number += 1
        sequence = Sequence(
            attempt_id=f"a{self.number}",
            tenant_id=tenant,
            connection_id=0,
            prompt=prompt,
            max_tokens=rng.choice((1, 3, 30, 80)),
            sampling=Sampling(seed=rng.randrange(3)),
            stop=[],
            arrived_us=0,
            cacheable=rng.choice((0, 64, 130)),
            order=CacheOrder(
                mode=rng.choice(("full", "full", "full", "prefix_only", "off")),
                group=rng.choice((None, "g")),
                session=rng.choice((None, None, f"{tenant}/s/1", f"{tenant}/s/2")),
                ttl_s=rng.choice((5.0, 60.0)),
            ),
        )
        self.sequences[sequence.attempt_id] = sequence
        self.loop.submit(sequence)

    def operate(self) -> None:
        match self.rng.randrange(21):
            case 0 | 1 | 2 | 3 | 4 | 5:
                self.submit()
            case 6:
                open_ids = [one for one in self.sequences if one not in self.records]
                if open_ids:
                    self.loop.abort(self.rng.choice(open_ids))
            case 7:
                self.loop.end_session(f"t{self.rng.randrange(1, 4)}/s/1")
            case 8:
                self.clock.ahead_us += self.rng.choice((1, 4, 70)) * 1_000_000
            case 9 if self.rng.random() < 0.1:
                self.restart()
            case 10:
                self.preempt_or_resume()
            case _:
                self.loop.step()

    def preempt_or_resume(self) -> None:
        """As the owner."""
        open_ids = [one for one in self.sequences if one not in self.records]
        if self.suspended and self.rng.random() < 0.6:
            attempt_id = self.rng.choice(sorted(self.suspended))
            self.suspended.remove(attempt_id)
            self.loop.resume(attempt_id)
        elif open_ids:
            attempt_id = self.rng.choice(open_ids)
            self.suspended.add(attempt_id)
            self.loop.preempt(attempt_id)

    def total(self, name: str, **labels: str) -> float:
        """Of all lives of the worker."""
        return sum(one.get_sample_value(name, labels) or 0 for one in self.registries)

    def restart(self) -> None:
        """In order, or killed."""
        self.finish()
        if self.rng.random() < 0.5:
            self.slots.park_all()
        self.start()

    def finish(self) -> None:
        for attempt_id in self.suspended:
            self.loop.resume(attempt_id)
        self.suspended.clear()
        while self.loop.num_running or self.loop.num_waiting:
            self.loop.step()

    def check(self) -> None:
        roomy = msgspec.structs.replace(self.settings, max_batch_tokens=CONTEXT, kv_tokens=None)
        reference = StubEngine(roomy, sleep=lambda seconds: None)
        known: dict[tuple[object, ...], list[int]] = {}
        for attempt_id, one in self.sequences.items():
            record = self.records[attempt_id]
            key = (tuple(one.prompt), one.max_tokens, one.sampling.seed)
            if key not in known:
                known[key] = answer(reference, one)
            assert one.tokens == known[key][: len(one.tokens)], f"{attempt_id} has a wrong answer"
            if record.finish_reason in ("stop", "length"):
                assert one.tokens == known[key]
            assert record.prompt_tokens_cached <= max(0, record.prompt_tokens - 1)
            assert record.prompt_tokens_cached % (self.chunk or 1) == 0


def answer(engine: StubEngine, one: Sequence) -> list[int]:
    """Alone, and with nothing cached."""
    engine.open(0, one.sampling)
    tokens = []
    span = Span(0, 0, one.prompt, True)
    while True:
        (token,) = engine.forward([span]).tokens
        tokens.append(token)
        if engine.vocabulary.is_end(token) or len(tokens) >= one.max_tokens:
            engine.close(0)
            return tokens
        span = Span(0, len(one.prompt) + len(tokens) - 1, [token], True)


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("layout", ["per_sequence", "unified"])
@pytest.mark.parametrize("kv_tokens", [None, KV_TOKENS])
def test_a_cache_far_too_small(tmp_path: Path, layout: str, kv_tokens: int | None, chunk: int | None) -> None:
    soak = Soak(tmp_path, SEED, chunk=chunk, engine={"kv_layout": layout, "kv_tokens": kv_tokens})
    for _ in range(OPERATIONS):
        soak.operate()
        assert soak.parking.bytes_used <= soak.parking.bytes_max
    soak.finish()
    soak.check()
    assert soak.records.keys() == soak.sequences.keys()
    cached = sum(record.prompt_tokens_cached for record in soak.records.values())
    assert cached > 1000, "a cache that is never hit proves nothing"
    assert soak.total("headrace_worker_placements_total", source="restore") > OPERATIONS / 500
    for reason in ("queue", "memory") if kv_tokens else ("queue",):
        assert soak.total("headrace_worker_preemptions_total", reason=reason) > OPERATIONS / 500
    if not kv_tokens:
        assert soak.total("headrace_worker_preemptions_total", reason="memory") == 0
    soak.clock.ahead_us += 10**9
    soak.slots.book.expire(soak.clock.monotonic_us())
    soak.slots._clean()
    soak.loop.step()
    assert (soak.engine.cells_used(), soak.slots.cells.used, soak.slots.cells.used_running) == (0, 0, 0)
    assert not list(soak.slots.book.holdings), "all memory comes back"
    assert not list((tmp_path / "kv").iterdir()), "and all files"
