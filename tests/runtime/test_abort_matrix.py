"""However a request ends early, its row holds what the engine counted: one row, the engine's own counters."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.platform_harness import Platform, platform, until
from tests.runtime.counting_upstream import PROMPT_TOKENS, CountingUpstream, counting_upstream

STUB = {"decode_us_per_step": 10_000, "output_tokens": 400, "prefill_us_per_token": 100}
PROMPT = "How deep is the river, and who has measured it?"


def model(name: str, **stub: int) -> dict[str, Any]:
    return {
        "id": name,
        "engine": {"max_batch_size": 4, "max_context_tokens": 512, "stub": {**STUB, **stub}},
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """An engine of our own that is fine, and one that fails at every seventeenth call."""
    with platform(
        tmp_path_factory.mktemp("own"),
        models=[model("fine"), model("faulty", fault_every_steps=17)],
        request_timeout_s=1.0,
    ) as running:
        yield running


class Engine:
    """The counters of the worker process behind a model."""

    def __init__(self, served: Platform, name: str) -> None:
        self._served = served
        self._url = next(one["metrics_url"] for one in served.workers() if one["model"] == name)
        self._before = self._counters()

    def _counters(self) -> tuple[int, int]:
        return (
            int(self._served.metric("headrace_worker_prefill_tokens_total", url=self._url)),
            int(self._served.metric("headrace_worker_generated_tokens_total", url=self._url)),
        )

    def counted(self) -> tuple[int, int]:
        """(prompt tokens computed, tokens generated) since this was made."""
        prompt, generated = self._counters()
        return prompt - self._before[0], generated - self._before[1]

    def counted_at_rest(self) -> tuple[int, int]:
        """The same, once the counters stand still."""
        seen: list[tuple[int, int]] = []

        def stand_still() -> bool:
            seen.append(self.counted())
            return len(seen) > 3 and len(set(seen[-4:])) == 1

        until(stand_still, what="an engine at rest")
        return seen[-1]


def one_row(served: Platform, number: int) -> dict[str, Any]:
    """The one record since there were `number`, once nothing is open."""
    until(lambda: len(served.rows()) > number and not served.num_open(), what="the operation is settled")
    (row,) = served.rows()[number:]
    return row


def agrees(row: dict[str, Any], counted: tuple[int, int]) -> bool:
    return (row["prompt_tokens"], row["completion_tokens"]) == counted


def read_chunks(chat: Any, number: int) -> None:
    """Read so many chunks with text."""
    while number:
        line = chat.response.readline()
        if line.startswith(b"data: ") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            number -= 1


# --- an engine of our own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_client_leaves_after_some_tokens(served: Platform, tokens: int, is_stream: bool) -> None:
    before, engine = len(served.rows()), Engine(served, "fine")
    chat = served.open_chat(PROMPT, model="fine", max_tokens=390, stream=is_stream)
    if is_stream:
        read_chunks(chat, tokens)
    else:  # nothing is seen before the end: the engine's own counter says how far it is
        until(lambda: engine.counted()[1] >= tokens)
    chat.close()
    row = one_row(served, before)
    assert agrees(row, engine.counted_at_rest())
    assert tokens <= row["completion_tokens"] < 390, "the engine was stopped"
    if row["count_source"] == "none":
        assert tokens == 0, "it left before a worker had it"
    else:
        assert (row["status"], row["outcome"], row["count_source"]) == (499, "client_closed", "engine")


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_time_is_over(served: Platform, is_stream: bool) -> None:
    before, engine = len(served.rows()), Engine(served, "fine")
    reply = served.chat(PROMPT, model="fine", max_tokens=390, stream=is_stream)
    error = reply.events[-1]["error"] if is_stream else reply.error
    assert error["code"] == "deadline_exceeded"
    assert reply.status == (200 if is_stream else 504)
    assert b"[DONE]" not in reply.body
    row = one_row(served, before)
    assert (row["status"], row["outcome"], row["count_source"]) == (504, "timeout", "engine")
    assert agrees(row, engine.counted_at_rest())
    assert 0 < row["completion_tokens"] < 390
    if is_stream:
        assert num_chunks(reply) <= row["completion_tokens"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_engine_fails_in_the_middle(served: Platform, is_stream: bool) -> None:
    before, engine = len(served.rows()), Engine(served, "faulty")
    reply = served.chat(PROMPT, model="faulty", max_tokens=60, stream=is_stream)
    error = reply.events[-1]["error"] if is_stream else reply.error
    assert error["code"] == "engine_error"
    assert reply.status == (200 if is_stream else 500)
    assert b"[DONE]" not in reply.body
    row = one_row(served, before)
    assert (row["status"], row["outcome"], row["count_source"]) == (500, "worker_error", "engine")
    assert agrees(row, engine.counted_at_rest())
    if is_stream:
        assert num_chunks(reply) == row["completion_tokens"] > 0, "the error's own words are no tokens"


def num_chunks(reply: Any) -> int:
    return sum(
        bool(choice["delta"].get("content"))
        for event in reply.events
        if isinstance(event, dict)
        for choice in event.get("choices", ())
    )


# --- a foreign server ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def relayed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[CountingUpstream, Platform]]:
    with counting_upstream() as upstream:
        models = [{"id": "relayed", "upstream": upstream.url}]
        with platform(tmp_path_factory.mktemp("relayed"), models=models, request_timeout_s=1.5) as running:
            yield upstream, running


Relayed = tuple[CountingUpstream, Platform]


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_the_client_leaves_a_relayed_stream(relayed: Relayed, tokens: int) -> None:
    upstream, served = relayed
    before = len(served.rows())
    chat = served.open_chat(f"{tokens} stall", stream=True)
    read_chunks(chat, tokens)
    if not tokens:
        assert chat.response.status == 200, "the upstream has begun"
    chat.close()
    row = one_row(served, before)
    assert (row["status"], row["outcome"]) == (499, "client_closed")
    assert row["completion_tokens"] == upstream.generated == tokens
    assert row["count_source"] == ("chunks" if tokens else "none")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_relayed_error_behind_a_good_status(relayed: Relayed, is_stream: bool) -> None:
    upstream, served = relayed
    before = len(served.rows())
    reply = served.chat("5 error", stream=is_stream)
    row = one_row(served, before)
    assert (row["status"], row["outcome"]) == (502, "upstream_error")
    if is_stream:
        assert reply.events[-1]["error"]["code"] == "upstream_error"
        assert row["completion_tokens"] == num_chunks(reply) == upstream.generated == 5
    else:
        assert (reply.status, reply.error["code"]) == (502, "upstream_error")
        assert row["completion_tokens"] == 0, "nothing was delivered, and nobody says what was generated"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_relayed_answer_takes_too_long(relayed: Relayed, is_stream: bool) -> None:
    upstream, served = relayed
    before = len(served.rows())
    reply = served.chat("5 stall", stream=is_stream)
    row = one_row(served, before)
    error = reply.events[-1]["error"] if is_stream else reply.error
    assert (error["code"], row["status"], row["outcome"]) == ("deadline_exceeded", 504, "timeout")
    assert b"[DONE]" not in reply.body
    if is_stream:
        assert row["completion_tokens"] == num_chunks(reply) == upstream.generated == 5
        assert row["count_source"] == "chunks"
    else:
        assert reply.status == 504
        assert row["completion_tokens"] == 0, "nothing was delivered, and nobody says what was generated"


def test_a_relayed_stream_without_usage_is_counted_by_its_chunks(relayed: Relayed) -> None:
    upstream, served = relayed
    before = len(served.rows())
    reply = served.chat("5 no usage", stream=True, stream_options={"include_usage": True})
    assert reply.events[-1] == "[DONE]"
    row = one_row(served, before)
    assert (row["status"], row["outcome"], row["count_source"]) == (200, "completed", "chunks")
    assert row["completion_tokens"] == num_chunks(reply) == upstream.generated == 5


def test_a_relayed_answer_without_usage_is_not_recorded_as_nothing(relayed: Relayed) -> None:
    _, served = relayed
    before = len(served.rows())
    assert served.chat("5 no usage").status == 200
    row = one_row(served, before)
    assert (row["outcome"], row["count_source"]) == ("completed", "unknown")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_relayed_answer_with_usage_is_counted_by_it(relayed: Relayed, is_stream: bool) -> None:
    upstream, served = relayed
    before = len(served.rows())
    assert served.chat("5 done", stream=is_stream).status == 200
    row = one_row(served, before)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (PROMPT_TOKENS, upstream.generated)
    assert row["count_source"] == "upstream_usage"
