"""What a prompt is recognised by: equal beginnings have equal keys, and nothing else has."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import bounds
from headrace.request.messages import Message
from headrace.scheduling.prompt_keys import PromptKeys, prompt_keys

messages_lists = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant"]),
        content=st.sampled_from(["", "a", "ab", "b", "x" * 1024, "x" * 3000, "é" * 9000, "xy" * 40]),
        is_cache_end=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def keys_of(messages: list[Message], *, group: str | None = None, is_kept_in_full: bool = True) -> PromptKeys:
    return prompt_keys(
        messages,
        tenant="t",
        group=group,
        session="t/c/k/talk",
        is_kept_in_full=is_kept_in_full,
        prompt_tokens=1000,
        ttl_us=1,
    )


def beginnings(messages: list[Message]) -> tuple[list[str], list[int]]:
    """What the keys stand for, one character after the other, and how many there are up to each message's end."""
    stream, found, so_far = "", [], []
    at = last = 0
    for message in messages:
        stream += f"\0{message.role}\0"
        for character in message.content:
            stream += character
            at += 1
            if at - last == max(1024, last // 8):
                found.append(stream)
                last = at
        if at > last:
            found.append(stream)
            last = at
        so_far.append(len(found))
    return found, so_far


@settings(deadline=None)
@given(messages_lists, messages_lists, st.integers(0, 8))
def test_keys_agree_exactly_as_far_as_the_texts_do(
    one: list[Message], other: list[Message], common: int
) -> None:
    first, second = one, one[:common] + other
    mine, theirs = keys_of(first).blocks, keys_of(second).blocks
    words, others = beginnings(first)[0], beginnings(second)[0]
    assert (len(mine), len(theirs)) == (len(words), len(others))
    known = dict(zip(words, mine, strict=True)) | dict(zip(others, theirs, strict=True))
    assert [known[word] for word in words] == list(mine), "the same beginning, the same key"
    assert len(set(known.values())) == len(known), "and no other one"


@settings(deadline=None)
@given(messages_lists)
def test_only_what_is_marked_is_shared_or_kept_where_no_more_may_be(messages: list[Message]) -> None:
    _, so_far = beginnings(messages)
    marked = [number for number, message in enumerate(messages) if message.is_cache_end]
    up_to = so_far[marked[-1]] if marked else 0
    full, shared = keys_of(messages), keys_of(messages, group="house")
    part = keys_of(messages, group="house", is_kept_in_full=False)
    assert (full.num_own, full.num_shared) == (len(full.blocks), 0)
    assert (shared.num_own, shared.num_shared) == (len(full.blocks), up_to)
    assert (part.num_own, part.num_shared) == (up_to, up_to)
    assert all(0 <= part.tokens_to(at) <= 1000 for at in range(len(part.blocks)))
    assert part.blocks == full.blocks


@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=6))
def test_what_is_not_known_of_a_prompt_is_an_eighth_or_a_block(sizes: list[int]) -> None:
    keys = keys_of([Message("user", "x" * size) for size in sizes])
    ends = [0, *keys.ends]
    assert all(end - last <= max(1024, last // 8) for last, end in itertools.pairwise(ends))
    assert sum(sizes) - ends[-1] <= max(1024, sum(sizes) // 8)


def test_the_tokens_follow_the_text_and_an_answer_belongs_to_what_it_answers() -> None:
    talk = [Message("user", "q" * 60), Message("assistant", "a" * 20), Message("user", "q" * 20)]
    full = keys_of(talk)
    assert [full.tokens_to(at) for at in range(3)] == [800, 800, 1000]
    part = keys_of(talk, is_kept_in_full=False)
    assert [part.tokens_to(at) for at in range(3)] == [600, 800, 1000]
    assert keys_of([Message("user", "")]).blocks == ()


def test_long_prompts_are_known_by_their_beginning_and_have_few_keys() -> None:
    long = [Message("user", "x" * 2 * bounds.PROMPT_CHARACTERS_MAX, is_cache_end=True)]
    keys = keys_of([*long, Message("assistant", "y")], is_kept_in_full=False)
    assert len(keys.blocks) == keys.num_own < 60
    assert keys.ends[-1] == bounds.PROMPT_CHARACTERS_MAX
    assert keys.tokens_to(len(keys.blocks) - 1) == 499
    behind = keys_of([Message("user", long[0].content), Message("user", "z", is_cache_end=True)], group="g")
    assert behind.num_shared == len(behind.blocks)
    many = keys_of([Message("user", "xyz")] * bounds.MESSAGES_MAX)
    assert len(many.blocks) == bounds.PROMPT_KEYS_MAX


def test_a_message_cannot_pretend_to_be_two() -> None:
    two = keys_of([Message("user", "a"), Message("assistant", "b")]).blocks
    for text in ("aassistantb", "aÿassistantÿb"):
        assert not set(keys_of([Message("user", text)]).blocks) & set(two[1:])


def test_no_text_and_no_name_is_in_the_keys() -> None:
    secret = "the combination is 1234"
    keys = keys_of([Message("user", secret)])
    assert all(len(block) == 16 for block in keys.blocks)
    assert keys.session is not None
    assert len(keys.session) == 16
