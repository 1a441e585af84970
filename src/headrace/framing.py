"""Length-prefixed frames on a byte stream: the one format between headrace's own processes.

A frame is a 4-byte big-endian length and that many bytes of MessagePack. A length over
`FRAME_BYTES_MAX` is a protocol error, found before anything is buffered.
"""

import struct

from headrace import bounds
from headrace.errors import ProtocolError

_LENGTH = struct.Struct(">I")


def frame(payload: bytes) -> bytes:
    """One frame, ready to send."""
    assert len(payload) <= bounds.FRAME_BYTES_MAX
    return _LENGTH.pack(len(payload)) + payload


class FrameSplitter:
    """Cuts a byte stream into frames. No I/O: feed it what was read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by `data`, in order. Raises `ProtocolError` on an oversized frame."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        position = 0
        while len(buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, position)
            if length > bounds.FRAME_BYTES_MAX:
                raise ProtocolError(f"frame of {length} bytes; at most {bounds.FRAME_BYTES_MAX} are allowed")
            end = position + _LENGTH.size + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[position + _LENGTH.size : end]))
            position = end
        del buffer[:position]
        return payloads
