"""Everything a client can do wrong gets an answer that says what, where, and what is allowed."""

import base64
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.platform_harness import Platform, until

MESSAGES = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "stub", "messages": MESSAGES, **fields}


@pytest.mark.parametrize(
    ("sent", "status", "code", "param"),
    [
        (b"", 400, "invalid_body", None),
        (b"Why is the sky blue?", 400, "invalid_body", None),
        (b"[1, 2]", 400, "invalid_body", None),
        (b'{"model": "stub", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, "invalid_body", None),
        (b'{"model": "stub", "n": ' + b"[" * 100_000, 400, "invalid_body", None),
        ({"model": "stub"}, 400, "invalid_value", "messages"),
        ({"messages": MESSAGES}, 400, "invalid_value", "model"),
        (body(messages=[]), 400, "invalid_value", "messages"),
        (body(messages="hi"), 400, "invalid_value", "messages"),
        (body(messages=[{"role": "robot", "content": "hi"}]), 400, "invalid_value", "messages[0].role"),
        (body(messages=[{"role": "user"}]), 400, "invalid_value", "messages[0].content"),
        (body(messages=[{"role": "user", "content": "x", "colour": 1}]), 400, "unknown_field", "messages[0].colour"),
        (body(temprature=1), 400, "unknown_field", "temprature"),
        (body(max_tokens=0), 400, "invalid_value", "max_tokens"),
        (body(max_tokens=-5), 400, "invalid_value", "max_tokens"),
        (body(max_tokens=1.5), 400, "invalid_value", "max_tokens"),
        (body(max_tokens=10**30), 400, "invalid_value", "max_tokens"),
        (body(max_tokens=4, max_completion_tokens=5), 400, "invalid_value", "max_completion_tokens"),
        (body(temperature=-1), 400, "invalid_value", "temperature"),
        (body(temperature=1e308), 400, "invalid_value", "temperature"),
        (body(temperature="hot"), 400, "invalid_value", "temperature"),
        (body(top_p=0), 400, "invalid_value", "top_p"),
        (body(top_k=-1), 400, "invalid_value", "top_k"),
        (body(seed=2**70), 400, "invalid_value", "seed"),
        (body(stop=[""]), 400, "invalid_value", "stop"),
        (body(stop=["x"] * 17), 400, "invalid_value", "stop"),
        (body(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options"),
        (body(tools=[{"type": "function"}]), 400, "unsupported_field", "tools"),
        (body(n=2), 400, "unsupported_field", "n"),
        (body(response_format={"type": "json_object"}), 400, "unsupported_field", "response_format"),
        (body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
         400, "unsupported_field", "messages[0].content[0].type"),
        (b'{"model": "stub", "messages": [{"role": "user", "content": "x"}], "n": 1e400}', 400, "invalid_value", "n"),
        (body(user="a\x00b"), 400, "invalid_value", "user"),
        (body(model="gpt-7"), 404, "model_not_found", "model"),
        (body(messages=[{"role": "user", "content": "word " * 4000}]), 400, "context_length_exceeded", "messages"),
    ],
)  # fmt: skip
def test_bad_bodies(served: Platform, sent: Any, status: int, code: str, param: str | None) -> None:
    reply = served.request("POST", "/v1/chat/completions", sent)
    assert reply.status == status, reply.body
    assert reply.error["code"] == code
    assert reply.error["param"] == param
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["x-should-retry"] == "false"
    assert "x-request-id" in reply.headers


def test_values_that_change_nothing_are_accepted(served: Platform) -> None:
    reply = served.request(
        "POST",
        "/v1/chat/completions",
        body(n=1, tools=[], logprobs=False, presence_penalty=0, tool_choice=None, store=False,
             metadata={"a": "b"}, response_format={"type": "text"}, max_tokens=1),
    )  # fmt: skip
    assert reply.status == 200, reply.body


def test_a_prompt_longer_than_the_context_is_told_the_maximum_also_on_a_stream(served: Platform) -> None:
    for stream in (False, True):
        reply = served.chat("word " * 4000, stream=stream)
        assert reply.status == 400
        assert reply.error["prompt_tokens_max"] == 2047
        record = served.request("GET", f"/v1/usage/{reply.headers['x-request-id']}").json
        assert (record["outcome"], record["status"], record["completion_tokens"]) == ("refused", 400, 0)


def forged_keys(good: str) -> list[str]:
    head, payload, signature = good.removeprefix("hr_live_").split(".")
    none = (
        base64.urlsafe_b64encode(json.dumps({"alg": "none", "typ": "hr-key+jwt"}).encode())
        .rstrip(b"=")
        .decode()
    )
    return [
        "x",
        good[:-4],
        good.removeprefix("hr_live_"),
        f"hr_live_{none}.{payload}.",
        f"hr_live_{none}.{payload}.{signature}",
        f"hr_live_{head}.{payload[:-2]}AA.{signature}",
        "hr_live_" + "a" * 5000,
    ]


def test_no_key_and_bad_keys_get_one_and_the_same_answer(served: Platform) -> None:
    replies = [served.chat(key=None), served.chat(key=served.admin_key)]
    replies += [served.chat(key=key) for key in forged_keys(served.key)]
    assert {reply.status for reply in replies} == {401}
    assert len({reply.body for reply in replies}) == 1
    assert replies[0].headers["x-should-retry"] == "false"
    assert replies[0].headers["www-authenticate"].startswith("Bearer")
    assert served.metric("headrace_unauthenticated_total") >= len(replies)


def test_a_revoked_key_and_a_disabled_tenant_are_refused_at_once(served: Platform) -> None:
    served.admin("POST", "/admin/v1/tenants", {"id": "leaver"})
    made = [served.admin("POST", "/admin/v1/keys", {"tenant": "leaver"}).json for _ in range(2)]
    assert all(served.chat(key=one["key"], max_tokens=1).status == 200 for one in made)
    assert served.admin("DELETE", f"/admin/v1/keys/{made[0]['jti']}").status == 204
    assert served.chat(key=made[0]["key"]).status == 401
    assert served.chat(key=made[1]["key"], max_tokens=1).status == 200
    assert served.admin("PATCH", "/admin/v1/tenants/leaver", {"status": "disabled"}).status == 200
    assert served.chat(key=made[1]["key"]).status == 401
    assert served.admin("PATCH", "/admin/v1/tenants/leaver", {"status": "active"}).status == 200
    assert served.chat(key=made[1]["key"], max_tokens=1).status == 200


def test_scopes_are_asked_for(served: Platform) -> None:
    key = served.admin("POST", "/admin/v1/keys", {"tenant": "default", "scopes": ["chat:read"]}).json["key"]
    assert served.chat(key=key, max_tokens=1).status == 200
    streamed = served.chat(key=key, stream=True)
    assert (streamed.status, streamed.error["code"]) == (403, "missing_scope")
    assert "chat:stream" in streamed.error["message"]
    assert served.request("GET", "/v1/usage/req_1", key=key).status == 403


def test_wrong_routes_methods_and_media_types(served: Platform) -> None:
    assert served.request("GET", "/v1/nowhere").error["code"] == "route_not_found"
    wrong = served.request("GET", "/v1/chat/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    plain = served.request("POST", "/v1/chat/completions", b"hi", headers={"Content-Type": "text/plain"})
    assert (plain.status, plain.error["code"]) == (415, "unsupported_media_type")


def test_a_body_of_ten_megabytes_is_refused_before_it_is_read(served: Platform) -> None:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
            + served.key.encode()
            + b"\r\ncontent-type: application/json\r\ncontent-length: 10000000\r\n\r\n"
        )
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"body_too_large"' in answer or b'"code"' in answer
    assert b"x-request-id: req_" in answer


def test_a_stranger_is_refused_before_its_body_is_read(served: Platform) -> None:
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000000\r\n\r\n"
        )
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b'"invalid_api_key"' in answer
    assert b"x-request-id: req_" in answer


def test_health_needs_no_key(served: Platform) -> None:
    assert served.request("GET", "/healthz", key=None).json == {"status": "ok"}


def test_a_full_queue_refuses_at_once_and_a_long_wait_ends(narrow: Platform) -> None:
    running = narrow.open_chat(max_tokens=400)
    until(lambda: narrow.metric("headrace_running") == 1)
    waiting = [narrow.open_chat(max_tokens=1) for _ in range(2)]
    until(lambda: narrow.metric("headrace_queue_length") == 2)
    began = time.monotonic()
    refused = narrow.chat(max_tokens=1)
    assert time.monotonic() - began < 2, "a refusal does not wait for the queue"
    assert refused.status == 429
    assert refused.error["limit_type"] == "queue_full"
    assert (refused.error["limit"], refused.error["used"]) == (2, 2)
    assert int(refused.headers["retry-after"]) >= 1
    record = narrow.request("GET", f"/v1/usage/{refused.headers['x-request-id']}").json
    assert (record["status"], record["outcome"], record["count_source"]) == (429, "refused", "none")
    for connection in waiting:
        reply = connection.reply()
        assert (reply.status, reply.error["limit_type"]) == (429, "queue_timeout")
    running.close()
    until(lambda: narrow.num_open() == 0)


def test_a_waiting_stream_is_kept_warm_and_told_of_the_timeout_in_an_event(narrow: Platform) -> None:
    running = narrow.open_chat(max_tokens=400)
    until(lambda: narrow.metric("headrace_running") == 1)
    reply = narrow.chat(max_tokens=1, stream=True)
    assert reply.status == 200, "the headers were held back for 300 ms, then the stream began"
    assert reply.body.count(b": waiting\n\n") >= 5
    assert reply.events[-1]["error"]["limit_type"] == "queue_timeout"
    assert b"[DONE]" not in reply.body
    running.close()
    until(lambda: narrow.num_open() == 0)
