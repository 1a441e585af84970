"""The evidence of `benchmarks.kills`: the workers' own files against the ledger against the clients.

Everything here looks at files and at what clients saw; nothing asks the server about itself.
"""

import contextlib
import json
import shutil
import sqlite3
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.kills_load import Chat
from headrace.worker.progress import read_records

PHASES = ("queued", "prefill", "decode", "settling")
_FINISHED = 3
_HEAD = struct.Struct(">II")


@dataclass(frozen=True)
class Attempt:
    """What a worker noted of an attempt. Times in microseconds; `ended_ts` None if it never ended it."""

    attempt_id: str
    prompt_tokens: int
    completion_tokens: int
    started_ts: int | None
    first_token_ts: int | None
    ended_ts: int | None


@dataclass
class Kill:
    """One kill and what was going on, as the evidence has it."""

    number: int
    victim: str
    aimed: str
    at_us: int = 0
    clients_waiting: int = 0
    """Clients without an end of their reply, right before the kill."""
    phases: Counter[str] = field(default_factory=Counter)
    recovery_s: float = 0.0


def attempts_in(directory: Path) -> dict[str, Attempt]:
    """Everything that the copied progress files say, acknowledged records included."""
    found: dict[str, Attempt] = {}
    for path in sorted(directory.glob("**/*.progress")):
        for record in read_records(path):
            if record.finish_reason == "error":  # was running when the process died
                _add(found, record, ended_ts=None)
        for record in _finished(path):
            _add(found, record, ended_ts=record.ended_ts)
    return found


def _add(found: dict[str, Attempt], record: Any, *, ended_ts: int | None) -> None:
    if ended_ts is None and record.attempt_id in found:
        return  # an ended attempt is worth more than one that was seen running
    found[record.attempt_id] = Attempt(
        attempt_id=record.attempt_id,
        prompt_tokens=record.prompt_tokens_computed,
        completion_tokens=record.completion_tokens,
        started_ts=record.started_ts,
        first_token_ts=record.first_token_ts,
        ended_ts=ended_ts,
    )


class Tail:
    """Follows a progress file as it grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(0, 2)
        self._rest = b""

    def has_new_end(self) -> bool:
        """Whether an attempt's final record has been added since the last call."""
        self._rest += self._file.read()
        ends: list[Any] = []
        while len(self._rest) >= _HEAD.size:
            size = _HEAD.size + _HEAD.unpack_from(self._rest)[0]
            if len(self._rest) < size:
                break
            ends += _finished_in(self._rest[:size])
            self._rest = self._rest[size:]
        return bool(ends)


def _finished(path: Path) -> Iterator[Any]:
    """The final records in a progress file, also those already acknowledged: `read_records` leaves them out."""
    return _finished_in(path.read_bytes())


def _finished_in(data: bytes) -> Iterator[Any]:
    position = 0
    while position + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        payload = data[position : position + length]
        position += length
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        entry = msgspec.msgpack.decode(payload)
        if entry[0] == _FINISHED:
            yield _Record(entry[1])


class _Record:
    """A record's fields; those at their defaults are not written."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.attempt_id = fields["attempt_id"]
        self.prompt_tokens_computed = fields.get("prompt_tokens_computed", 0)
        self.completion_tokens = fields.get("completion_tokens", 0)
        self.started_ts = fields.get("started_ts")
        self.first_token_ts = fields.get("first_token_ts")
        self.ended_ts = fields["ended_ts"]


ENDS = ("settle", "void", "expire")
"""Entries of the journal that end a reservation."""


class Ledger:
    """The ledger's file, read once."""

    def __init__(self, data: Path) -> None:
        self._data = data
        uri = f"file:{data}/ledger.db?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            database.row_factory = sqlite3.Row
            self.rows = {row["request_id"]: dict(row) for row in database.execute("SELECT * FROM operations")}
            self.num_rows = database.execute("SELECT count(*) FROM operations").fetchone()[0]
            self.held = [row[0] for row in database.execute("SELECT request_id FROM held")]
            self.reserved: Counter[str] = Counter()
            self.settled: Counter[str] = Counter()
            self.settled_us: dict[str, int] = {}
            for row in database.execute("SELECT at_us, kind, request_id FROM journal"):
                if row["kind"] in ENDS:
                    self.settled[row["request_id"]] += 1
                    self.settled_us[row["request_id"]] = row["at_us"]
                elif row["kind"] == "reserve":
                    self.reserved[row["request_id"]] += 1

    def verify(self) -> list[str]:
        """What `headrace ledger verify` finds wrong."""
        command = [sys.executable, "-m", "headrace.cli", "ledger", "verify", "--json", "--data"]
        done = subprocess.run(
            [*command, str(self._data)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        try:
            differences = list(json.loads(done.stdout)["differences"])
        except (ValueError, KeyError):
            differences = [f"unreadable: {done.stdout[-300:]}"]
        if done.returncode and not differences:
            differences = [f"exit status {done.returncode}"]
        return differences


def attempt_of(row: dict[str, Any], attempts: dict[str, Attempt]) -> Attempt | None:
    ids = json.loads(row["attempt_ids"])
    return attempts.get(ids[-1]) if ids else None


def phases_at(kill: Kill, ledger: Ledger, attempts: dict[str, Attempt]) -> Counter[str]:
    """The operations that were open when this kill came, by phase, after the clocks in ledger and files."""
    phases: Counter[str] = Counter()
    for request_id, row in ledger.rows.items():
        if not row["queue_enter_ts"] < kill.at_us < ledger.settled_us.get(request_id, 0):
            continue
        attempt = attempt_of(row, attempts)
        if attempt is None or attempt.started_ts is None or attempt.started_ts > kill.at_us:
            phases["queued"] += 1
        elif attempt.first_token_ts is None or attempt.first_token_ts > kill.at_us:
            phases["prefill"] += 1
        elif attempt.ended_ts is None or attempt.ended_ts > kill.at_us:
            phases["decode"] += 1
        else:
            phases["settling"] += 1
    return phases


def violations(
    ledger: Ledger, attempts: dict[str, Attempt], chats: list[Chat], kills: list[Kill]
) -> list[str]:
    """Everything that must not be."""
    found = [f"ledger verify: {difference}" for difference in ledger.verify()]
    found += [f"{request_id} is still held" for request_id in ledger.held]
    found += _not_once(ledger)
    found += _against_workers(ledger, attempts)
    for chat in chats:
        found += [f"{chat.request_id}: {wrong}" for wrong in _against_client(chat, ledger)]
    known = {chat.request_id for chat in chats}
    server_kills = [kill.at_us for kill in kills if kill.victim == "server"]
    for request_id, row in ledger.rows.items():
        if row["outcome"] not in ("completed", "worker_lost", "recovered"):
            found.append(f"{request_id}: nobody caused the outcome {row['outcome']}")
        if row["outcome"] == "recovered" and not any(
            row["queue_enter_ts"] < at_us < row["end_ts"] for at_us in server_kills
        ):
            found.append(f"{request_id}: recovered, and no server was killed while it was open")
        if row["outcome"] == "worker_lost" and request_id not in known:
            found.append(f"{request_id}: lost with its worker, and its client was not told")
    return found


def _not_once(ledger: Ledger) -> Iterator[str]:
    if ledger.num_rows != len(ledger.rows):
        yield f"{ledger.num_rows} final rows for {len(ledger.rows)} operations"
    for request_id in ledger.reserved.keys() | ledger.settled.keys() | ledger.rows.keys():
        times = (ledger.reserved[request_id], ledger.settled[request_id], int(request_id in ledger.rows))
        if times != (1, 1, 1):
            yield f"{request_id}: reserved {times[0]} times, settled {times[1]} times, {times[2]} final rows"


def _against_workers(ledger: Ledger, attempts: dict[str, Attempt]) -> Iterator[str]:
    claimed = set()
    for request_id, row in ledger.rows.items():
        ids = json.loads(row["attempt_ids"])
        claimed.update(ids)
        if not ids:
            if row["prompt_tokens"] or row["completion_tokens"]:
                yield f"{request_id}: tokens without an attempt"
            continue
        attempt = attempts.get(ids[-1])
        if attempt is None:
            yield f"{request_id}: no worker has noted {ids[-1]}"
            continue
        says = (row["prompt_tokens"], row["completion_tokens"])
        noted = (attempt.prompt_tokens, attempt.completion_tokens)
        if says != noted:
            yield f"{request_id}: the row says {says} tokens, its worker {noted}"
    for attempt_id, attempt in attempts.items():
        if attempt_id not in claimed and (attempt.prompt_tokens or attempt.completion_tokens):
            yield f"{attempt_id}: a worker computed it and no row has it"


def _against_client(chat: Chat, ledger: Ledger) -> Iterator[str]:
    if chat.request_id is None:
        if chat.status:
            yield f"a reply with status {chat.status} and no request id"
        return
    row = ledger.rows.get(chat.request_id)
    if row is None:
        yield f"the client got status {chat.status}, and there is no row"
        return
    if chat.chunks > row["completion_tokens"]:
        yield f"the client saw {chat.chunks} chunks, the row has {row['completion_tokens']} tokens"
    if chat.is_answered:
        if row["outcome"] != "completed":
            yield f"the client has its whole answer, the row says {row['outcome']}"
        if chat.usage is not None and chat.usage != (row["prompt_tokens"], row["completion_tokens"]):
            yield f"the client was told {chat.usage}, the row says otherwise: {row}"
    elif chat.error_code is not None and row["outcome"] != chat.error_code:
        yield f"the client was told {chat.error_code}, the row says {row['outcome']}"


def copy_progress(files: list[Path], directory: Path) -> None:
    directory.mkdir(parents=True)
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(file, directory / file.name)


def uncaught_errors(log: Path) -> list[str]:
    """The last line of each traceback in a log."""
    errors = []
    is_inside = False
    for line in log.read_text().splitlines():
        if line.startswith("Traceback "):
            is_inside = True
        elif is_inside and not line.startswith(" "):
            errors.append(line[:200])
            is_inside = False
    return errors
