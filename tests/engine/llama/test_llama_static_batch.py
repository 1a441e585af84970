"""The real engine run as one that cannot batch continuously."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace.caching.slots import CacheOrder
from headrace.clock import SystemClock
from headrace.engine.llama import LlamaEngine
from headrace.engine.protocol import Forward, Span
from headrace.request.sampling import Sampling
from headrace.scheduling.static_batch import BatchLimits
from headrace.scheduling.steps import StepLimits
from headrace.worker.gate import StaticGate
from headrace.worker.loop import EngineLoop, LoopNews
from headrace.worker.messages import AttemptRecord
from headrace.worker.progress import ProgressFile, read_records
from headrace.worker.sequence import Sequence
from headrace.worker.stats import StepStats

TOKENS_MAX = 128


class Served:
    """The engine with a static loop around it, and all its calls written down."""

    def __init__(self, engine: LlamaEngine, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.calls: list[list[Span]] = []
        self.records: dict[str, AttemptRecord] = {}
        self.registry = CollectorRegistry()
        self.path = directory / "progress"
        stats = StepStats(self.registry, kv_bytes_per_token=engine.info.kv_bytes_per_token)
        limits = BatchLimits(tokens_max=TOKENS_MAX, size_max=4, alpha=0.5)
        compute = engine.forward

        def forward(spans: list[Span]) -> Forward:
            self.calls.append(list(spans))
            return compute(spans)

        monkeypatch.setattr(engine, "forward", forward)
        self.loop = EngineLoop(
            engine,
            limits=StepLimits(batch_tokens_max=TOKENS_MAX, target_step_ms=60_000, idle_step_ms=60_000),
            clock=SystemClock(),
            progress=ProgressFile(self.path),
            on_news=self.hear,
            stats=stats,
            gate=StaticGate(limits, wait_ms=0.0, stats=stats),
        )

    def hear(self, news: LoopNews) -> None:
        self.records.update({record.attempt_id: record for _, record in news.records})

    def submit(self, name: str, text: str, *, max_tokens: int) -> None:
        prompt = self.engine.vocabulary.tokenize(text, is_special_parsed=False, is_start=True)
        self.loop.submit(
            Sequence(
                attempt_id=name,
                tenant_id="t",
                connection_id=0,
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=Sampling(temperature=0.0),
                stop=[],
                arrived_us=0,
                order=CacheOrder(mode="off"),
            )
        )

    def run(self) -> None:
        for _ in range(1_000):
            self.loop.step()
            if self.loop.idle_s() is None:
                return
        raise AssertionError("the loop does not come to an end")


def test_a_batch_is_read_in_by_one_call_and_runs_to_its_end_before_the_next(
    engine: LlamaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(engine, tmp_path, monkeypatch)
    served.submit("a", "Once upon a time there was a river that ran through", max_tokens=12)
    served.submit("b", "The capital of France is", max_tokens=4)
    served.submit("c", "word " * 80, max_tokens=60)  # does not fit beside the others
    served.loop.step()
    assert {span.slot for span in served.calls[0]} == {0, 1}, "nobody waited, one call for both prompts"
    served.submit("d", "A mill has a", max_tokens=3)
    served.run()
    assert set(served.records) == {"a", "b", "c", "d"}
    assert max(sum(len(span.tokens) for span in call) for call in served.calls) <= TOKENS_MAX
    for name, maximum in (("a", 12), ("b", 4), ("c", 60), ("d", 3)):
        record = served.records[name]
        assert record.finish_reason in ("length", "stop")
        assert 0 < record.completion_tokens <= maximum
        assert record.prompt_tokens_computed == record.prompt_tokens
    first_ends = max(served.records[name].ended_ts for name in ("a", "b"))
    assert all((served.records[name].started_ts or 0) >= first_ends for name in ("c", "d"))
    flushed = {
        reason: served.registry.get_sample_value("headrace_worker_batches_flushed_total", {"reason": reason})
        for reason in ("full", "does_not_fit", "window")
    }
    assert flushed == {"full": 0, "does_not_fit": 1, "window": 1}
    assert {one.attempt_id for one in read_records(served.path)} == set(served.records)
