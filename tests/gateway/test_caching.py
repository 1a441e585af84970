"""What a tenant's requests share: prefixes and conversations; what they never share; sessions."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.platform_harness import Platform, Reply, platform

STUB = {"decode_us_per_step": 1_000, "output_tokens": 24, "prefill_us_per_token": 10}
LONG = "Everything that runs downhill can be measured. " * 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    model = {"id": "stub", "engine": {"max_batch_size": 4, "max_context_tokens": 1024, "stub": STUB}}
    with platform(tmp_path_factory.mktemp("caching"), models=[model], session_ttl_s=3) as running:
        yield running


def new_key(served: Platform, tenant: str, **fields: Any) -> str:
    assert served.admin("POST", "/admin/v1/tenants", {"id": tenant, **fields}).status == 201
    key: str = served.admin("POST", "/admin/v1/keys", {"tenant": tenant}).json["key"]
    return key


def chat(served: Platform, key: str, *contents: str, **fields: Any) -> Reply:
    """A conversation: user and assistant take turns."""
    messages = [
        {"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)
    ]
    reply = served.request(
        "POST", "/v1/chat/completions", {"model": "stub", "messages": messages, **fields}, key=key
    )
    assert reply.status == 200, reply.body
    return reply


def cached(reply: Reply) -> int:
    tokens: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_prefix_is_computed_once_for_a_tenant_and_the_row_says_so(served: Platform) -> None:
    key = new_key(served, "prefix")
    first = chat(served, key, LONG + "What is a weir?", max_tokens=4)
    second = chat(served, key, LONG + "And what is a sluice?", max_tokens=4)
    assert cached(first) == 0
    shared = len(LONG) // 4
    assert shared - 32 <= cached(second) <= shared + 8
    row = served.request("GET", f"/v1/usage/{second.headers['x-request-id']}", key=key).json
    assert row["prompt_tokens_cached"] == cached(second)
    assert row["prompt_tokens"] == second.json["usage"]["prompt_tokens"]


def test_another_tenant_shares_nothing(served: Platform) -> None:
    one, other = new_key(served, "one"), new_key(served, "other")
    text = LONG + "A secret of one."
    chat(served, one, text, max_tokens=4)
    assert cached(chat(served, other, text, max_tokens=4)) == 0
    assert cached(chat(served, one, text, max_tokens=4)) > 200


def test_answers_do_not_depend_on_what_was_cached(served: Platform) -> None:
    """The stub's answer follows from every token that a slot holds, so a wrong one would show."""
    warm, cold = new_key(served, "warm"), new_key(served, "cold")
    for question in ("Why?", "Why? And how?", "Why? And how? And when?"):
        texts = {
            chat(served, key, LONG + question, seed=5).json["choices"][0]["message"]["content"]
            for key in (warm, cold, warm)
        }
        assert len(texts) == 1


def test_a_conversation_pays_for_its_new_tokens_only(served: Platform) -> None:
    key = new_key(served, "talk")
    session = served.request("POST", "/v1/sessions", {}, key=key)
    assert session.status == 201
    session_id = session.json["id"]
    turns = [LONG]
    for number in range(5):
        reply = chat(served, key, *turns, session_id=session_id, max_tokens=8)
        prompt = reply.json["usage"]["prompt_tokens"]
        if number:
            assert prompt - cached(reply) < 40, "the stub's words are not its tokens; the rest is taken over"
        turns += [reply.json["choices"][0]["message"]["content"], f"And then, number {number}?"]


def test_sessions_are_their_tenants_and_end(served: Platform) -> None:
    key, stranger = new_key(served, "mine"), new_key(served, "stranger")
    begun = served.request("POST", "/v1/sessions", None, key=key).json
    assert begun["object"] == "session" and begun["id"].startswith("sess_") and len(begun["id"]) == 37
    path = f"/v1/sessions/{begun['id']}"
    assert served.request("GET", path, key=key).json["id"] == begun["id"]
    body = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "session_id": begun["id"]}
    for foreign in (
        served.request("GET", path, key=stranger),
        served.request("DELETE", path, key=stranger),
        served.request("POST", "/v1/chat/completions", body, key=stranger),
        served.request(
            "POST", "/v1/chat/completions", {**body, "session_id": "sess_" + "0" * 32}, key=stranger
        ),
    ):
        assert (foreign.status, foreign.error["code"]) == (404, "session_not_found")
    assert chat(served, key, LONG, session_id=begun["id"], max_tokens=2).status == 200
    assert served.request("DELETE", path, key=key).json["deleted"] is True
    assert served.request("POST", "/v1/chat/completions", body, key=key).status == 404
    assert cached(chat(served, key, LONG, max_tokens=2)) == 0, "and what was kept of it is gone"


def test_a_session_ends_on_time(served: Platform) -> None:
    key = new_key(served, "timed")
    begun = served.request("POST", "/v1/sessions", {}, key=key).json
    assert 0 <= begun["expires_at"] - begun["created"] - 3 <= 1
    import time

    time.sleep(3.2)
    assert served.request("GET", f"/v1/sessions/{begun['id']}", key=key).status == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"conversation_id": "x" * 129}, "conversation_id"),
        ({"conversation_id": "a", "session_id": "b"}, "conversation_id"),
        ({"messages": [{"role": "user", "content": "x", "cache_control": {"type": "for ever"}}]}, None),
        ({"messages": [{"role": "user", "content": "x", "cache_control": {"ttl": 5}}]}, None),
    ],
)
def test_wrong_fields_are_named(served: Platform, fields: dict[str, Any], param: str | None) -> None:
    body = {"model": "stub", "messages": [{"role": "user", "content": "x"}], **fields}
    reply = served.request("POST", "/v1/chat/completions", body)
    assert reply.status == 400
    if param:
        assert reply.error["param"] == param
    else:
        assert "cache_control" in reply.error["message"]


def test_metrics_move(served: Platform) -> None:
    url = served.workers()[0]["metrics_url"]
    before = {
        name: served.metric(name, url=url)
        for name in ("kv_cache_hit_tokens_total", "kv_cache_prompt_tokens_total", "kv_cache_evictions_total")
    }
    key = new_key(served, "metrics")
    for _ in range(2):
        chat(served, key, LONG + "moving", max_tokens=2, conversation_id="c")
    for number in range(6):
        chat(served, key, f"{number} " + LONG, max_tokens=2)
    assert served.metric("kv_cache_hit_tokens_total", url=url) > before["kv_cache_hit_tokens_total"] + 200
    assert served.metric("kv_cache_prompt_tokens_total", url=url) > before["kv_cache_prompt_tokens_total"]
    assert served.metric("kv_cache_evictions_total", url=url) > before["kv_cache_evictions_total"]
    assert 0 < served.metric("kv_cache_hit_rate_prefix", url=url) < 1
    assert 0 < served.metric("kv_cache_hit_rate_session", url=url) <= 1
    assert served.metric("kv_cache_bytes_kept", url=url) > 0
    assert served.metric("kv_cache_bytes_parked", url=url) > 0
    assert served.metric("headrace_worker_placements_total", url=url, source="place") > 0
