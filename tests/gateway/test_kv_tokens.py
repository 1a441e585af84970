"""A model whose workers hold few tokens, seen by clients."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.platform_harness import Platform, Reply, platform


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Four slots of 256 tokens, and 200 tokens for all of them."""
    engine = {
        "max_batch_size": 4,
        "max_context_tokens": 256,
        "kv_tokens": 200,
        "kv_layout": "unified",
        "stub": {"output_tokens": 1000},
    }
    with platform(tmp_path_factory.mktemp("small"), models=[{"id": "m", "engine": engine}]) as running:
        yield running


def ask(small: Platform, **fields: Any) -> Reply:
    return small.chat("word " * 40, **fields)


def test_an_answer_that_never_fits_is_refused_with_what_would(small: Platform) -> None:
    reply = ask(small, max_tokens=180)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        400,
        "context_length_exceeded",
        "max_tokens",
    )
    room = reply.error["max_tokens_max"]
    assert "workers hold 200 tokens" in reply.error["message"]
    assert f"at most {room}" in reply.error["message"]
    fits = ask(small, max_tokens=room)
    assert (fits.status, fits.json["usage"]["total_tokens"]) == (200, 200)
    cut = ask(small)
    assert (cut.status, cut.json["usage"]["total_tokens"]) == (200, 200)


def test_those_who_find_no_room_wait_and_all_are_answered_in_full(small: Platform) -> None:
    with ThreadPoolExecutor(6) as clients:
        replies = list(clients.map(lambda _: ask(small, max_tokens=100), range(6)))
    assert [reply.status for reply in replies] == [200] * 6
    assert {reply.json["usage"]["completion_tokens"] for reply in replies} == {100}
