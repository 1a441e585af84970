"""Numbered, length-prefixed frames on a byte stream: the one format between headrace's own processes.

A frame is a 4-byte big-endian length, a 4-byte number and that many bytes of MessagePack. The frames of one
direction of one connection are numbered from 0: one that comes twice is dropped, one that is missing ends the
connection, so nothing is ever done twice or left out unnoticed. A length over `FRAME_BYTES_MAX` is a protocol
error, found before anything is buffered.
"""

import struct

from headrace import bounds
from headrace.errors import ProtocolError

_HEAD = struct.Struct(">II")
_NUMBER_MASK = 0xFFFF_FFFF


class FrameWriter:
    """Numbers the frames of one direction."""

    def __init__(self) -> None:
        self._next = 0

    def frame(self, payload: bytes) -> bytes:
        """One frame, ready to send."""
        assert len(payload) <= bounds.FRAME_BYTES_MAX
        number = self._next
        self._next = (number + 1) & _NUMBER_MASK
        return _HEAD.pack(len(payload), number) + payload


class FrameSplitter:
    """Cuts a byte stream into frames. No I/O: feed it what was read."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._next = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by `data`, in order.

        Raises `ProtocolError` on an oversized frame, and on one before which another is missing.
        """
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        position = 0
        while len(buffer) - position >= _HEAD.size:
            length, number = _HEAD.unpack_from(buffer, position)
            if length > bounds.FRAME_BYTES_MAX:
                raise ProtocolError(f"frame of {length} bytes; at most {bounds.FRAME_BYTES_MAX} are allowed")
            end = position + _HEAD.size + length
            if len(buffer) < end:
                break
            if self._is_expected(number):
                payloads.append(bytes(buffer[position + _HEAD.size : end]))
            position = end
        del buffer[:position]
        return payloads

    def _is_expected(self, number: int) -> bool:
        """False for a frame that was here before."""
        ahead = (number - self._next) & _NUMBER_MASK
        if ahead == 0:
            self._next = (number + 1) & _NUMBER_MASK
            return True
        if ahead > _NUMBER_MASK // 2:
            return False
        raise ProtocolError(f"frame {number} came where {self._next} was expected")
