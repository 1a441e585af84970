"""Text comes out whole: no half characters, nothing of a stop string or after it."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from headrace.worker.text import TextAssembler


def assemble(data: bytes, cuts: list[int], stops: list[str]) -> tuple[list[str], bool]:
    """Feed `data` cut at these places; the released pieces, and whether a stop string was found."""
    text = TextAssembler(stops)
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    pieces = []
    for start, end in itertools.pairwise(edges):
        pieces.append(text.feed(data[start:end]))
        if text.has_stopped:
            break
    pieces.append(text.end())
    return pieces, text.has_stopped


@given(st.text(), st.lists(st.integers(0, 1000)))
@example("水の流れ 🌊🏞️ مرحبا", list(range(50)))
def test_any_cutting_of_the_bytes_gives_the_same_whole_characters(whole: str, cuts: list[int]) -> None:
    whole = whole.encode("utf-8", "replace").decode()
    pieces, _ = assemble(whole.encode(), cuts, [])
    assert "".join(pieces) == whole
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in whole


@given(
    st.text(alphabet="ab🌊", max_size=30),
    st.lists(st.text(alphabet="ab🌊", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 100)),
)
def test_stop_strings_are_found_across_any_cut_and_never_shown(
    whole: str, stops: list[str], cuts: list[int]
) -> None:
    pieces, has_stopped = assemble(whole.encode(), cuts, stops)
    shown = "".join(pieces)
    assert has_stopped == any(stop in whole for stop in stops)
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not has_stopped:
        assert shown == whole


def test_a_tail_is_held_back_only_while_it_may_be_a_stop_string() -> None:
    text = TextAssembler(["END"])
    assert text.feed(b"abcE") == "abc"
    assert text.feed(b"N") == ""
    assert text.feed(b"X") == "ENX"
    assert text.feed(b"tail EN") == "tail "
    assert text.end() == "EN"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    text = TextAssembler(["world", "lo"])
    assert text.feed(b"hello world") == "hel"
    assert text.has_stopped
    assert text.end() == ""


def test_a_character_that_never_became_whole_is_dropped() -> None:
    text = TextAssembler([])
    assert text.feed("水".encode()[:2]) == ""
    assert text.end() == ""
