"""Random work against a cache far too small: lengths, aborts, conversations, evictions, preemptions by the owner and for
want of cells, restarts of the worker. After every step the books of cells are compared with the engine's.
"""

import random
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace.caching.slots import CacheOrder
from headrace.clock import SystemClock
from headrace.engine.protocol import Engine, Span
from headrace.request.sampling import Sampling
from headrace.scheduling.steps import StepLimits
from headrace.worker.loop import EngineLoop, LoopNews
from headrace.worker.messages import AttemptRecord
from headrace.worker.parking import Parking
from headrace.worker.progress import ProgressFile
from headrace.worker.sequence import Sequence
from headrace.worker.slots import EngineSlots
from headrace.worker.stats import StepStats

SLOTS, CONTEXT, BATCH_TOKENS = 5, 400, 160
KV_TOKENS = 420


class LeapingClock(SystemClock):
    """Runs ahead when told to."""

    ahead_us = 0

    def monotonic_us(self) -> int:
        return super().monotonic_us() + self.ahead_us

    def wall_us(self) -> int:
        return super().wall_us() + self.ahead_us


class Soak:
    """`make_engine` is called for each life of the worker; it gives an engine whose slots hold nothing."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        chunk: int | None,
        make_engine: Callable[[], Engine],
        answer_tokens: tuple[int, ...] = (1, 3, 30, 80),
        parking_tokens: int = 1500,
        steps: int = 1,
    ) -> None:
        """`answer_tokens`: the longest answers to choose from. `parking_tokens`: room for so many outside. `steps`: at most so
        many of the engine between two other operations.
        """
        self.steps = steps
        self.rng = random.Random(seed)
        self.make_engine = make_engine
        self.answer_tokens = answer_tokens
        self.parking_tokens = parking_tokens
        self.suspended: set[str] = set()
        self.registries: list[CollectorRegistry] = []
        self.folder = folder
        self.chunk = chunk
        self.clock = LeapingClock()
        self.records: dict[str, AttemptRecord] = {}
        self.sequences: dict[str, Sequence] = {}
        self.number = 0
        self.lives = 0
        self.start()
        words = (1000, 20_000) if self.engine.info.vocabulary > 20_000 else (0, 250)
        self.texts = {
            name: [self.rng.randrange(*words) for _ in range(CONTEXT)]
            for name in ("a", "b", "t1", "t2", "t3")
        }

    def start(self) -> None:
        """A life of the worker. What the one before has parked is found."""
        self.lives += 1
        self.engine = self.make_engine()
        self.registries.append(CollectorRegistry())
        bytes_per_token = self.engine.info.kv_bytes_per_token
        stats = StepStats(self.registries[-1], kv_bytes_per_token=bytes_per_token)
        parking = Parking(
            self.folder / "kv",
            state_key=self.engine.info.state_key,
            bytes_max=self.parking_tokens * bytes_per_token,
        )
        self.slots = EngineSlots(
            self.engine, clock=self.clock, stats=stats, parking=parking, grain=self.chunk or 1
        )
        self.parking = parking
        self.loop = EngineLoop(
            self.engine,
            limits=StepLimits(batch_tokens_max=BATCH_TOKENS, target_step_ms=1e4, idle_step_ms=1e4),
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
            max_tokens=rng.choice(self.answer_tokens),
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
                for _ in range(self.rng.randrange(self.steps) + 1):
                    self.loop.step()

    def preempt_or_resume(self) -> None:
        """As the owner."""
        open_ids = [one for one in self.sequences if one not in self.records]
        if self.suspended and self.rng.random() < 0.6:
            attempt_id = self.rng.choice(sorted(self.suspended))
            self.suspended.remove(attempt_id)
            self.loop.resume(attempt_id)
        elif open_ids:
            running = [one.attempt_id for one in self.loop._running()]
            attempt_id = self.rng.choice(running if running and self.rng.random() < 0.8 else open_ids)
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
        self.parking.close()
        self.start()

    def finish(self) -> None:
        for attempt_id in self.suspended:
            self.loop.resume(attempt_id)
        self.suspended.clear()
        while self.loop.num_running or self.loop.num_waiting:
            self.loop.step()

    def run(self, operations: int) -> None:
        """So many random operations, then all to their ends; asserts what has to hold whatever happened."""
        for _ in range(operations):
            self.operate()
            assert self.parking.bytes_used <= self.parking.bytes_max
        self.finish()
        assert self.records.keys() == self.sequences.keys(), "each has its record"
        self.clock.ahead_us += 10**9
        self.slots.book.expire(self.clock.monotonic_us())
        self.slots._clean()
        self.loop.step()
        cells = self.slots.cells
        assert (self.engine.cells_used(), cells.used, cells.used_running) == (0, 0, 0), "cells return to zero"
        assert not list(self.slots.book.holdings)
        self.parking.close()
        assert not list((self.folder / "kv").iterdir()), "and all files are gone"

    def check_answers(self, reference: Engine) -> int:
        """Compare each answer with that of an engine where nothing else runs; how many were complete."""
        known: dict[tuple[object, ...], list[int]] = {}
        num_complete = 0
        for attempt_id, one in self.sequences.items():
            record = self.records[attempt_id]
            key = (tuple(one.prompt), one.max_tokens, one.sampling.seed)
            if not one.tokens:
                continue
            if key not in known:
                known[key] = answer(reference, one, chunk=self.chunk)
            assert one.tokens == known[key][: len(one.tokens)], f"{attempt_id} has a wrong answer"
            if record.finish_reason in ("stop", "length"):
                num_complete += 1
                assert one.tokens == known[key]
            assert record.prompt_tokens_cached <= max(0, record.prompt_tokens - 1)
            assert record.prompt_tokens_cached % (self.chunk or 1) == 0
        return num_complete


def answer(engine: Engine, one: Sequence, *, chunk: int | None) -> list[int]:
    """Alone, and with nothing cached; the prompt in one portion, or in whole chunks and the rest."""
    engine.open(0, one.sampling)
    prompt = one.prompt
    begun = 0
    while chunk is not None and begun + chunk < len(prompt):
        engine.forward([Span(0, begun, prompt[begun : begun + chunk], False)])
        begun += chunk
    tokens: list[int] = []
    span = Span(0, begun, prompt[begun:], True)
    while True:
        (token,) = engine.forward([span]).tokens
        tokens.append(token)
        if engine.vocabulary.is_end(token) or len(tokens) >= one.max_tokens:
            engine.close(0)
            return tokens
        span = Span(0, len(prompt) + len(tokens) - 1, [token], True)
