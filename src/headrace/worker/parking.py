"""KV memory put aside in files, so that it outlives its slot and its process.

One directory for each worker, readable by this user only. A file has a head (MessagePack: what the tokens are,
whose, for how long) and the engine's state behind it. It is written under another name and renamed, so a file is
whole or not there. Nothing is synced: after a power cut the worst is that something has to be computed anew,
and a state whose checksum is wrong is not taken.

A thread of its own writes, because a long context's state takes a third of a second that running streams would wait
for. Until a file is there its state is held in memory, and is read from there.

The operating system's page cache makes this as fast as memory (`benchmarks/kv-choices.md`); an operator who wants
it there for sure puts the directory on tmpfs.
"""

import os
import secrets
import struct
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from headrace.bounds import PARKING_UNWRITTEN_BYTES_MAX
from headrace.caching.index import Holding

SUFFIX: Final = ".kv"
_HEAD: Final = struct.Struct(">II")
HEAD_BYTES_MAX: Final = 64
"""Of what a file says of its state, without names and tokens."""
TOKEN_BYTES_MAX: Final = 5
_log = structlog.get_logger()


class _Head(msgspec.Struct, frozen=True, array_like=True):
    state_key: str
    tenant: str
    group: str | None
    shared: int
    session: str | None
    tokens: list[int]
    expires_ts: int
    checksum: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


class _Unwritten(NamedTuple):
    """A state on its way to its file."""

    state: bytes
    written: Future[None]


class Parking:
    """The parked states of one worker. Belongs to the engine thread; `close` it when no more comes."""

    def __init__(self, directory: Path, *, state_key: str, bytes_max: int) -> None:
        """`state_key` says which engines can restore each other's states (`EngineInfo.state_key`)."""
        self._directory = directory
        self._state_key = state_key
        self.bytes_max = bytes_max
        self._sizes: dict[str, int] = {}
        self._unwritten: dict[str, _Unwritten] = {}
        """In the order in which they are written. The writer takes out what is done: else the last states would stay in memory.
        One call each, so that neither thread sees the other's half done."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parking")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def bytes_used(self) -> int:
        return sum(self._sizes.values())

    def size_max(self, holding: Holding, state_bytes: int) -> int:
        """No file that holds so large a state of this holding is larger."""
        names = (self._state_key, holding.tenant, holding.group or "", holding.session or "")
        return (
            _HEAD.size
            + HEAD_BYTES_MAX
            + sum(len(name.encode()) for name in names)
            + TOKEN_BYTES_MAX * len(holding.tokens)
            + state_bytes
        )

    def scan(self, now_ts: int) -> list[tuple[Holding, int]]:
        """What an earlier life left and can be used: (holding, time of its expiry). The rest is removed."""
        found = []
        for path in sorted(self._directory.iterdir()):
            head = _read_head(path) if path.suffix == SUFFIX else None
            if head is None or head.state_key != self._state_key or head.expires_ts <= now_ts:
                path.unlink(missing_ok=True)
                continue
            self._sizes[path.stem] = path.stat().st_size
            holding = Holding(
                tenant=head.tenant,
                tokens=head.tokens,
                parked=path.stem,
                group=head.group,
                shared=head.shared,
                session=head.session,
                num_valid=len(head.tokens),
            )
            found.append((holding, head.expires_ts))
        return found

    def save(self, holding: Holding, state: bytes, *, expires_ts: int) -> str:
        """Put a state aside; its name. If the disk does not take it, it is gone when it is asked for.

        Waits for earlier ones when too many of their bytes are not yet written.
        """
        head = _Head(
            self._state_key,
            holding.tenant,
            holding.group,
            holding.shared,
            holding.session,
            list(holding.tokens),  # the holding goes on to change
            expires_ts,
            checksum=0,
        )
        name = secrets.token_hex(16)
        self._make_room(len(state))
        written = self._writer.submit(_write, self._path(name), head, state)
        self._unwritten[name] = _Unwritten(state, written)
        written.add_done_callback(lambda _: self._unwritten.pop(name, None))
        self._sizes[name] = self.size_max(holding, len(state))
        return name

    def load(self, name: str) -> bytes | None:
        """A state; None if it is damaged or gone."""
        unwritten = self._unwritten.get(name)
        if unwritten is not None:
            return unwritten.state
        try:
            data = self._path(name).read_bytes()
            length, _ = _HEAD.unpack_from(data)
            head = _decode(data[_HEAD.size : _HEAD.size + length])
        except (OSError, struct.error, msgspec.DecodeError):
            return None
        state = data[_HEAD.size + length :]
        return state if zlib.crc32(state) == head.checksum else None

    def remove(self, name: str) -> None:
        self._sizes.pop(name, None)
        unwritten = self._unwritten.get(name)
        if unwritten is None:
            self._unlink(name)
        elif not unwritten.written.cancel():
            # Now, or by the writer as soon as the file is there.
            unwritten.written.add_done_callback(lambda _: self._unlink(name))

    def close(self) -> None:
        """Come back when everything is written."""
        self._writer.shutdown()

    def _make_room(self, num_bytes: int) -> None:
        """Wait for as much as has to be written first."""
        while before := list(self._unwritten.values()):
            if sum(len(one.state) for one in before) + num_bytes <= PARKING_UNWRITTEN_BYTES_MAX:
                return
            wait([before[0].written])

    def _unlink(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{SUFFIX}"


def _write(path: Path, head: _Head, state: bytes) -> None:
    """In the writer's thread."""
    packed = _encode(msgspec.structs.replace(head, checksum=zlib.crc32(state)))
    fresh = path.with_suffix(".new")
    try:
        with open(fresh, "xb", opener=_private) as file:
            file.write(_HEAD.pack(len(packed), zlib.crc32(packed)))
            file.write(packed)
            file.write(state)
        fresh.rename(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        _log.warning("kv_not_parked", error=str(error))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read_head(path: Path) -> _Head | None:
    try:
        with path.open("rb") as file:
            length, checksum = _HEAD.unpack(file.read(_HEAD.size))
            data = file.read(length)
        return _decode(data) if zlib.crc32(data) == checksum else None
    except (OSError, struct.error, msgspec.DecodeError):
        return None
