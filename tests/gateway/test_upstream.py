"""In front of a foreign server: its answers relayed, its counts in the ledger, its failures told plainly."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.scripted_upstream import USAGE, scripted_upstream
from tests.platform_harness import Platform, platform, until


class Pair:
    def __init__(self, upstream: Any, served: Platform) -> None:
        self.upstream = upstream
        self.served = served

    def chat(self, script: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
        """A chat and its ledger row."""
        reply = self.served.chat(script, **fields)
        row = self.served.request("GET", f"/v1/usage/{reply.headers['x-request-id']}").json
        return reply, row

    @property
    def last_body(self) -> dict[str, Any]:
        body: dict[str, Any] = self.upstream.seen[-1][1]
        return body


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    os.environ["HEADRACE_TEST_UPSTREAM_KEY"] = "sk-upstream"
    with scripted_upstream() as upstream:
        model = {
            "id": "relayed",
            "upstream": f"http://127.0.0.1:{upstream.server_address[1]}/v1",
            "upstream_model": "their-name",
            "upstream_key_env": "HEADRACE_TEST_UPSTREAM_KEY",
        }
        plain = {"id": "plain", "upstream": model["upstream"]}
        gone = {"id": "gone", "upstream": "http://127.0.0.1:9/v1"}
        with platform(
            tmp_path_factory.mktemp("upstream"),
            models=[model, plain, gone],
            keep_alive_ms=200,
            queue={"timeout_s": 2},
        ) as served:
            yield Pair(upstream, served)


def test_a_whole_answer_is_relayed_and_its_usage_recorded(pair: Pair) -> None:
    reply, row = pair.chat("go", max_new_tokens=5)
    assert reply.json["choices"][0]["message"]["content"] == "one two three"
    assert (row["prompt_tokens"], row["prompt_tokens_cached"], row["completion_tokens"]) == (11, 4, 3)
    assert (row["count_source"], row["outcome"], row["worker_id"]) == (
        "upstream_usage",
        "completed",
        "relayed-upstream",
    )
    assert reply.headers["x-usage-token-in"] == "11"
    headers, body = pair.upstream.seen[-1]
    assert body["model"] == "their-name"
    assert body["max_tokens"] == 5
    assert "max_new_tokens" not in body
    lowered = {name.lower(): value for name, value in headers.items()}
    assert lowered["authorization"] == "Bearer sk-upstream", "the client's key stays here"
    assert reply.headers["x-trace-id"] in lowered["traceparent"]


@pytest.mark.parametrize("model", ["relayed", "plain"])
@pytest.mark.parametrize("is_wanted", [False, True])
def test_usage_is_always_asked_for_and_shown_only_if_the_client_asked(
    pair: Pair, model: str, is_wanted: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if is_wanted else {}
    reply, row = pair.chat("go", stream=True, model=model, **options)
    assert reply.text == "one two three"
    assert pair.last_body["stream_options"] == {"include_usage": True}
    usages = [event["usage"] for event in reply.events[:-1] if event.get("usage")]
    assert usages == ([USAGE] if is_wanted else [])
    assert reply.events[-1] == "[DONE]"
    assert (row["completion_tokens"], row["count_source"]) == (3, "upstream_usage")


@pytest.mark.parametrize("script", ["cut", "no end mark", "error event", "malformed usage"])
def test_a_stream_that_breaks_ends_in_an_error_event_and_never_in_a_clean_end(
    pair: Pair, script: str
) -> None:
    reply, row = pair.chat(script, stream=True)
    assert reply.text == "one two three"
    assert reply.events[-1]["error"]["code"] == "upstream_error"
    assert b"[DONE]" not in reply.body
    assert (row["status"], row["outcome"]) == (502, "upstream_error")
    assert (row["completion_tokens"], row["count_source"]) == (3, "chunks")


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ("status 400", 400, "upstream_refused"),
        ("status 422", 422, "upstream_refused"),
        ("status 401", 502, "upstream_error"),
        ("status 500", 502, "upstream_error"),
        ("error body", 502, "upstream_error"),
        ("no json", 502, "upstream_error"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_upstream_refuses_keeps_a_status(
    pair: Pair, script: str, status: int, code: str, is_stream: bool
) -> None:
    reply, row = pair.chat(script, stream=is_stream)
    if is_stream and script in ("error body", "no json"):
        assert reply.events[-1]["error"]["code"] == code, "its 200 had already been passed on"
    else:
        assert (reply.status, reply.error["code"]) == (status, code)
        assert ("upstream says no" in reply.error["message"]) == (code == "upstream_refused")
    assert row["status"] == status
    assert row["completion_tokens"] == 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_full_upstream_gets_the_request_again_and_the_client_only_waits(
    pair: Pair, is_stream: bool
) -> None:
    before = pair.served.metric("headrace_put_back_total", model="relayed")
    reply, row = pair.chat(f"busy 2 {is_stream}", stream=is_stream)
    assert reply.status == 200
    assert (row["outcome"], row["completion_tokens"]) == ("completed", 3)
    assert row["attempt_ids"] == [f"{row['request_id']}.3"], "the third try was the one that ran"
    assert pair.served.metric("headrace_put_back_total", model="relayed") == before + 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_upstream_that_stays_full_is_a_queue_timeout_and_nothing_is_charged(
    pair: Pair, is_stream: bool
) -> None:
    reply, row = pair.chat(f"busy 1000 {is_stream}", stream=is_stream)
    assert (reply.status, reply.error["limit_type"]) == (429, "queue_timeout")
    assert (row["outcome"], row["charged_prompt_tokens"], row["count_source"]) == ("refused", 0, "none")
    assert pair.served.num_open() == 0
    # The upstream rests for a moment; whoever comes then waits for that and is served.
    assert pair.chat("go")[0].status == 200


def test_an_upstream_that_is_not_there_is_a_503_at_once(pair: Pair) -> None:
    reply, row = pair.chat("go", model="gone")
    assert (reply.status, reply.error["code"]) == (503, "upstream_error")
    assert reply.headers["retry-after"]
    assert (row["status"], row["outcome"], row["count_source"]) == (503, "upstream_error", "none")
    worker = next(one for one in pair.served.workers() if one["id"] == "gone-upstream")
    assert worker["status"] == "down"
    assert "cannot connect" in worker["last_error"]


def test_a_client_that_leaves_a_stalled_stream_is_charged_for_what_came(pair: Pair) -> None:
    before = len(pair.served.rows())
    chat = pair.served.open_chat("stall", stream=True)
    lines = 0
    while lines < 3:
        lines += chat.response.readline().startswith(b"data: ")
    chat.close()
    until(lambda: len(pair.served.rows()) == before + 1)
    row = pair.served.rows()[-1]
    assert (row["status"], row["outcome"], row["count_source"]) == (499, "client_closed", "chunks")
    assert row["completion_tokens"] == 3
    until(lambda: pair.served.metric("headrace_running") == 0)


def test_headrace_in_front_of_headrace(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The real thing as the foreign server."""
    with platform(tmp_path_factory.mktemp("inner")) as inner:
        os.environ["HEADRACE_TEST_INNER_KEY"] = inner.key
        model = {
            "id": "outer",
            "upstream": f"{inner.url}/v1",
            "upstream_model": "stub",
            "upstream_key_env": "HEADRACE_TEST_INNER_KEY",
        }
        with platform(tmp_path_factory.mktemp("outer"), models=[model]) as outer:
            reply = outer.chat("Hello", seed=3, max_tokens=9, stream=True)
            assert reply.text == inner.chat("Hello", seed=3, max_tokens=9, stream=True).text != ""
            row = outer.request("GET", f"/v1/usage/{reply.headers['x-request-id']}").json
            (inner_row, _) = inner.rows()
            assert (row["prompt_tokens"], row["completion_tokens"]) == (
                inner_row["prompt_tokens"],
                inner_row["completion_tokens"],
            )
            assert inner_row["trace_id"] == row["trace_id"], "one trace through both"
