"""What a prompt is recognised by: equal beginnings have equal keys, and nothing else has."""

from hypothesis import given
from hypothesis import strategies as st

from headrace import bounds
from headrace.request.messages import Message
from headrace.scheduling.prompt_keys import BLOCK_CHARACTERS, PromptKeys, prompt_keys

messages_lists = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant"]),
        content=st.sampled_from(["", "a", "ab", "b", "x" * BLOCK_CHARACTERS, "x" * 2000, "é" * 1500]),
        is_cache_end=st.booleans(),
    ),
    min_size=1,
    max_size=6,
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


def pieces(messages: list[Message]) -> list[tuple[int, str, str]]:
    """The blocks in words: (number of the message, role, what of its text)."""
    return [
        (number, message.role, message.content[start : start + BLOCK_CHARACTERS] + end)
        for number, message in enumerate(messages)
        for start in range(0, len(message.content) or 1, BLOCK_CHARACTERS)
        for end in ["." if start + BLOCK_CHARACTERS >= len(message.content) else "+"]
    ]


@given(messages_lists, messages_lists)
def test_keys_agree_exactly_as_far_as_the_texts_do(one: list[Message], other: list[Message]) -> None:
    for first, second in ((one, other), (one, one + other)):
        mine, theirs = keys_of(first).blocks, keys_of(second).blocks
        words, others = pieces(first), pieces(second)
        assert len(mine) == len(words)
        for at in range(min(len(mine), len(theirs))):
            assert (mine[at] == theirs[at]) == (words[: at + 1] == others[: at + 1])


@given(messages_lists)
def test_only_what_is_marked_is_shared_or_kept_where_no_more_may_be(messages: list[Message]) -> None:
    marked = [number for number, message in enumerate(messages, 1) if message.is_cache_end]
    up_to = len(pieces(messages[: marked[-1]])) if marked else 0
    full, shared = keys_of(messages), keys_of(messages, group="house")
    part = keys_of(messages, group="house", is_kept_in_full=False)
    assert (full.num_own, full.num_shared) == (len(full.blocks), 0)
    assert (shared.num_own, shared.num_shared) == (len(full.blocks), up_to)
    assert (part.num_own, part.num_shared) == (up_to, up_to)
    assert all(0 <= part.tokens_to(at) <= 1000 for at in range(len(part.blocks)))
    assert part.blocks == full.blocks


def test_the_tokens_follow_the_text_and_an_answer_belongs_to_what_it_answers() -> None:
    talk = [Message("user", "q" * 60), Message("assistant", "a" * 20), Message("user", "q" * 20)]
    full = keys_of(talk)
    assert [full.tokens_to(at) for at in range(3)] == [800, 800, 1000]
    part = keys_of(talk, is_kept_in_full=False)
    assert [part.tokens_to(at) for at in range(3)] == [600, 800, 1000]
    assert keys_of([Message("user", "")]).tokens_to(0) == 0


def test_long_prompts_are_known_by_their_beginning() -> None:
    long = [Message("user", "x" * BLOCK_CHARACTERS * 2 * bounds.PROMPT_BLOCKS_MAX, is_cache_end=True)]
    keys = keys_of([*long, Message("assistant", "y")], is_kept_in_full=False)
    assert len(keys.blocks) == bounds.PROMPT_BLOCKS_MAX == keys.num_own
    assert keys.tokens_to(len(keys.blocks) - 1) == 499
    many = keys_of([Message("user", "x")] * bounds.MESSAGES_MAX)
    assert len(many.blocks) == bounds.PROMPT_BLOCKS_MAX


def test_no_text_and_no_name_is_in_the_keys() -> None:
    secret = "the combination is 1234"
    keys = keys_of([Message("user", secret)])
    assert all(len(block) == 16 for block in keys.blocks)
    assert keys.session is not None
    assert len(keys.session) == 16
