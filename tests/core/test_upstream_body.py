"""What a foreign server is asked: usage always, and nothing that a client could hide or win back."""

import json

import pytest

from headrace.core.upstream import upstream_body


def sent(body: bytes, **changes: object) -> dict[str, object]:
    """As the upstream reads it, names that stand twice included."""
    given = {"is_stream": True, "model": None, "max_tokens": None, **changes}
    found: dict[str, object] = json.loads(upstream_body(body, **given))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream":true,"messages":[]}',
        b' {"stream":true} \n',
        b'{"stream":true,"stream_options":{"include_usage":false}}',
        b'{"stream":true,"stream_options":null}',
        rb'{"stream":true,"stream\u005foptions":{"include_usage":false}}',
        rb'{"stream_options":null,"stream":true,"stream\u005foptions":null}',
    ],
)
def test_usage_is_asked_for_whatever_the_client_wrote(body: bytes) -> None:
    assert sent(body)["stream_options"] == {"include_usage": True}


def test_names_are_translated_also_when_they_are_hidden() -> None:
    assert sent(rb'{"max\u005fnew_tokens":5}', is_stream=False) == {"max_tokens": 5}
    assert sent(b'{"max_new_tokens":5,"model":"a"}', is_stream=False, model="b") == {
        "max_tokens": 5,
        "model": "b",
    }


def test_a_limits_maximum_is_put_in() -> None:
    assert sent(b'{"model":"a"}', is_stream=False, max_tokens=7)["max_tokens"] == 7


def test_what_needs_no_change_is_relayed_as_it_is() -> None:
    body = b'{ "model" : "a" }'
    assert upstream_body(body, is_stream=False, model=None, max_tokens=None) is body
