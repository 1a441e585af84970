"""The bytes of a prompt bound its tokens: never fewer than there are, hardly more."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from headrace.api import chat
from headrace.gateway.acceptance import _bytes_max

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=200), min_size=1, max_size=3)


@given(TEXTS, st.booleans(), st.sampled_from(["", "x", "plain text " * 40]))
@example(["\\\\\n" * 200], True, "")
@example(["é" * 400], True, "")
@example(["界" * 400], False, "")
def test_never_fewer_than_the_bytes_and_at_most_an_eighth_more(
    texts: list[str], is_ascii: bool, more: str
) -> None:
    messages = [{"role": "user", "content": text + more} for text in texts]
    body = json.dumps({"model": "m", "messages": messages}, ensure_ascii=is_ascii).encode()
    call = chat.decode(body)
    exact = sum(len(message.content.encode()) for message in call.messages)
    assert exact <= _bytes_max(call.messages, body) <= exact * 9 / 8


def test_a_long_text_of_a_few_other_letters_is_not_encoded_again() -> None:
    text = ("a naïve text " * 5000)[:65_000]
    content = [{"role": "user", "content": text}]
    body = json.dumps({"model": "m", "messages": content}, ensure_ascii=False).encode()
    assert _bytes_max(chat.decode(body).messages, body) == len(body)
