"""The progress file: how far every attempt is, so that not even `kill -9` loses a count.

The engine loop appends an entry before any text of a step leaves the worker. The page cache outlives
the process, so whatever a client can have seen is in the file. Whoever finds a dead worker reads it
with `read_records` and settles from it.

Format: entries of a 4-byte length, a 4-byte CRC-32 and that many bytes of MessagePack. A torn last
entry is ignored: nothing that depends on it has been sent.
"""

import fcntl
import os
import struct
import threading
import zlib
from pathlib import Path

import msgspec

from headrace import bounds
from headrace.worker.messages import AttemptRecord

_HEAD = struct.Struct(">II")


class _Started(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int
    attempt_id: str
    tenant_id: str
    prompt_tokens: int
    started_ts: int
    cached: int = 0


class _Advanced(msgspec.Struct, frozen=True, array_like=True, tag=2):
    wall_us: int
    counts: list[tuple[int, int, int]]
    """(attempt's number, prompt tokens computed, tokens generated)"""


class _Finished(msgspec.Struct, frozen=True, array_like=True, tag=3):
    record: AttemptRecord


class _Acknowledged(msgspec.Struct, frozen=True, array_like=True, tag=4):
    attempt_ids: list[str]


_Entry = _Started | _Advanced | _Finished | _Acknowledged
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Entry).decode


class _Running:
    """What a new file has to say of an attempt that is still running."""

    __slots__ = ("computed", "generated", "started")

    def __init__(self, started: _Started) -> None:
        self.started = started
        self.computed = started.cached
        self.generated = 0


class ProgressFile:
    """Writes one worker's progress. Called from the engine thread and the network thread."""

    def __init__(self, path: Path, *, bytes_max: int = bounds.PROGRESS_FILE_BYTES_MAX) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._finished: dict[str, AttemptRecord] = {}
        self._next_number = 0
        self._size = 0
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def started(
        self, attempt_id: str, *, tenant_id: str, prompt_tokens: int, wall_us: int, cached: int = 0
    ) -> None:
        """An attempt has got its slot, and the first `cached` tokens of its prompt are in it already."""
        with self._lock:
            entry = _Started(self._next_number, attempt_id, tenant_id, prompt_tokens, wall_us, cached)
            self._next_number += 1
            self._running[attempt_id] = _Running(entry)
            self._append([entry])

    def advanced(self, counts: list[tuple[str, int, int]], *, wall_us: int) -> None:
        """Note (attempt, prompt tokens computed, tokens generated) for all that moved in a step."""
        with self._lock:
            numbers = []
            for attempt_id, computed, generated in counts:
                running = self._running[attempt_id]
                running.computed = computed
                running.generated = generated
                numbers.append((running.started.number, computed, generated))
            self._append([_Advanced(wall_us, numbers)])

    def finished(self, record: AttemptRecord) -> None:
        with self._lock:
            self._running.pop(record.attempt_id, None)
            self._finished[record.attempt_id] = record
            self._append([_Finished(record)])

    def acknowledged(self, attempt_ids: list[str]) -> None:
        """Forget records that are in the ledger. Unknown ids are ignored: an acknowledgement may repeat."""
        with self._lock:
            known = [attempt_id for attempt_id in attempt_ids if self._finished.pop(attempt_id, None)]
            if known:
                self._append([_Acknowledged(known)])

    def unacknowledged(self) -> list[AttemptRecord]:
        with self._lock:
            return list(self._finished.values())

    def num_unacknowledged(self) -> int:
        return len(self._finished)

    def close(self) -> None:
        with self._lock:
            os.close(self._file)

    def _append(self, entries: list[_Entry]) -> None:
        data = b"".join(map(_pack, entries))
        _write_all(self._file, data)
        self._size += len(data)
        if self._size > self._bytes_max:
            self._rewrite()

    def _rewrite(self) -> None:
        """Begin a new file with only what is still needed, and put it in the old one's place."""
        entries: list[_Entry] = [_Finished(record) for record in self._finished.values()]
        for running in self._running.values():
            entries.append(running.started)
            entries.append(_Advanced(0, [(running.started.number, running.computed, running.generated)]))
        data = b"".join(map(_pack, entries))
        fresh = self._path.with_suffix(".new")
        file = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        _write_all(file, data)
        fresh.rename(self._path)
        os.close(self._file)
        self._file = file
        self._size = len(data)
        # With many records unacknowledged the file may stay large; rewriting at every step would not help.
        self._bytes_max = max(self._bytes_max, 2 * self._size)


def _write_all(file: int, data: bytes) -> None:
    """All of it or an `OSError`, after which the process has to end: entries behind a torn one are lost."""
    while data:
        data = data[os.write(file, data) :]


def is_released(path: Path) -> bool:
    """Whether the process that wrote this file has ended, or there never was one."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _pack(entry: _Entry) -> bytes:
    payload = _encode(entry)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def read_records(path: Path) -> list[AttemptRecord]:
    """What a dead worker's file says: its unacknowledged records, and one for each attempt it was running.

    The latter have `finish_reason` `error` and `source` `progress_file`. A missing file is a worker
    that never ran anything.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    started: dict[int, _Started] = {}
    counts: dict[int, tuple[int, int, int, int]] = {}
    finished: dict[str, AttemptRecord] = {}
    for entry in _entries(data):
        match entry:
            case _Started():
                started[entry.number] = entry
            case _Advanced():
                for number, computed, generated in entry.counts:
                    first_us = counts[number][2] if number in counts and counts[number][1] else entry.wall_us
                    counts[number] = (computed, generated, first_us, entry.wall_us)
            case _Finished():
                finished[entry.record.attempt_id] = entry.record
            case _Acknowledged():
                for attempt_id in entry.attempt_ids:
                    finished.pop(attempt_id, None)
    done = {entry.record.attempt_id for entry in _entries(data) if isinstance(entry, _Finished)}
    lost = [
        _lost_record(entry, counts.get(entry.number, (entry.cached, 0, 0, entry.started_ts)))
        for entry in started.values()
        if entry.attempt_id not in done
    ]
    return [*finished.values(), *lost]


def _lost_record(entry: _Started, counts: tuple[int, int, int, int]) -> AttemptRecord:
    computed, generated, first_us, last_us = counts
    return AttemptRecord(
        attempt_id=entry.attempt_id,
        tenant_id=entry.tenant_id,
        prompt_tokens=entry.prompt_tokens,
        prompt_tokens_computed=computed,
        prompt_tokens_cached=entry.cached,
        completion_tokens=generated,
        finish_reason="error",
        error="the worker process died",
        started_ts=entry.started_ts,
        first_token_ts=(first_us or None) if generated else None,
        ended_ts=last_us or entry.started_ts,
        source="progress_file",
    )


def _entries(data: bytes) -> list[_Entry]:
    entries: list[_Entry] = []
    position = 0
    while position + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, position)
        payload = data[position + _HEAD.size : position + _HEAD.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            break
        entries.append(_decode(payload))
        position += _HEAD.size + length
    return entries
