"""Frames between our own processes: numbered, bounded, in any pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import bounds
from headrace.errors import ProtocolError
from headrace.framing import FrameSplitter, FrameWriter


@given(payloads=st.lists(st.binary(max_size=50)), cuts=st.lists(st.integers(1, 20)))
def test_what_goes_in_comes_out_in_any_pieces(payloads: list[bytes], cuts: list[int]) -> None:
    writer, splitter = FrameWriter(), FrameSplitter()
    data = b"".join(map(writer.frame, payloads))
    found: list[bytes] = []
    for cut in cuts:
        found += splitter.feed(data[:cut])
        data = data[cut:]
    assert found + splitter.feed(data) == payloads


@given(payloads=st.lists(st.binary(max_size=5), min_size=1), data=st.data())
def test_a_frame_that_comes_again_is_dropped(payloads: list[bytes], data: st.DataObject) -> None:
    writer, splitter = FrameWriter(), FrameSplitter()
    frames = list(map(writer.frame, payloads))
    found: list[bytes] = []
    for position, frame in enumerate(frames):
        found += splitter.feed(frame)
        found += splitter.feed(frames[data.draw(st.integers(0, position))])
    assert found == payloads


@given(num_before=st.integers(0, 5), num_missing=st.integers(1, 5))
def test_a_missing_frame_is_noticed(num_before: int, num_missing: int) -> None:
    writer, splitter = FrameWriter(), FrameSplitter()
    for _ in range(num_before):
        splitter.feed(writer.frame(b"x"))
    for _ in range(num_missing):
        writer.frame(b"lost")
    with pytest.raises(ProtocolError, match="was expected"):
        splitter.feed(writer.frame(b"x"))


def test_numbers_begin_anew_after_the_largest() -> None:
    writer, splitter = FrameWriter(), FrameSplitter()
    writer._next = splitter._next = 0xFFFF_FFFF
    again = writer.frame(b"a")
    assert splitter.feed(again + writer.frame(b"b")) == [b"a", b"b"]
    assert splitter.feed(again) == []


def test_an_oversized_frame_is_refused_by_its_head() -> None:
    head = (bounds.FRAME_BYTES_MAX + 1).to_bytes(4, "big") + bytes(4)
    with pytest.raises(ProtocolError, match="at most"):
        FrameSplitter().feed(head)
