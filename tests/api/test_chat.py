"""Decoding a chat request: strict, and never anything but a refusal."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api import chat, refusals
from headrace.errors import Refusal
from headrace.request.sampling import Sampling

MESSAGES = [{"role": "user", "content": "hi"}]


def decode(**fields: Any) -> chat.ChatCall:
    return chat.decode(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    try:
        chat.decode(body)
    except Refusal as refusal:
        assert refusal.status == 400
        assert json.loads(refusals.body(refusal))["error"]["message"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*chat.SERVED, *chat.UNSERVED, "other"]), _JSON, max_size=6))
def test_any_values_in_any_fields_are_decoded_or_refused_by_name(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": MESSAGES, **fields}
    try:
        call = chat.decode(json.dumps(body).encode())
    except Refusal as refusal:
        assert refusal.status == 400
    else:
        assert "other" not in fields
        assert call.messages
        assert all(isinstance(message.content, str) for message in call.messages)


def test_text_parts_become_one_text_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "水"}]
    call = decode(messages=[{"role": "developer", "content": parts}])
    assert (call.messages[0].role, call.messages[0].content) == ("system", "a水")


def test_what_the_client_leaves_out_comes_from_the_model() -> None:
    defaults = Sampling(temperature=0.2, top_p=0.9, top_k=40, seed=7)
    assert decode().sampling(defaults) == defaults
    asked = decode(temperature=0, top_p=0.5, top_k=0, seed=-1).sampling(defaults)
    assert asked == Sampling(temperature=0, top_p=0.5, top_k=0, seed=0xFFFF_FFFF)


@pytest.mark.parametrize("name", chat.UNSERVED)
def test_every_field_that_is_not_served_is_refused_by_name_and_null_is_fine(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        decode(**{name: {"some": "thing"}})
    assert (refused.value.code, refused.value.param) == ("unsupported_field", name)
    assert decode(**{name: None})


@pytest.mark.parametrize(("name", "value"), [("n", True), ("logprobs", 0), ("presence_penalty", False)])
def test_true_is_not_one(name: str, value: Any) -> None:
    with pytest.raises(Refusal):
        decode(**{name: value})


@pytest.mark.parametrize(
    ("fields", "sla", "priority"),
    [
        ({}, "normal", 0),
        ({"latency_sla": "low", "priority": 3}, "low", 3),
        ({"latency_sla": None, "service_tier": "flex"}, "throughput", 0),
        ({"service_tier": "priority"}, "low", 0),
        ({"service_tier": "default", "latency_sla": "throughput"}, "throughput", 0),
        ({"service_tier": "flex", "latency_sla": "throughput", "priority": 100}, "throughput", 100),
    ],
)
def test_how_soon_the_client_wants_its_answer(fields: dict[str, Any], sla: str, priority: int) -> None:
    call = decode(**fields)
    assert (call.latency_sla, call.priority) == (sla, priority)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"latency_sla": "soon"}, "latency_sla"),
        ({"priority": -1}, "priority"),
        ({"priority": 101}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"service_tier": "flex", "latency_sla": "low"}, "latency_sla"),
    ],
)
def test_wrong_wishes_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        decode(**fields)
    assert (refused.value.code, refused.value.param) == ("invalid_value", param)
