"""The guard by itself: what it does with bodies that come slowly or never end."""

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers

from headrace.admin import guard
from headrace.admin.problems import Problem

pytestmark = pytest.mark.asyncio


async def whole(messages: list[dict[str, Any]], headers: dict[str, str] | None = None) -> Any:
    queue = list(messages)

    async def receive() -> Any:
        if not queue:
            await asyncio.Event().wait()
        return queue.pop(0)

    return await guard._whole_body(Headers(headers or {}), receive)


async def test_a_body_in_pieces_is_given_whole() -> None:
    receive = await whole(
        [
            {"type": "http.request", "body": b"ab", "more_body": True},
            {"type": "http.request", "body": b"c", "more_body": False},
            {"type": "http.disconnect"},
        ]
    )
    assert await receive() == {"type": "http.request", "body": b"abc", "more_body": False}
    assert await receive() == {"type": "http.disconnect"}


async def test_a_body_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS_MAX", 0.01)
    with pytest.raises(Problem) as problem:
        await whole([{"type": "http.request", "body": b"a", "more_body": True}])
    assert (problem.value.status, problem.value.code) == (408, "body_too_slow")


@pytest.mark.parametrize("length", ["-1", "1e9", "\u0661", ""])
async def test_a_bad_length_is_refused_before_reading(length: str) -> None:
    raw = Headers(raw=[(b"content-length", length.encode("utf-8"))])
    with pytest.raises(Problem) as problem:
        await guard._whole_body(raw, lambda: pytest.fail("read"))  # type: ignore[arg-type]
    assert problem.value.status == 413


@pytest.mark.parametrize("length", ["9" * 5000, str(guard.BODY_BYTES_MAX + 1)])
async def test_a_body_said_to_be_too_large_is_read_on_for_a_while_and_dropped(length: str) -> None:
    read = 0

    async def receive() -> dict[str, object]:
        nonlocal read
        read += 1_000_000
        return {"type": "http.request", "body": b"x" * 1_000_000, "more_body": True}

    with pytest.raises(Problem) as problem:
        await guard._whole_body(Headers(raw=[(b"content-length", length.encode())]), receive)  # type: ignore[arg-type]
    assert problem.value.status == 413
    assert guard.DISCARDED_BYTES_MAX <= read <= guard.DISCARDED_BYTES_MAX + 1_000_000


async def test_endless_bodies_are_cut() -> None:
    with pytest.raises(Problem) as problem:
        await whole([{"type": "http.request", "body": b"x" * 1000, "more_body": True}] * 100)
    assert problem.value.status == 413
