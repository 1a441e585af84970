"""Static batches in the engine loop, and the wait for company, step by step on a clock that only the test moves."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.caching.slots import CacheOrder
from headrace.engine.protocol import Forward, Span
from headrace.request.controls import AS_CONFIGURED, Controls
from headrace.request.sampling import Sampling
from headrace.worker.progress import read_records
from tests.worker.test_loop import Bench

UNCACHED = CacheOrder(mode="off")


class StaticBench(Bench):
    """A loop that batches statically: 64 tokens, four at once, five milliseconds."""

    def __init__(self, directory: Path, *, engine: dict[str, Any] | None = None, **more: Any) -> None:
        merged = {"batching": "static", "batch_wait_ms": 5.0, **(engine or {})}
        super().__init__(directory, engine=merged, **more)

    def wait(self) -> None:
        """Let the time pass for which the loop would sleep."""
        idle_s = self.loop.idle_s()
        assert idle_s, "there is something to do, or nothing will ever be"
        self.clock.sleep(idle_s)

    def run_dry(self) -> None:
        for _ in range(10_000):
            self.loop.step()
            idle_s = self.loop.idle_s()
            if idle_s is None:
                return
            self.clock.sleep(idle_s)
        raise AssertionError("the loop does not come to an end")

    def flushed(self) -> dict[str, int]:
        return {
            reason: int(
                self.registry.get_sample_value("headrace_worker_batches_flushed_total", {"reason": reason})
                or 0
            )
            for reason in ("full", "does_not_fit", "window")
        }

    def batches(self) -> list[set[int]]:
        """Slots of the calls so far, equal neighbours once."""
        found: list[set[int]] = []
        for call in self.engine.calls:
            slots = {span.slot for span in call}
            if not found or found[-1] != slots:
                found.append(slots)
        return found


@pytest.fixture
def bench(tmp_path: Path) -> StaticBench:
    return StaticBench(tmp_path)


def test_a_lone_request_waits_for_company_and_then_all_start_together(bench: StaticBench) -> None:
    bench.submit("a")
    bench.steps(1)
    assert bench.engine.calls == []
    assert bench.loop.idle_s() == pytest.approx(0.005)
    bench.clock.us += 3_000
    bench.submit("b")
    bench.steps(1)
    assert bench.loop.idle_s() == pytest.approx(0.002), "since the first member"
    bench.wait()
    bench.steps(1)
    assert len(bench.engine.calls[0]) == 2, "the whole batch is read in by one call"
    bench.run_dry()
    assert bench.flushed() == {"full": 0, "does_not_fit": 0, "window": 1}
    assert bench.records["a"].queued_us == 5_000


def test_the_first_that_does_not_fit_flushes_at_once_and_runs_in_the_next(bench: StaticBench) -> None:
    bench.submit("a", prompt=20, max_tokens=8)  # cost 24
    bench.submit("b", prompt=20, max_tokens=8)  # 48
    bench.submit("c", prompt=20, max_tokens=8)  # 72, and 64 are allowed
    bench.steps(1)
    assert bench.loop.num_running == 2, "no window was waited for"
    assert bench.flushed() == {"full": 0, "does_not_fit": 1, "window": 0}
    bench.run_dry()
    assert bench.flushed() == {"full": 0, "does_not_fit": 1, "window": 1}
    a, c = bench.records["a"], bench.records["c"]
    assert c.started_ts is not None and c.started_ts >= a.ended_ts
    assert [record.completion_tokens for record in bench.records.values()] == [8, 8, 8]


def test_a_full_batch_flushes_at_once(bench: StaticBench) -> None:
    for number in range(4):
        bench.submit(f"a{number}", prompt=5, max_tokens=4)
    bench.steps(1)
    assert bench.loop.num_running == 4
    assert bench.flushed() == {"full": 1, "does_not_fit": 0, "window": 0}
    bench.run_dry()
    assert bench.registry.get_sample_value("headrace_worker_batch_size_sum") == 4 * 3
    assert bench.registry.get_sample_value("headrace_worker_batch_size_count") == 3


def test_nobody_joins_a_running_batch_though_there_are_places_and_the_next_is_collected(
    bench: StaticBench,
) -> None:
    bench.submit("long", max_tokens=20, batch_wait_ms=0.0)
    bench.submit("short", max_tokens=3)
    bench.steps(2)
    for number in range(2):
        bench.submit(f"next{number}", max_tokens=3)
    bench.steps(10)
    assert "short" in bench.records
    assert (bench.loop.num_running, bench.loop.num_waiting) == (1, 2)
    assert {span.slot for span in bench.engine.calls[-1]} == {0}
    while "long" not in bench.records:
        bench.loop.step()
    before = len(bench.engine.calls)
    bench.steps(1)
    assert len(bench.engine.calls) == before + 1, "collected long enough while the engine was busy"
    assert bench.loop.num_running == 2
    bench.run_dry()
    assert set(bench.records) == {"long", "short", "next0", "next1"}


def test_a_prompt_larger_than_a_call_runs_alone_in_portions(bench: StaticBench) -> None:
    bench.submit("before", prompt=5, max_tokens=4)
    bench.submit("huge", prompt=200, max_tokens=4)
    bench.submit("after", prompt=5, max_tokens=4)
    bench.run_dry()
    assert max(sum(len(span.tokens) for span in call) for call in bench.engine.calls) <= 68
    assert all(len(slots) == 1 for slots in bench.batches()), "each was alone"
    assert bench.records["huge"].prompt_tokens_computed == 200
    assert bench.flushed() == {"full": 1, "does_not_fit": 1, "window": 1}


def test_aborts_of_collected_and_running_members(bench: StaticBench) -> None:
    for name in ("a", "b"):
        bench.submit(name, max_tokens=50, prompt=5)
    bench.clock.us += 5_000
    bench.steps(2)
    assert bench.loop.num_running == 2
    for name in ("c", "d"):
        bench.submit(name, max_tokens=4)
    bench.steps(1)
    bench.loop.abort("c")
    bench.loop.abort("a")
    bench.steps(1)
    assert {name: record.finish_reason for name, record in bench.records.items()} == {
        "c": "aborted",
        "a": "aborted",
    }
    assert (bench.loop.num_running, bench.loop.num_waiting) == (1, 1), "a free place changes nothing"
    assert bench.records["c"].completion_tokens == 0
    assert bench.records["a"].completion_tokens > 0
    bench.loop.abort("b")
    bench.steps(1)
    assert bench.loop.num_running == 1, "the batch is over, the next one runs"
    bench.run_dry()
    assert bench.records["d"].finish_reason == "length"
    assert {one.attempt_id: one.completion_tokens for one in read_records(bench.path)} == {
        name: record.completion_tokens for name, record in bench.records.items()
    }


def test_a_batch_that_nobody_wants_any_more_does_not_hold_up_the_next(bench: StaticBench) -> None:
    bench.submit("a")
    bench.steps(1)
    bench.loop.abort("a")
    bench.steps(1)
    assert bench.loop.idle_s() is None
    bench.clock.us += 60_000_000
    bench.submit("b")
    bench.steps(1)
    assert bench.loop.idle_s() == pytest.approx(0.005), "a window of its own"
    bench.run_dry()
    assert bench.flushed() == {"full": 0, "does_not_fit": 0, "window": 1}


def test_a_fault_ends_the_batch_and_the_next_one_runs(tmp_path: Path) -> None:
    bench = StaticBench(tmp_path, fault_every_steps=7)
    for number in range(12):
        bench.submit(f"a{number}", max_tokens=4)
    bench.run_dry()
    assert len(bench.records) == 12
    assert {one.finish_reason for one in bench.records.values()} == {"error", "length"}


def test_controls_change_window_size_and_budget_of_what_is_collected(bench: StaticBench) -> None:
    for number in range(3):
        bench.submit(f"a{number}", prompt=3, max_tokens=4)
    bench.steps(1)
    assert bench.loop.num_running == 0
    bench.loop.adjust(Controls(max_batch_size=2))
    bench.steps(1)
    assert bench.loop.num_running == 2, "two are a full batch now"
    bench.run_dry()
    bench.loop.adjust(Controls(batch_wait_ms=700))
    bench.submit("b")
    bench.steps(1)
    assert bench.loop.idle_s() == pytest.approx(0.7)
    bench.loop.adjust(AS_CONFIGURED)
    bench.steps(1)
    assert bench.loop.idle_s() == pytest.approx(0.005)
    bench.run_dry()


def test_a_smaller_budget_makes_smaller_batches(tmp_path: Path) -> None:
    bench = StaticBench(tmp_path, batch_tokens=128)
    bench.loop.adjust(Controls(max_batch_tokens=64))
    for name in ("a", "b"):
        bench.submit(name, prompt=30, max_tokens=8)  # cost 34 each
    bench.steps(1)
    assert bench.loop.num_running == 1
    bench.run_dry()
    assert bench.flushed()["does_not_fit"] == 1


def test_a_worker_that_drains_does_not_wait_for_company(bench: StaticBench) -> None:
    bench.submit("a", batch_wait_ms=60_000.0)
    bench.steps(1)
    assert bench.loop.idle_s() == pytest.approx(60.0)
    bench.loop.drain()
    bench.steps(1)
    assert bench.loop.num_running == 1
    bench.submit("b", batch_wait_ms=60_000.0)  # its prompt was still being tokenized
    bench.run_dry()
    assert bench.records["b"].queued_us < 1_000_000


def test_members_that_share_a_prefix_wait_for_it_inside_their_batch(tmp_path: Path) -> None:
    bench = StaticBench(tmp_path, batch_tokens=128)
    for name in ("a", "b"):
        bench.submit(name, prompt=40, max_tokens=4)
    bench.run_dry()
    assert bench.records["b"].prompt_tokens_cached == 39
    assert bench.flushed() == {"full": 0, "does_not_fit": 0, "window": 1}, "one batch, and one prompt read in"


class Watch:
    """Sees on the engine whether anybody joins a batch that has begun to compute."""

    def __init__(self, bench: StaticBench) -> None:
        self.joined = 0
        self.opened = 0
        fresh: set[int] = set()
        begun: set[int] = set()
        engine = bench.engine
        opens, forwards, closes = engine.open, engine.forward, engine.close

        def open_slot(slot: int, sampling: Sampling, *, held: int = 0, drawn: int = 0) -> None:
            self.opened += 1
            self.joined += bool(begun)
            fresh.add(slot)
            opens(slot, sampling, held=held, drawn=drawn)

        def forward(spans: list[Span]) -> Forward:
            begun.update(fresh)
            fresh.clear()
            return forwards(spans)

        def close(slot: int, *, keep: int = 0) -> None:
            begun.discard(slot)
            fresh.discard(slot)
            closes(slot, keep=keep)

        engine.open, engine.forward, engine.close = open_slot, forward, close  # type: ignore[method-assign]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 200), st.integers(1, 20)),
            st.tuples(st.just("submit"), st.integers(1, 20), st.integers(1, 20)),
            st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
            st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
            st.tuples(st.just("adjust"), st.integers(1, 4), st.integers(64, 128)),
            st.tuples(st.just("wait"), st.integers(0, 6_000), st.just(0)),
        ),
        max_size=40,
    )
)
def test_whatever_happens_every_attempt_ends_once_and_nobody_joins(
    tmp_path: Path, script: list[tuple[str, int, int]]
) -> None:
    bench = StaticBench(tmp_path, sequences=3, batch_tokens=96, fault_every_steps=11)
    watch = Watch(bench)
    submitted = 0
    for action, first, second in script:
        match action:
            case "submit":
                bench.submit(f"a{submitted}", prompt=first, max_tokens=second, order=UNCACHED)
                submitted += 1
            case "abort":
                bench.loop.abort(f"a{first}")
            case "step":
                bench.steps(first)
            case "adjust":
                bench.loop.adjust(Controls(max_batch_size=first, max_batch_tokens=second))
            case "wait":
                bench.clock.us += first
    bench.run_dry()
    assert set(bench.records) == {f"a{number}" for number in range(submitted)}
    assert {one.attempt_id for one in read_records(bench.path)} == set(bench.records)
    assert watch.joined == 0
    assert watch.opened == sum(record.started_ts is not None for record in bench.records.values())
    bench.progress.close()


def test_the_watch_sees_somebody_join(tmp_path: Path) -> None:
    bench = StaticBench(tmp_path, engine={"batching": "continuous", "batch_wait_ms": 0.0})
    watch = Watch(bench)
    bench.submit("a")
    bench.steps(2)
    bench.submit("b")
    bench.run_dry()
    assert watch.joined == 1


# --- continuous batching waits after idle time only ----------------------------------------------------------------


def test_the_first_step_after_idle_time_waits_and_no_later_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, engine={"batch_wait_ms": 5.0})
    bench.submit("a", max_tokens=20)
    bench.steps(1)
    assert bench.loop.idle_s() == pytest.approx(0.005)
    bench.submit("urgent", max_tokens=20, batch_wait_ms=2.0)
    bench.submit("patient", max_tokens=20, batch_wait_ms=50.0)
    bench.steps(1)
    assert bench.loop.idle_s() == pytest.approx(0.002)
    bench.clock.us += 2_000
    bench.steps(1)
    assert bench.loop.num_running == 3
    bench.submit("joins", max_tokens=2, batch_wait_ms=50.0)
    bench.steps(1)
    assert bench.loop.num_running == 4, "an engine that works never waits"
    bench.run_dry()
    bench.submit("b")
    bench.steps(1)
    assert bench.loop.idle_s() == pytest.approx(0.005), "idle again"
    bench.loop.abort("b")
    bench.steps(1)
    assert bench.loop.idle_s() is None


def test_draining_ends_the_wait_of_a_continuous_engine_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, engine={"batch_wait_ms": 60_000.0})
    bench.submit("a")
    bench.steps(1)
    assert bench.loop.num_running == 0
    bench.loop.drain()
    bench.steps(1)
    assert bench.loop.num_running == 1
