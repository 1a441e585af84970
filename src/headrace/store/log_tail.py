"""How much of a write-ahead log SQLite is going to drop when it opens the database.

After a power cut the end of the log may be torn. SQLite keeps everything up to the last commit whose frames
all have the right salts and checksums, and says nothing of the rest. This reads the log first, by the same
rules (https://sqlite.org/fileformat2.html, section 4), so that the rest can be named.

A log is written from its start again and again. Frames behind the valid ones that carry the salts of an
earlier round are what is left of it, and no loss.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from headrace.errors import SetupError

HEADER_BYTES: Final = 32
FRAME_HEADER_BYTES: Final = 24
_MAGIC: Final = 0x377F0682
"""The lowest bit says whether checksums are computed over big-endian words."""
_FORMAT: Final = 3007000
_PAGE_BYTES_ALLOWED: Final = frozenset(1 << power for power in range(9, 17))
_MASK: Final = 0xFFFFFFFF

Checksum = tuple[int, int]


class Tail(msgspec.Struct, frozen=True):
    """What lies behind the last commit and belongs to this round of the log."""

    num_bytes: int
    num_frames: int
    """Also those of which only a part is there."""


class _Header(msgspec.Struct, frozen=True):
    page_bytes: int
    salts: bytes
    words: str
    """`struct`'s letter for the byte order of checksums."""
    checksum: Checksum

    @property
    def frame_bytes(self) -> int:
        return FRAME_HEADER_BYTES + self.page_bytes


def dropped_tail(database: Path) -> Tail | None:
    """What opening `database` is going to drop from its log; None when that is nothing.

    Reads the whole log, so it takes time with its size; after an orderly end there is none. Nobody may be
    writing meanwhile. Raises `SetupError` when the log cannot be read.
    """
    path = Path(f"{database}-wal")
    try:
        with path.open("rb") as log:
            return _tail(log, path.stat().st_size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error}") from error


def _tail(log: BinaryIO, size: int) -> Tail | None:
    if size == 0:
        return None
    header = _header(log.read(HEADER_BYTES))
    if header is None:
        return Tail(size, 0)
    num_kept = _committed_frames(log, header)
    num_bytes = num_frames = 0
    is_of_this_round = True
    for head, length in _rest(log, header, num_kept):
        salts = head[8:16]
        if len(salts) == len(header.salts):  # else the file ends in it: like the frame before
            # Zeros: the frame's place in the file is there, its bytes never reached the disk.
            is_of_this_round = salts == header.salts or not any(salts)
        if is_of_this_round:
            num_bytes += length
            num_frames += 1
    return Tail(num_bytes, num_frames) if num_bytes else None


def _header(data: bytes) -> _Header | None:
    """The log's header; None for one that SQLite would not accept: it ignores the whole log then."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, page_bytes, _ = struct.unpack(">4I", data[:16])
    if magic & ~1 != _MAGIC or version != _FORMAT or page_bytes not in _PAGE_BYTES_ALLOWED:
        return None
    words = ">" if magic & 1 else "<"
    checksum = _checksum(words, (0, 0), data[:24])
    if checksum != struct.unpack(">2I", data[24:]):
        return None
    return _Header(page_bytes, data[16:24], words, checksum)


def _committed_frames(log: BinaryIO, header: _Header) -> int:
    """How many frames from the start up to and with the last valid commit."""
    checksum = header.checksum
    num_frames = num_committed = 0
    log.seek(HEADER_BYTES)
    while len(frame := log.read(header.frame_bytes)) == header.frame_bytes:
        if frame[8:16] != header.salts:
            break
        checksum = _checksum(header.words, checksum, frame[:8])
        checksum = _checksum(header.words, checksum, frame[FRAME_HEADER_BYTES:])
        if checksum != struct.unpack(">2I", frame[16:24]):
            break
        num_frames += 1
        if frame[4:8] != b"\0\0\0\0":  # the database's size in pages stands in the frame that commits
            num_committed = num_frames
    return num_committed


def _rest(log: BinaryIO, header: _Header, num_kept: int) -> Iterator[tuple[bytes, int]]:
    """The frames behind the last commit: head and length, the last one as far as the file has it."""
    position = HEADER_BYTES + num_kept * header.frame_bytes
    while True:
        log.seek(position)
        frame = log.read(header.frame_bytes)
        if not frame:
            return
        yield frame[:FRAME_HEADER_BYTES], len(frame)
        position += header.frame_bytes


def _checksum(words: str, seed: Checksum, data: bytes) -> Checksum:
    """SQLite's: two sums over pairs of 32-bit words, each fed with the other."""
    first, second = seed
    for one, other in struct.iter_unpack(f"{words}2I", data):
        first = (first + one + second) & _MASK
        second = (second + other + first) & _MASK
    return first, second
