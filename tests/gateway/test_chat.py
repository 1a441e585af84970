"""Chats against a running server: replies, streams, headers, records."""

import re

import pytest

from tests.platform_harness import Platform, until


def record_of(served: Platform, request_id: str) -> dict[str, object]:
    reply = served.request("GET", f"/v1/usage/{request_id}")
    assert reply.status == 200, reply.body
    found: dict[str, object] = reply.json
    return found


def test_a_whole_reply_has_the_form_of_the_api_and_says_what_it_took(served: Platform) -> None:
    reply = served.chat(max_tokens=7, seed=1)
    assert reply.status == 200
    body = reply.json
    assert body["object"] == "chat.completion"
    assert body["model"] == "stub"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "length"
    usage = body["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (7, 7 + usage["prompt_tokens"])
    assert reply.headers["x-usage-token-in"] == str(usage["prompt_tokens"])
    assert reply.headers["x-usage-token-out"] == "7"
    assert re.fullmatch(r"\d+\.\d\d", reply.headers["x-usage-gpu-memory"])
    assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"])
    assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-trace-id"])
    assert "X-Usage-Token-In" in reply.headers["access-control-expose-headers"]


def test_a_stream_says_the_same_as_a_whole_reply_in_the_right_order(served: Platform) -> None:
    whole = served.chat(max_tokens=9, seed=5).json["choices"][0]["message"]["content"]
    reply = served.chat(max_tokens=9, seed=5, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers
    assert reply.text == whole
    *chunks, last, done = reply.events
    assert done == "[DONE]"
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks), "nobody asked for usage"


def test_the_usage_chunk_comes_last_and_only_if_asked_for_and_the_record_is_the_same(
    served: Platform,
) -> None:
    reply = served.chat(max_tokens=5, seed=5, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = reply.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks)
    with_usage = record_of(served, reply.headers["x-request-id"])
    without = record_of(served, served.chat(max_tokens=5, seed=5, stream=True).headers["x-request-id"])
    for field in ("prompt_tokens", "completion_tokens", "status", "outcome", "count_source", "mode"):
        assert with_usage[field] == without[field], field


def test_the_record_holds_what_the_engine_counted(served: Platform) -> None:
    reply = served.chat("Count me.", max_tokens=6, user="alice")
    record = record_of(served, reply.headers["x-request-id"])
    assert record["state"] == "settled"
    assert record["status"] == 200
    assert record["outcome"] == "completed"
    assert record["count_source"] == "engine"
    assert record["completion_tokens"] == 6
    assert record["prompt_tokens"] == reply.json["usage"]["prompt_tokens"]
    assert record["prompt_tokens_estimated"] >= record["prompt_tokens"]  # type: ignore[operator]
    assert record["tenant_id"] == "default"
    assert record["user_id"] == "alice"
    assert record["worker_id"] == "stub-0"
    assert record["trace_id"] == reply.headers["x-trace-id"]
    times = [record[name] for name in ("queue_enter_ts", "start_ts", "first_token_ts", "end_ts")]
    assert times == sorted(times)  # type: ignore[type-var]
    assert record["gpu_memory_mb"] > 0  # type: ignore[operator]


def test_the_same_seed_gives_the_same_answer_and_a_stop_string_ends_it(served: Platform) -> None:
    first, second = (served.chat(seed=3, max_tokens=20).json for _ in range(2))
    text = first["choices"][0]["message"]["content"]
    assert second["choices"][0]["message"]["content"] == text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = served.chat(seed=3, max_tokens=20, stop=[stop]).json["choices"][0]
    assert stopped["message"]["content"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_multi_byte_text_arrives_whole(served: Platform) -> None:
    texts = [served.chat(seed=seed, max_tokens=40, stream=True).text for seed in range(6)]
    assert all("\ufffd" not in text for text in texts)
    assert any("水" in text for text in texts)
    assert any("🌊" in text for text in texts)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
def test_all_names_of_the_limit_count(served: Platform, name: str) -> None:
    assert served.chat(**{name: 3}).json["usage"]["completion_tokens"] == 3


def test_a_huge_limit_is_cut_to_the_context(served: Platform) -> None:
    reply = served.chat(max_tokens=1_000_000_000)
    assert reply.status == 200
    assert reply.json["choices"][0]["finish_reason"] == "stop"


def test_a_callers_trace_goes_on_and_a_malformed_one_does_not(served: Platform) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    good = served.request("GET", "/v1/models", headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    assert good.headers["x-trace-id"] == trace
    for bad in (f"00-{'0' * 32}-b7ad6b7169203331-01", "nonsense", f"ff-{trace}-b7ad6b7169203331-01"):
        reply = served.request("GET", "/v1/models", headers={"traceparent": bad})
        assert reply.headers["x-trace-id"] not in (trace, "0" * 32)


def test_models_are_listed_and_found_by_name(served: Platform) -> None:
    listed = served.request("GET", "/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["stub"]
    assert served.request("GET", "/v1/models/stub").json == listed["data"][0]
    assert served.request("GET", "/v1/models/other").error["code"] == "model_not_found"


def test_another_tenants_record_looks_like_none(served: Platform) -> None:
    request_id = served.chat(max_tokens=1).headers["x-request-id"]
    assert served.admin("POST", "/admin/v1/tenants", {"id": "curious"}).status == 201
    key = served.admin("POST", "/admin/v1/keys", {"tenant": "curious"}).json["key"]
    theirs = served.request("GET", f"/v1/usage/{request_id}", key=key)
    none = served.request("GET", "/v1/usage/req_" + "0" * 32, key=key)
    assert theirs.status == none.status == 404
    assert theirs.error["code"] == none.error["code"]


def test_thirty_two_chats_share_the_batch_and_all_end(served: Platform) -> None:
    connections = [served.open_chat(f"chat {number}", max_tokens=10 + number) for number in range(32)]
    replies = [connection.reply() for connection in connections]
    assert {reply.status for reply in replies} == {200}
    counts = [reply.json["usage"]["completion_tokens"] for reply in replies]
    assert counts == [10 + number for number in range(32)]
    url = served.workers()[0]["metrics_url"]
    assert served.metric("headrace_worker_batch_size_max", url=url) == 8
    until(lambda: served.metric("headrace_running") == 0)
    assert served.num_open() == 0
