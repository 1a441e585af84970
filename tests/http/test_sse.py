"""The splitter finds the same events however the bytes arrive."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ProtocolError
from headrace.http import SseSplitter, data_of


def split(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = SseSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)], splitter.rest


@pytest.mark.parametrize(
    ("data", "events", "rest"),
    [
        (b"", [], b""),
        (b"data: a\n\n", [b"data: a\n\n"], b""),
        (b"data: a\n\ndata: b\n\nda", [b"data: a\n\n", b"data: b\n\n"], b"da"),
        (b"data: a\r\n\r\n: ping\r\n\r\n", [b"data: a\r\n\r\n", b": ping\r\n\r\n"], b""),
        (b"data: a\r\n\ndata: b\n\r\n", [b"data: a\r\n\n", b"data: b\n\r\n"], b""),
        (b"event: e\ndata: a\n\n", [b"event: e\ndata: a\n\n"], b""),
        (b"data: a\n", [], b"data: a\n"),
        (b"data: a\rb\n\n", [b"data: a\rb\n\n"], b""),
    ],
)
def test_examples(data: bytes, events: list[bytes], rest: bytes) -> None:
    assert split([data]) == (events, rest)
    assert split([data[i : i + 1] for i in range(len(data))]) == (events, rest)


TEXT = st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b"data: a", b": c", b"x"])).map(
    b"".join
)


@given(data=TEXT, cuts=st.lists(st.integers(0, 200), max_size=20))
def test_any_chunking_splits_the_same(data: bytes, cuts: list[int]) -> None:
    at = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    events, rest = split([data[a:b] for a, b in itertools.pairwise(at)])
    assert (events, rest) == split([data])
    assert b"".join(events) + rest == data
    assert all(data_of(event) is None or b"data" in event for event in events)


def test_a_whole_event_is_passed_on_as_it_is() -> None:
    data = b"data: {}\n\n"
    assert SseSplitter().feed(data)[0] is data


@pytest.mark.parametrize(
    "pieces", [[b"a" * 101], [b"a" * 60] * 2, [b"a" * 101 + b"\n\n"], [b"a" * 60, b"a" * 60 + b"\n\n"]]
)
def test_events_are_bounded(pieces: list[bytes]) -> None:
    splitter = SseSplitter(100)
    with pytest.raises(ProtocolError, match="over 100 bytes"):
        for piece in pieces:
            splitter.feed(piece)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: a b\n\n", b"a b"),
        (b"data: a\r\n\r\n", b"a"),
        (b"data:a\ndata:  b\ndata\n\n", b"a\n b\n"),
        (b"event: e\nid: 1\ndata: a\n\n", b"a"),
        (b": comment\n\n", None),
        (b"event: e\n\n", None),
        (b"\n\n", None),
        (b"database: no\n\n", None),
    ],
)
def test_data_of(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data
