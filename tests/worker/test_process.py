"""A worker process by itself: started, asked, left alone, refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.clock import SystemClock
from headrace.config.settings import EngineSettings, StubTiming
from headrace.framing import FrameWriter
from headrace.request.messages import Message
from headrace.request.sampling import Sampling
from headrace.runtime.child import Child
from headrace.worker.link import LOST, Attempt, WorkerLink
from headrace.worker.messages import Accepted, AttemptRecord, Piece, Rejected, Submit
from headrace.worker.process import Failed, Ready, WorkerOrders
from headrace.worker.progress import read_records

SLOW = StubTiming(decode_us_per_step=20_000, output_tokens=500)


def orders(directory: Path, **engine: Any) -> WorkerOrders:
    return WorkerOrders(
        worker_id="w",
        model_path=None,
        engine=EngineSettings(**{"max_batch_size": 2, "max_context_tokens": 256, "stub": SLOW, **engine}),
        socket=str(directory / "s"),
        progress=str(directory / "p"),
        parking=str(directory / "kv"),
        cache=str(directory),
    )


def submission(attempt_id: str, *, content: str = "hello", max_tokens: int | None = 5) -> Submit:
    return Submit(
        attempt_id=attempt_id,
        tenant_id="t",
        messages=[Message("user", content)],
        max_tokens=max_tokens,
        sampling=Sampling(seed=1),
        stop=[],
    )


async def events_of(attempt: Attempt) -> list[Any]:
    """All events of an attempt, to its last."""
    found: list[Any] = []
    while not found or not isinstance(found[-1], AttemptRecord | Rejected | type(LOST)):
        found += await attempt.take()
    return found


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Child]:
    child = await Child.start("worker", msgspec.json.encode(orders(tmp_path)))
    answer = msgspec.json.decode(await child.answer(), type=Ready | Failed)
    assert isinstance(answer, Ready)
    assert answer.resident_bytes > 0
    yield child
    child.kill()
    await child.wait()


async def test_an_attempt_is_accepted_answered_and_recorded(worker: Child, tmp_path: Path) -> None:
    link, hello = await WorkerLink.connect(tmp_path / "s", SystemClock())
    assert hello.unacknowledged == []
    first, *pieces, record = await events_of(link.submit(submission("a")))
    assert first == Accepted("a", prompt_tokens=first.prompt_tokens, max_tokens=5)
    assert [piece.completion_tokens for piece in pieces] == [1, 2, 3, 4, 5]
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert (record.completion_tokens, record.finish_reason) == (5, "length")
    link.close()
    again, hello = await WorkerLink.connect(tmp_path / "s", SystemClock())
    assert hello.unacknowledged == [record], "kept until somebody has it in a ledger"
    again.acknowledge(["a"])
    again.close()
    last, hello = await WorkerLink.connect(tmp_path / "s", SystemClock())
    assert hello.unacknowledged == []
    last.close()


async def test_a_prompt_that_does_not_fit_is_rejected_with_its_length(worker: Child, tmp_path: Path) -> None:
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    (rejected,) = await events_of(link.submit(submission("a", content="word " * 400)))
    assert rejected.code == "context_length_exceeded"
    assert rejected.prompt_tokens >= 256
    (huge,) = await events_of(link.submit(submission("b", content="x" * 3_000_000)))
    assert huge.code == "context_length_exceeded"
    link.close()


async def test_a_gateway_that_vanishes_takes_its_attempts_with_it(worker: Child, tmp_path: Path) -> None:
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    attempt = link.submit(submission("a", max_tokens=None))
    while not any(isinstance(event, Piece) for event in await attempt.take()):
        pass
    link.close()
    async with asyncio.timeout(5):
        while True:
            other, hello = await WorkerLink.connect(tmp_path / "s", SystemClock())
            other.close()
            if hello.unacknowledged:
                break
            await asyncio.sleep(0.02)
    (record,) = hello.unacknowledged
    assert (record.attempt_id, record.finish_reason) == ("a", "aborted")
    assert 0 < record.completion_tokens < 200


async def test_a_lost_worker_ends_every_attempt_and_its_file_has_the_counts(
    worker: Child, tmp_path: Path
) -> None:
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    running = link.submit(submission("running", max_tokens=None))
    while not any(isinstance(event, Piece) for event in await running.take()):
        pass
    worker.kill()
    assert (await events_of(running))[-1] is LOST
    late = link.submit(submission("late"))
    assert await late.take() == [LOST]
    link.deliver(read_records(tmp_path / "p"))
    record = await running.record
    assert isinstance(record, AttemptRecord)
    assert (record.source, record.completion_tokens > 0) == ("progress_file", True)
    assert await late.record is None


async def test_nonsense_on_the_socket_ends_that_connection_only(worker: Child, tmp_path: Path) -> None:
    for nonsense in (
        b"\xff" * 8,
        FrameWriter().frame(b"\x81"),
        FrameWriter().frame(msgspec.msgpack.encode({"type": "Nothing"})),
    ):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(nonsense)
        async with asyncio.timeout(5):
            await reader.read(-1)
        writer.close()
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    assert (await events_of(link.submit(submission("a"))))[-1].finish_reason == "length"
    link.close()


async def test_a_draining_worker_finishes_and_takes_nothing_new(worker: Child, tmp_path: Path) -> None:
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    running = link.submit(submission("running", max_tokens=30))
    await running.take()
    worker.terminate()
    rejected = None
    while rejected is None:
        outcome = (await events_of(link.submit(submission(f"try{id(object())}", max_tokens=1))))[-1]
        rejected = outcome if isinstance(outcome, Rejected) else None
    assert rejected.code == "draining"
    assert (await events_of(running))[-1].completion_tokens == 30
    assert await worker.wait() == 0


async def test_a_draining_worker_waits_for_no_company(tmp_path: Path) -> None:
    settings = orders(tmp_path, batching="static", batch_wait_ms=60_000.0)
    child = await Child.start("worker", msgspec.json.encode(settings))
    assert isinstance(msgspec.json.decode(await child.answer(), type=Ready | Failed), Ready)
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    collected = link.submit(submission("collected"))
    assert isinstance((await collected.take())[0], Accepted)
    urgent = link.submit(msgspec.structs.replace(submission("urgent"), batch_wait_ms=0.0))
    assert (await events_of(urgent))[-1].completion_tokens == 5, "its own window flushes the batch"
    assert (await events_of(collected))[-1].completion_tokens == 5
    late = link.submit(submission("late"))
    assert isinstance((await late.take())[0], Accepted)
    child.terminate()
    assert (await events_of(late))[-1].completion_tokens == 5
    assert await child.wait() == 0


async def test_what_cannot_start_says_so_and_that_it_is_final(tmp_path: Path) -> None:
    broken = msgspec.structs.replace(orders(tmp_path, stub=None), model_path=str(tmp_path / "missing.gguf"))
    child = await Child.start("worker", msgspec.json.encode(broken))
    failed = msgspec.json.decode(await child.answer(), type=Ready | Failed)
    assert isinstance(failed, Failed)
    assert failed.is_final
    assert "missing.gguf" in failed.message
    assert await child.wait() == 2


async def preempted(link: WorkerLink, attempt: Attempt) -> int:
    """Preempt it; the tokens it had when it stopped."""
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    attempt.when_preempted(stopped.set_result)
    link.preempt(attempt)
    return await stopped


async def test_a_preempted_attempt_stays_alive_and_goes_on_where_it_stopped(
    worker: Child, tmp_path: Path
) -> None:
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    whole = await events_of(link.submit(submission("reference", max_tokens=60)))
    attempt = link.submit(submission("a", max_tokens=60))
    told: list[Any] = []
    while not any(isinstance(event, Piece) for event in told):
        told += await attempt.take()
    tokens = await preempted(link, attempt)
    told += await attempt.take(0)
    assert told[-1].completion_tokens == tokens < 60
    heard_us = attempt.heard_us
    async with asyncio.timeout(5):
        while link.status is None or link.status.suspended != 1 or attempt.heard_us == heard_us:
            await asyncio.sleep(0.02)
    assert link.status.attempts == ["a"], "its lease is renewed"
    assert await attempt.take(0) == [], "and nothing is computed"
    link.drain()
    link.resume(attempt)
    told += await events_of(attempt)
    record = told.pop()
    assert "".join(one.text for one in told if isinstance(one, Piece)) == "".join(
        one.text for one in whole if isinstance(one, Piece)
    )
    assert [one.completion_tokens for one in told if isinstance(one, Piece)] == list(range(1, 61))
    assert (record.completion_tokens, record.preemptions) == (60, 1)
    async with asyncio.timeout(5):
        assert await worker.wait() == 0, "the drain waited for it"
    link.close()


async def test_one_that_is_told_before_its_prompt_is_ready(worker: Child, tmp_path: Path) -> None:
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    # Nearly always: where the worker was quicker, what has been generated is told.
    attempt = link.submit(submission("a", max_tokens=200))
    assert 0 <= await preempted(link, attempt) < 200
    link.resume(attempt)
    *_, record = await events_of(attempt)
    assert (record.completion_tokens, record.finish_reason) == (200, "length")
    other = link.submit(submission("b", max_tokens=200))
    calls: list[int] = []
    other.when_preempted(calls.append)
    link.preempt(other)
    link.abort(other)
    *_, record = await events_of(other)
    assert (calls, record.finish_reason) == ([record.completion_tokens], "aborted")
    link.close()


async def test_nobody_is_told_of_a_preemption_that_came_too_late(worker: Child, tmp_path: Path) -> None:
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    calls: list[int] = []
    ended = link.submit(submission("ended", max_tokens=1))
    ended.when_preempted(calls.append)
    await ended.record
    link.preempt(ended)
    lost = link.submit(submission("lost", max_tokens=None))
    while not any(isinstance(event, Piece) for event in await lost.take()):
        pass
    tokens = await preempted(link, lost)
    link.resume(lost)
    lost.when_preempted(calls.append)
    worker.kill()
    await worker.wait()
    assert (await events_of(lost))[-1] is LOST
    assert calls == []
    (record,) = [one for one in read_records(tmp_path / "p") if one.attempt_id == "lost"]
    assert (record.source, record.finish_reason) == ("progress_file", "error")
    assert record.completion_tokens >= tokens


async def test_a_gateway_that_vanishes_takes_a_preempted_attempt_with_it(
    worker: Child, tmp_path: Path
) -> None:
    link, _ = await WorkerLink.connect(tmp_path / "s", SystemClock())
    attempt = link.submit(submission("a", max_tokens=None))
    while not any(isinstance(event, Piece) for event in await attempt.take()):
        pass
    tokens = await preempted(link, attempt)
    link.close()
    async with asyncio.timeout(5):
        while not read_records(tmp_path / "p") or read_records(tmp_path / "p")[0].finish_reason == "error":
            await asyncio.sleep(0.02)
    (record,) = read_records(tmp_path / "p")
    assert (record.finish_reason, record.completion_tokens, record.preemptions) == ("aborted", tokens, 1)
