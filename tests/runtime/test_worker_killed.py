"""`kill -9` of a worker under load: clear errors, exact rows, and service again in seconds."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.worker.progress import read_records
from tests.platform_harness import Platform, platform, until

SLOW = {"decode_us_per_step": 20_000, "output_tokens": 400, "prefill_us_per_token": 1_000}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Platform]:
    model = {"id": "slow", "engine": {"max_batch_size": 6, "max_context_tokens": 512, "stub": SLOW}}
    with platform(tmp_path / "data", models=[model]) as running:
        yield running


def worker_pid(served: Platform) -> int | None:
    (worker,) = served.workers()
    return worker["pid"] if worker["status"] == "ready" else None


def test_running_requests_end_with_an_error_and_a_row_each_and_the_worker_comes_back(
    served: Platform,
) -> None:
    pid = worker_pid(served)
    assert pid
    streams = [served.open_chat(max_tokens=390, stream=True) for _ in range(3)]
    wholes = [served.open_chat(max_tokens=390) for _ in range(2)]
    prefilling = served.open_chat("water " * 330, max_tokens=5)
    queued = served.open_chat(max_tokens=3)
    until(lambda: served.metric("headrace_running") == 6)
    for stream in streams:
        for _ in range(12):
            assert stream.response.readline()
    os.kill(pid, signal.SIGKILL)
    (progress,) = (served.data / "progress").glob("*.progress")
    for stream in streams:
        reply = stream.reply()
        assert reply.status == 200
        assert reply.events[-1]["error"]["code"] == "worker_lost"
        assert b"[DONE]" not in reply.body
    for whole in (*wholes, prefilling):
        reply = whole.reply()
        assert (reply.status, reply.error["code"]) == (502, "worker_lost")
        assert reply.headers["retry-after"]
    answered = queued.reply()
    assert answered.status == 200, "what waited in the queue is served by the next process"
    until(lambda: worker_pid(served) not in (None, pid), what="another process serves")
    rows = served.rows()
    assert len(rows) == 7
    lost = {row["attempt_ids"]: row for row in rows if row["outcome"] == "worker_lost"}
    assert len(lost) == 6
    assert {row["count_source"] for row in lost.values()} == {"progress_file"}
    noted = {record.attempt_id: record for record in read_records(progress)}
    for attempt_ids, row in lost.items():
        record = noted[attempt_ids.strip('[]"')]
        assert row["completion_tokens"] == record.completion_tokens
        assert row["prompt_tokens"] == record.prompt_tokens_computed
    streamed = [row for row in lost.values() if row["mode"] == "stream"]
    assert all(row["completion_tokens"] >= 5 for row in streamed)
    assert served.num_open() == 0
    assert served.metric("headrace_running") == 0
    assert served.workers()[0]["restarts"] == 1


def test_a_worker_that_cannot_start_again_is_down_and_back_when_that_is_put_right(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    engine = {"max_context_tokens": 512, "stub": {}, "chat_template": str(template)}
    with platform(tmp_path / "data", models=[{"id": "m", "engine": engine}]) as served:
        pid = worker_pid(served)
        assert pid
        template.rename(tmp_path / "away")
        os.kill(pid, signal.SIGKILL)
        until(lambda: served.workers()[0]["status"] == "down", what="it says that it cannot start")
        assert "template.jinja" in served.workers()[0]["last_error"]
        reply = served.chat("water")
        assert (reply.status, reply.error["code"]) == (503, "no_healthy_worker")
        (tmp_path / "away").rename(template)
        until(lambda: worker_pid(served), what="it is tried again", seconds=30)
        assert served.chat("water").status == 200


def test_a_hung_engine_is_killed_and_its_requests_are_settled(tmp_path: Path) -> None:
    stuck = {"prefill_us_per_token": 20_000}
    model = {"id": "stuck", "engine": {"max_batch_size": 2, "max_context_tokens": 512, "stub": stuck}}
    with platform(tmp_path / "data", models=[model], worker_step_timeout_s=1.0) as served:
        reply = served.chat("water " * 100)
        assert (reply.status, reply.error["code"]) == (502, "worker_lost")
        until(lambda: worker_pid(served))
        assert served.num_open() == 0


def test_a_worker_with_a_hung_engine_leaves_when_its_server_is_killed(tmp_path: Path) -> None:
    stuck = {"prefill_us_per_token": 20_000}
    engine = {"max_batch_tokens": 1024, "target_step_ms": 60_000, "idle_step_ms": 60_000, "stub": stuck}
    model = {"id": "stuck", "engine": engine}
    data = tmp_path / "data"
    with platform(data, models=[model]) as served:
        chat = served.open_chat("water " * 1000)
        until(
            lambda: served.metric("headrace_running") == 1 and served.num_open() == 1,
            what="it is in the ledger",
        )
        children = served.children()
        served.process.kill()
        served.process.wait()
        chat.close()
        until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children), what="no orphans")
    with platform(data, models=[model]) as served:
        assert [row["outcome"] for row in served.rows()] == ["recovered"]


def test_a_server_stopped_beside_a_hung_worker_settles_from_its_file(tmp_path: Path) -> None:
    model = {"id": "slow", "engine": {"max_batch_size": 4, "max_context_tokens": 512, "stub": SLOW}}
    with platform(tmp_path / "data", models=[model], drain_s=0.5) as served:
        chats = [served.open_chat(max_tokens=390, stream=True) for _ in range(2)]
        for chat in chats:
            for _ in range(20):
                assert chat.response.readline()
        pid = worker_pid(served)
        assert pid
        os.kill(pid, signal.SIGSTOP)
        assert served.stop(signal.SIGTERM, seconds=40) == 0
        for chat in chats:
            chat.close()
        rows = served.rows()
        assert [(row["outcome"], row["count_source"]) for row in rows] == [("shutdown", "progress_file")] * 2
        assert all(row["completion_tokens"] >= 8 for row in rows)
        assert served.num_open() == 0


def test_a_worker_comes_back_after_somebody_cleaned_up_its_directory(served: Platform) -> None:
    shutil.rmtree(served.data / "progress")
    pid = worker_pid(served)
    assert pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: worker_pid(served) not in (None, pid))
    assert served.chat(max_tokens=2).status == 200


def test_a_worker_that_hangs_while_it_starts_is_replaced(tmp_path: Path) -> None:
    model = {"id": "slow", "engine": {"max_batch_size": 4, "max_context_tokens": 512, "stub": SLOW}}
    with platform(tmp_path / "data", models=[model], worker_start_timeout_s=3) as served:
        first = worker_pid(served)
        assert first
        os.kill(first, signal.SIGKILL)
        second = until(
            lambda: next((one["pid"] for one in served.workers() if one["pid"] not in (None, first)), None)
        )
        os.kill(second, signal.SIGSTOP)
        until(lambda: worker_pid(served) not in (None, first, second), seconds=30)
        assert served.chat(max_tokens=2).status == 200


def test_an_engine_that_faults_again_and_again_makes_way_for_a_new_process(tmp_path: Path) -> None:
    model = {"id": "faulty", "engine": {"max_batch_size": 2, "stub": {"fault_every_steps": 4}}}
    with platform(tmp_path / "data", models=[model]) as served:
        replies = [served.chat(max_tokens=30) for _ in range(4)]
        assert {reply.status for reply in replies} <= {500, 502, 200}
        assert any(reply.error["code"] == "engine_error" for reply in replies if reply.status == 500)
        until(lambda: served.num_open() == 0)
        assert len(served.rows()) == 4


def test_the_server_killed_and_started_again_closes_what_it_left_open(tmp_path: Path) -> None:
    model = {"id": "slow", "engine": {"max_batch_size": 4, "max_context_tokens": 512, "stub": SLOW}}
    data = tmp_path / "data"
    with platform(data, models=[model]) as served:
        chats = [served.open_chat(max_tokens=390, stream=True) for _ in range(4)]
        for chat in chats:
            for _ in range(10):
                assert chat.response.readline()
        waiting = served.open_chat(max_tokens=3)
        until(lambda: served.metric("headrace_queue_length") == 1)
        children = served.children()
        served.process.kill()
        served.process.wait()
        until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children), what="no orphans")
        for chat in (*chats, waiting):
            chat.close()
        assert served.num_open() == 5
    with platform(data, models=[model]) as served:
        assert served.num_open() == 0
        rows = served.rows()
        assert [row["outcome"] for row in rows] == ["recovered"] * 5
        # The orphaned worker ended its attempts itself; its unacknowledged records were in its file.
        counted = [row for row in rows if row["count_source"] == "engine"]
        assert len(counted) == 4
        assert all(row["completion_tokens"] >= 4 for row in counted)
        assert served.chat(max_tokens=1).status == 200
        assert not list((data / "progress").glob("*.1.new"))
