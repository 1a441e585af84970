"""The engine loop on the stub engine, step by step, on a clock that only the test moves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from headrace.caching.slots import KEPT_IN_FULL, CacheOrder
from headrace.config.settings import EngineSettings, StubTiming
from headrace.engine.protocol import Forward, Span
from headrace.engine.stub import StubEngine
from headrace.errors import EngineFault
from headrace.request.sampling import Sampling
from headrace.scheduling.steps import StepLimits
from headrace.worker.gate import gate_for
from headrace.worker.loop import FAULTS_MAX, EngineLoop, LoopNews
from headrace.worker.messages import AttemptRecord
from headrace.worker.progress import ProgressFile, read_records
from headrace.worker.sequence import Sequence
from headrace.worker.stats import StepStats


class FakeClock:
    def __init__(self) -> None:
        self.us = 1_000_000

    def wall_us(self) -> int:
        return self.us

    def monotonic_us(self) -> int:
        return self.us

    def sleep(self, seconds: float) -> None:
        self.us += int(seconds * 1e6)


class RecordingEngine(StubEngine):
    """The stub, with all its calls written down."""

    calls: list[list[Span]]

    def forward(self, spans: list[Span]) -> Forward:  # type: ignore[override]
        self.calls.append(list(spans))
        return super().forward(spans)


class Bench:
    """A loop with everything around it."""

    def __init__(
        self,
        directory: Path,
        *,
        sequences: int = 4,
        batch_tokens: int = 68,
        engine: dict[str, Any] | None = None,
        **timing: int,
    ) -> None:
        self.clock = FakeClock()
        engine_settings = EngineSettings(
            max_batch_size=sequences,
            max_batch_tokens=batch_tokens,
            max_context_tokens=256,
            stub=StubTiming(**timing),
            **(engine or {}),
        )
        self.engine = RecordingEngine(engine_settings, sleep=self.clock.sleep)
        self.engine.calls = []
        self.path = directory / "progress"
        self.path.unlink(missing_ok=True)
        self.progress = ProgressFile(self.path)
        self.texts: dict[str, str] = {}
        self.records: dict[str, AttemptRecord] = {}
        self.on_news: Callable[[LoopNews], None] = self.take
        self.registry = CollectorRegistry()
        stats = StepStats(self.registry, kv_bytes_per_token=1024)
        self.loop = EngineLoop(
            self.engine,
            limits=StepLimits(batch_tokens_max=batch_tokens, target_step_ms=1e4, idle_step_ms=1e4),
            clock=self.clock,
            progress=self.progress,
            on_news=lambda news: self.on_news(news),
            stats=stats,
            gate=gate_for(engine_settings, stats),
        )

    def take(self, news: LoopNews) -> None:
        for _, piece in news.pieces:
            assert piece.attempt_id not in self.records, "a record is the last that is heard of an attempt"
            self.texts[piece.attempt_id] = self.texts.get(piece.attempt_id, "") + piece.text
        for _, record in news.records:
            assert record.attempt_id not in self.records
            self.records[record.attempt_id] = record

    def submit(
        self,
        attempt_id: str,
        *,
        prompt: int = 5,
        max_tokens: int = 8,
        stop: list[str] | None = None,
        batch_wait_ms: float | None = None,
        order: CacheOrder = KEPT_IN_FULL,
    ) -> None:
        self.loop.submit(
            Sequence(
                attempt_id=attempt_id,
                tenant_id="t",
                connection_id=1,
                prompt=[number % 200 for number in range(prompt)],
                max_tokens=max_tokens,
                sampling=Sampling(seed=sum(attempt_id.encode())),
                stop=stop or [],
                arrived_us=self.clock.monotonic_us(),
                batch_wait_ms=batch_wait_ms,
                order=order,
            )
        )

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.loop.step()

    def run_dry(self) -> None:
        for _ in range(10_000):
            self.loop.step()
            if not self.loop.num_running and not self.loop.num_waiting:
                return
        raise AssertionError("the loop does not come to an end")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_requests_join_and_leave_between_steps_and_run_in_one_batch(bench: Bench) -> None:
    bench.submit("long", max_tokens=20)
    bench.steps(3)
    bench.submit("short", max_tokens=3)
    bench.steps(2)
    assert {span.slot for span in bench.engine.calls[-1]} == {0, 1}, "both are decoded in one call"
    bench.steps(1)
    assert "short" in bench.records
    assert "long" not in bench.records
    bench.run_dry()
    assert (bench.records["long"].completion_tokens, bench.records["short"].completion_tokens) == (20, 3)
    assert bench.records["long"].finish_reason == "length"


def test_no_call_is_larger_than_the_budget_and_a_long_prompt_never_holds_up_decoding(bench: Bench) -> None:
    bench.submit("running", max_tokens=30)
    bench.steps(2)
    bench.submit("long", prompt=200, max_tokens=2)
    before = len(bench.engine.calls)
    bench.run_dry()
    calls = bench.engine.calls[before:]
    assert max(sum(len(span.tokens) for span in call) for call in calls) <= 68
    prefills = [index for index, call in enumerate(calls) if len(call[0].tokens) > 1]
    assert len(prefills) == 3, "67 tokens beside one that decodes: 200 in three portions"
    assert all(len(calls[index - 1][0].tokens) == 1 for index in prefills), (
        "a decode call before each portion"
    )


def test_an_answer_does_not_depend_on_what_else_runs(tmp_path: Path) -> None:
    alone = Bench(tmp_path)
    alone.submit("x", prompt=100, max_tokens=12)
    alone.run_dry()
    crowd = Bench(tmp_path)
    for number in range(6):
        crowd.submit(f"n{number}", prompt=30 * number + 1, max_tokens=10)
    crowd.steps(3)
    crowd.submit("x", prompt=100, max_tokens=12)
    crowd.run_dry()
    assert crowd.texts["x"] == alone.texts["x"] != ""


def test_an_abort_takes_effect_at_the_next_step_in_every_phase(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sequences=2)
    bench.submit("decoding", max_tokens=100)
    bench.steps(4)
    bench.submit("prefilling", prompt=200)
    bench.submit("waiting")
    bench.steps(1)
    for attempt_id in ("decoding", "prefilling", "waiting", "unknown"):
        bench.loop.abort(attempt_id)
    bench.steps(1)
    assert {one.finish_reason for one in bench.records.values()} == {"aborted"}
    assert set(bench.records) == {"decoding", "prefilling", "waiting"}
    assert bench.records["decoding"].completion_tokens == 5
    prefilling = bench.records["prefilling"]
    assert (prefilling.completion_tokens, prefilling.prompt_tokens_computed) == (0, 67)
    assert bench.records["waiting"].prompt_tokens_computed == 0
    assert bench.loop.num_running == bench.loop.num_waiting == 0
    for number in range(2):
        bench.submit(f"after{number}")
    bench.run_dry()
    assert bench.records["after1"].finish_reason == "length", "both slots are free again"


def test_the_lowest_free_slot_is_taken_so_that_neighbours_can_be_computed_together(bench: Bench) -> None:
    for name, tokens in (("a", 2), ("b", 30), ("c", 2), ("d", 30)):
        bench.submit(name, max_tokens=tokens)
    bench.steps(4)
    assert set(bench.records) == {"a", "c"}
    bench.submit("e", max_tokens=30)
    bench.steps(2)
    assert {span.slot for span in bench.engine.calls[-1]} == {0, 1, 3}


def test_a_stop_string_ends_the_attempt_and_is_not_shown(bench: Bench) -> None:
    bench.submit("free", max_tokens=40)
    bench.run_dry()
    words = bench.texts["free"].split(" ")
    stop = f"{words[3]} {words[4]}"
    other = Bench(bench.path.parent)
    other.submit("free", max_tokens=40, stop=[stop])
    other.run_dry()
    assert other.records["free"].finish_reason == "stop"
    assert other.texts["free"] == bench.texts["free"][: bench.texts["free"].index(stop)]
    assert other.records["free"].completion_tokens < 40


def test_the_end_token_is_counted_and_shows_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, output_tokens=5)
    bench.submit("a", max_tokens=50)
    bench.run_dry()
    assert (bench.records["a"].finish_reason, bench.records["a"].completion_tokens) == ("stop", 5)


def test_the_progress_file_knows_every_count_before_its_text_is_told(bench: Bench) -> None:
    told: dict[str, int] = {}

    def check(news: LoopNews) -> None:
        for _, piece in news.pieces:
            told[piece.attempt_id] = piece.completion_tokens
        written = {one.attempt_id: one.completion_tokens for one in read_records(bench.path)}
        for attempt_id, count in told.items():
            assert written[attempt_id] >= count

    bench.on_news = check
    for number in range(6):
        bench.submit(f"a{number}", prompt=40 * number + 1, max_tokens=7)
    bench.run_dry()
    assert told == dict.fromkeys(told, 7)
    assert len(told) == 6


def test_a_fault_ends_its_sequences_with_an_error_and_the_loop_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fault_every_steps=7)
    for number in range(12):
        bench.submit(f"a{number}", max_tokens=4)
    bench.run_dry()
    reasons = [bench.records[f"a{number}"].finish_reason for number in range(12)]
    assert len(reasons) == 12
    assert set(reasons) == {"error", "length"}


def test_an_engine_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fault_every_steps=1)
    for number in range(FAULTS_MAX):
        bench.submit(f"a{number}")
        if number < FAULTS_MAX - 1:
            bench.loop.step()
    with pytest.raises(EngineFault):
        bench.loop.step()
    assert len(bench.records) == FAULTS_MAX, "even then every attempt has its record"


def test_memory_is_accounted_while_it_is_held(bench: Bench) -> None:
    bench.submit("a", prompt=10, max_tokens=4)
    bench.run_dry()
    record = bench.records["a"]
    assert record.kv_bytes_peak == (10 + 3) * 1024
    # Ten cells for each of three decode steps, and one, two more as it grows; 5.1 ms a step.
    assert record.kv_byte_seconds == (10 + 11 + 12) * 1024 * 5100 // 1_000_000
    assert record.prefill_us == 10 * 50
    assert record.decode_us == 3 * 5100


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 200), st.integers(1, 20)),
            st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
            st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        ),
        max_size=40,
    )
)
def test_whatever_happens_every_attempt_ends_in_one_record_and_no_slot_is_lost(
    tmp_path: Path, script: list[tuple[str, int, int]]
) -> None:
    bench = Bench(tmp_path, sequences=3, fault_every_steps=11)
    submitted = 0
    for action, first, second in script:
        match action:
            case "submit":
                bench.submit(f"a{submitted}", prompt=first, max_tokens=second)
                submitted += 1
            case "abort":
                bench.loop.abort(f"a{first}")
            case "step":
                bench.steps(first)
    bench.run_dry()
    assert set(bench.records) == {f"a{number}" for number in range(submitted)}
    assert {one.attempt_id for one in read_records(bench.path)} == set(bench.records)
    bench.progress.close()
    for number in range(3):
        bench.engine.open(number, Sampling())


def test_a_short_prompt_does_not_wait_for_a_long_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batch_tokens=68)
    bench.submit("long", prompt=240, max_tokens=1)
    bench.loop.step()
    for number in range(3):
        bench.submit(f"short{number}", prompt=12, max_tokens=1)
    bench.loop.step()
    assert set(bench.records) == {"short0", "short1", "short2"}
    # Beside an endless row of them it is read in all the same.
    for number in range(3, 60):
        bench.submit(f"short{number}", prompt=12, max_tokens=1)
        bench.loop.step()
    assert "long" in bench.records
