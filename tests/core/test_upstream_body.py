"""What a foreign server is asked: usage always, and nothing that a client could hide or win back."""

import json

import pytest

from headrace.api import chat
from headrace.core.upstream import upstream_body

START = b'{"model":"a","messages":[{"role":"user","content":"hi"}]'
MESSAGES = [{"role": "user", "content": "hi"}]


def passed_on(body: bytes, *, model: str | None = None, max_tokens: int | None = None) -> bytes:
    """As it is sent when a client has sent `body`."""
    call = chat.decode(body)
    return upstream_body(
        body, is_stream=call.is_stream, model=model, max_tokens=max_tokens, is_plain=call.is_plain
    )


def sent(rest: bytes, *, model: str | None = None, max_tokens: int | None = None) -> dict[str, object]:
    """What the upstream reads besides the messages, names that stand twice included."""
    pairs = json.loads(
        passed_on(START + rest, model=model, max_tokens=max_tokens), object_pairs_hook=lambda found: found
    )
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), "a name stands twice: a reader may take either"
    found = dict(pairs)
    del found["messages"]
    return found


@pytest.mark.parametrize(
    "rest",
    [
        b',"stream":true}',
        b',"stream":true} \n',
        b',"stream":true,"stream_options":{"include_usage":false}}',
        b',"stream":true,"stream_options":null}',
        rb',"stream":true,"stream\u005foptions":{"include_usage":false}}',
        rb',"stream_options":null,"stream":true,"stream\u005foptions":null}',
        rb',"str\u0065am":true,"user":"\u00e4\""}',
    ],
)
def test_usage_is_asked_for_whatever_the_client_wrote(rest: bytes) -> None:
    found = sent(rest)
    assert found["stream"] is True
    options = found["stream_options"]
    assert dict(options) == {"include_usage": True}  # type: ignore[call-overload]


def test_names_are_translated_also_when_they_are_hidden() -> None:
    assert sent(rb',"max\u005fnew_tokens":5}') == {"model": "a", "max_tokens": 5}
    assert sent(b',"max_new_tokens":null}') == {"model": "a"}
    assert sent(rb',"max_new_tokens":5,"max_new_tok\u0065ns":null}') == {"model": "a"}
    assert sent(b',"max_new_tokens":5}', model="b") == {"max_tokens": 5, "model": "b"}


def test_a_limits_maximum_is_put_in() -> None:
    assert sent(b"}", max_tokens=7)["max_tokens"] == 7


def test_what_needs_no_change_is_relayed_as_it_is() -> None:
    body = START + rb' , "user" : "\u0061" }'
    assert passed_on(body) is body


def test_what_only_this_queue_understands_is_not_passed_on() -> None:
    rest = b',"latency_sla":"throughput","priority":2,"service_tier":"flex","temperature":0.5}'
    assert sent(rest) == {
        "model": "a",
        "service_tier": "flex",
        "temperature": 0.5,
    }


def test_a_maximum_of_ours_wins_over_every_name_of_the_clients() -> None:
    body = json.dumps({"model": "m", "max_completion_tokens": 500, "allow_degrade": True}).encode()
    sent = json.loads(upstream_body(body, is_stream=False, model="small", max_tokens=20, is_plain=False))
    assert sent == {"model": "small", "max_completion_tokens": 20}
