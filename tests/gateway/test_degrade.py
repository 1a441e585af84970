"""Served with less instead of refused: where the tenant allows it and the request does not forbid it."""

from collections.abc import Iterator

import pytest

from tests.platform_harness import OpenChat, Platform, Reply, platform, until

SLOW = {"decode_us_per_step": 20_000, "output_tokens": 400}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """`large` has one place and none to wait, `small` four."""
    models = [
        {"id": "large", "degrade_to": "middle", "engine": {"max_batch_size": 1, "stub": SLOW}},
        {"id": "middle", "degrade_to": "small", "engine": {"max_batch_size": 1, "stub": SLOW}},
        {"id": "small", "engine": {"max_batch_size": 4, "stub": {}}},
    ]
    with platform(tmp_path_factory.mktemp("degrade"), models=models, queue={"length": 0}) as running:
        yield running


def key_of(served: Platform, tenant: str, **fields: object) -> str:
    assert served.admin("POST", "/admin/v1/tenants", {"id": tenant, **fields}).status == 201
    key: str = served.admin("POST", "/admin/v1/keys", {"tenant": tenant}).json["key"]
    return key


@pytest.fixture
def busy(served: Platform) -> Iterator[None]:
    """All places of `large` and `middle` are taken."""
    chats: list[OpenChat] = [
        served.open_chat("long", model=model, stream=True, max_tokens=400) for model in ("large", "middle")
    ]
    until(lambda: served.metric("headrace_running") == 2)
    yield
    for chat in chats:
        chat.close()
    until(lambda: served.metric("headrace_running") == 0)


def outcomes(served: Platform, request_id: str, key: str) -> tuple[str, str]:
    row = served.request("GET", f"/v1/usage/{request_id}", key=key).json
    return row["model"], row["outcome"]


def ask(served: Platform, key: str, **fields: object) -> Reply:
    return served.chat("Hello there", key=key, **{"model": "large", "max_tokens": 4, **fields})


@pytest.mark.usefixtures("busy")
def test_a_cheaper_model_where_the_own_has_no_place(served: Platform) -> None:
    key = key_of(served, "modest", allow_degrade=True)
    reply = ask(served, key)
    assert (reply.status, reply.json["model"]) == (200, "small"), reply.body
    assert reply.headers["x-governance-action"] == "DEGRADED_MODEL"
    assert reply.headers["x-model"] == "small"
    # One operation, by the model that served it.
    assert outcomes(served, reply.headers["x-request-id"], key) == ("small", "completed")
    assert served.metric("headrace_refusals_total") == 0


@pytest.mark.usefixtures("busy")
def test_not_without_leave(served: Platform) -> None:
    proud = key_of(served, "proud")
    refused = ask(served, proud, allow_degrade=True)
    assert (refused.status, refused.error["limit_type"]) == (429, "queue_full")
    modest = key_of(served, "modest-but", allow_degrade=True)
    refused = ask(served, modest, allow_degrade=False)
    assert (refused.status, refused.error["limit_type"]) == (429, "queue_full")
    until(lambda: outcomes(served, refused.headers["x-request-id"], modest) == ("large", "refused"))


@pytest.mark.usefixtures("busy")
def test_the_refusal_is_that_of_the_model_asked_for(served: Platform) -> None:
    key = key_of(served, "narrow", allow_degrade=True, model_limits={"small": {"max_prompt_tokens": 1}})
    refused = ask(served, key)
    assert (refused.status, refused.error["limit_type"]) == (429, "queue_full")
    until(lambda: outcomes(served, refused.headers["x-request-id"], key) == ("large", "refused"))


def test_a_shorter_answer_where_tokens_are_limited(served: Platform) -> None:
    key = key_of(served, "short", allow_degrade=True, limits={"tpm": 200})
    reply = ask(served, key, model="small", max_tokens=1000, stream=True)
    assert reply.status == 200
    assert reply.headers["x-governance-action"] == "DEGRADED_MAX_TOKENS"
    prompt = 200 - int(reply.headers["x-max-tokens"])
    assert 2 <= prompt <= 20, "counted, not the bound"
    # Until what is left is of no use any more.
    replies = [ask(served, key, model="small", max_tokens=1000) for _ in range(6)]
    assert all(int(one.headers["x-max-tokens"]) >= 16 for one in replies if one.status == 200)
    refused = replies[-1]
    assert (refused.status, refused.error["limit_type"]) == (429, "tpm")
    assert refused.headers["x-governance-action"] == "THROTTLED"
    until(lambda: outcomes(served, refused.headers["x-request-id"], key) == ("small", "refused"))


def test_nothing_is_taken_away_where_all_fits(served: Platform) -> None:
    key = key_of(served, "roomy", allow_degrade=True, limits={"tpm": 1200})
    reply = ask(served, key, model="small", max_tokens=1000)
    assert (reply.status, "x-governance-action" in reply.headers) == (200, False)
    shown = served.admin("PATCH", "/admin/v1/tenants/roomy", {"allow_degrade": False}).json
    assert shown["allow_degrade"] is False
    refused = ask(served, key, model="small", max_tokens=1190)
    assert (refused.status, refused.error["limit_type"]) == (429, "tpm")
