"""Preempted and resumed: an answer goes on as if nothing had happened, and nobody pays for what is computed again."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.caching.slots import CacheOrder
from headrace.request.sampling import Sampling
from headrace.worker.loop import LoopNews
from headrace.worker.messages import AttemptRecord
from headrace.worker.progress import read_records
from headrace.worker.sequence import Sequence
from tests.worker.test_loop import Bench as LoopBench

MODES = ("full", "off", "prefix_only")


class Bench(LoopBench):
    """The loop with everything around it; also hears of preemptions."""

    def __init__(self, directory: Path, *, chunk: int | None = None, **options: int) -> None:
        options.setdefault("batch_tokens", 100)
        super().__init__(directory, **options)
        if chunk is not None:
            self.loop._chunk_tokens = chunk
            self.loop._slots.book._grain = chunk
        self.preempted: list[tuple[str, int]] = []

    def take(self, news: LoopNews) -> None:
        for _, one in news.preempted:
            assert one.attempt_id not in self.records
            self.preempted.append((one.attempt_id, one.completion_tokens))
        super().take(news)

    def begin(self, attempt_id: str, *, mode: Any = "full", prompt: int = 90, **options: Any) -> Sequence:
        sequence = Sequence(
            attempt_id=attempt_id,
            tenant_id=options.pop("tenant", "t"),
            connection_id=1,
            prompt=[(number + sum(attempt_id.encode())) % 200 for number in range(prompt)],
            max_tokens=options.pop("max_tokens", 12),
            sampling=Sampling(seed=5),
            stop=options.pop("stop", []),
            arrived_us=self.clock.monotonic_us(),
            order=CacheOrder(mode=mode),
            cacheable=options.pop("cacheable", 0),
        )
        assert not options
        self.loop.submit(sequence)
        return sequence

    def interrupt(self, attempt_id: str, *, others: int = 4) -> None:
        """Preempt it, let others have its slot if they are four, resume it."""
        self.loop.preempt(attempt_id)
        self.steps(1)
        for number in range(others):
            self.begin(f"{attempt_id}-other{number}-{self.clock.us}", mode="off", prompt=40, max_tokens=2)
        self.steps(5)
        self.loop.resume(attempt_id)


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 7, 11])
def test_the_answer_and_the_counts_are_those_of_one_that_never_stopped(
    tmp_path: Path, mode: str, chunk: int | None, others: int, after: int
) -> None:
    alone = Bench(tmp_path, chunk=chunk)
    expected = alone.begin("x", mode=mode, cacheable=70)
    alone.run_dry()
    bench = Bench(tmp_path, chunk=chunk)
    one = bench.begin("x", mode=mode, cacheable=70)
    bench.steps(after)
    generated = one.generated
    bench.interrupt("x", others=others)
    bench.run_dry()
    assert one.tokens == expected.tokens
    assert bench.texts["x"] == alone.texts["x"] != ""
    record, reference = bench.records["x"], alone.records["x"]
    for name in (
        "prompt_tokens",
        "prompt_tokens_computed",
        "prompt_tokens_cached",
        "completion_tokens",
        "finish_reason",
        "kv_bytes_peak",
        "queued_us",
    ):
        assert getattr(record, name) == getattr(reference, name), name
    assert (record.preemptions, reference.preemptions) == (1, 0)
    assert bench.preempted == [("x", generated)]
    held = 64 if chunk and after == 1 else 90 + max(0, generated - 1)
    if others == 4 or mode == "off":
        assert record.recomputed_tokens == held
    elif mode == "full":
        assert record.recomputed_tokens == (0 if chunk is None else held % 64 if after == 1 else held - 64)
    assert reference.recomputed_tokens == 0


def test_it_goes_on_behind_the_tokens_that_were_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin("x", max_tokens=20)
    bench.steps(5)
    told = bench.texts["x"]
    bench.loop.preempt("x")
    bench.steps(3)
    assert bench.texts["x"] == told
    assert bench.preempted == [("x", 5)]
    assert (bench.loop.num_running, bench.loop.num_waiting, bench.loop.num_suspended) == (0, 0, 1)
    bench.loop.resume("x")
    bench.steps(1)
    assert bench.records == {}
    bench.run_dry()
    assert bench.texts["x"].startswith(told)
    assert bench.records["x"].completion_tokens == 20


@pytest.mark.parametrize("after", range(1, 30))
def test_a_stop_string_is_found_across_a_preemption(tmp_path: Path, after: int) -> None:
    free = Bench(tmp_path)
    free.begin("x", max_tokens=40)
    free.run_dry()
    words = free.texts["x"].split(" ")
    stop = f"{words[8]} {words[9]} {words[10]}"
    bench = Bench(tmp_path)
    bench.begin("x", max_tokens=40, stop=[stop])
    bench.steps(after)
    bench.interrupt("x")
    bench.run_dry()
    assert bench.texts["x"] == free.texts["x"][: free.texts["x"].index(stop)]


def test_memory_is_not_accounted_while_it_holds_none(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin("x", prompt=10, max_tokens=4)
    bench.steps(2)
    bench.loop.preempt("x")
    bench.steps(1)
    bench.clock.us += 50_000_000
    bench.loop.resume("x")
    bench.run_dry()
    record = bench.records["x"]
    assert record.kv_byte_seconds == (10 + 11 + 12) * 1024 * 5100 // 1_000_000
    assert record.decode_us == 3 * 5100 + 11 * 50, "and what was computed again took its time"
    assert record.recomputed_tokens == 11
    assert record.kv_bytes_peak == 13 * 1024


def test_a_resumed_one_is_first_in_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sequences=1)
    bench.begin("x", max_tokens=30)
    bench.steps(3)
    bench.loop.preempt("x")
    for number in range(3):
        bench.begin(f"n{number}", max_tokens=5)
    bench.steps(2)
    bench.loop.resume("x")
    bench.run_dry()
    assert list(bench.records) == ["n0", "x", "n1", "n2"]


def test_its_slot_is_free_for_another(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sequences=1)
    bench.begin("x", max_tokens=100)
    bench.steps(3)
    bench.begin("short", max_tokens=2)
    bench.loop.preempt("x")
    bench.steps(3)
    assert list(bench.records) == ["short"]


def test_one_that_waits_is_preempted_before_it_has_begun(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sequences=1)
    bench.begin("x", max_tokens=30)
    bench.begin("waiting", max_tokens=3)
    bench.steps(1)
    bench.loop.preempt("waiting")
    bench.run_dry()
    assert (list(bench.records), bench.preempted) == (["x"], [("waiting", 0)])
    bench.loop.resume("waiting")
    bench.run_dry()
    assert bench.records["waiting"].completion_tokens == 3
    assert bench.records["waiting"].preemptions == 0, "it has lost nothing"


def test_an_abort_ends_it_with_what_it_had(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin("x", max_tokens=30)
    bench.steps(6)
    bench.loop.preempt("x")
    bench.steps(1)
    bench.loop.abort("x")
    bench.steps(1)
    record = bench.records["x"]
    assert (record.finish_reason, record.completion_tokens, record.preemptions) == ("aborted", 6, 1)
    assert record.prompt_tokens_computed == 90
    assert bench.loop.num_suspended == 0
    bench.loop.resume("x")
    bench.loop.preempt("x")
    bench.steps(1)
    assert len(bench.preempted) == 1


def test_a_fault_of_others_does_not_touch_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fault_every_steps=6)
    one = bench.begin("x", max_tokens=4)
    bench.steps(2)
    bench.loop.preempt("x")
    bench.begin("other", max_tokens=30)
    bench.steps(6)
    assert bench.records["other"].finish_reason == "error"
    bench.loop.resume("x")
    bench.run_dry()
    assert (bench.records["x"].finish_reason, one.generated) == ("length", 4)


def test_a_worker_that_stops_ends_it_and_one_that_is_killed_leaves_its_count(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin("x", max_tokens=30)
    bench.steps(5)
    bench.loop.preempt("x")
    bench.steps(1)
    (left,) = read_records(bench.path)
    assert (left.source, left.completion_tokens, left.prompt_tokens_computed) == ("progress_file", 5, 90)
    bench.loop.resume("x")
    bench.steps(2)
    (left,) = read_records(bench.path)
    assert (left.completion_tokens, left.prompt_tokens_computed) == (7, 90), "started once, and counted on"
    bench.loop.preempt("x")
    bench.steps(1)
    bench.loop.stop()
    bench.loop.run()
    record = bench.records["x"]
    assert (record.finish_reason, record.completion_tokens, record.preemptions) == ("aborted", 7, 2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunk=st.sampled_from([None, 64]),
    script=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 200), st.integers(1, 20)),
            st.tuples(st.just("abort"), st.integers(0, 12), st.just(0)),
            st.tuples(st.just("preempt"), st.integers(0, 12), st.just(0)),
            st.tuples(st.just("resume"), st.integers(0, 12), st.just(0)),
            st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        ),
        max_size=60,
    ),
)
def test_whatever_happens_answers_are_right_and_everything_ends(
    tmp_path: Path, chunk: int | None, script: list[tuple[str, int, int]]
) -> None:
    bench = Bench(tmp_path, sequences=3, chunk=chunk)
    sequences: list[Sequence] = []
    for action, first, second in script:
        match action:
            case "submit":
                mode = MODES[(first + second) % 3]
                sequences.append(
                    bench.begin(f"a{len(sequences)}", mode=mode, prompt=first, max_tokens=second)
                )
            case "abort":
                bench.loop.abort(f"a{first}")
            case "preempt":
                bench.loop.preempt(f"a{first}")
            case "resume":
                bench.loop.resume(f"a{first}")
            case "step":
                bench.steps(first)
    for one in sequences:
        bench.loop.resume(one.attempt_id)
    bench.run_dry()
    assert set(bench.records) == {one.attempt_id for one in sequences}
    bench.progress.close()
    for one in sequences:
        record: AttemptRecord = bench.records[one.attempt_id]
        alone = Bench(tmp_path, chunk=chunk)
        expected = alone.begin(one.attempt_id, prompt=len(one.prompt), max_tokens=one.max_tokens)
        alone.run_dry()
        alone.progress.close()
        assert one.tokens == expected.tokens[: one.generated]
        if record.finish_reason == "length":
            assert bench.texts[one.attempt_id] == alone.texts[one.attempt_id]
            assert record.prompt_tokens_computed == len(one.prompt)
