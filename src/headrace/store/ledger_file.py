"""ledger.db: the journal and its projections, written together or not at all.

- `journal`: append-only, one row each for `reserve` and `settle`, the whole truth. Triggers forbid
  changing or deleting rows.
- `held`: the reservations not settled yet.
- `operations`: the final rows, one column for each field of `OperationRecord` (and where in the journal
  they come from). Reports read only these. Every index costs each operation more than a microsecond,
  so there is none by model: few models have so many operations that the index by time does as well.

Synchronous and without rules of its own: `store.journal` decides what may be written and when.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.errors import SetupError
from headrace.ledger.records import OperationRecord, Reservation
from headrace.store.sqlite import open_database

SCHEMA: Final = (
    """
    CREATE TABLE journal (
        seq INTEGER PRIMARY KEY,
        at_us INTEGER NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('reserve', 'settle')),
        request_id TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TRIGGER journal_no_update BEFORE UPDATE ON journal
        BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
    CREATE TRIGGER journal_no_delete BEFORE DELETE ON journal
        BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
    CREATE TABLE held (
        request_id TEXT PRIMARY KEY,
        seq INTEGER NOT NULL,
        tenant_id TEXT NOT NULL,
        reserved_tokens INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE operations (
        request_id TEXT NOT NULL PRIMARY KEY,
        attempt_ids TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        user_id TEXT,
        api_key_id TEXT NOT NULL,
        model TEXT NOT NULL,
        version TEXT,
        pool TEXT,
        worker_id TEXT,
        gpu_id TEXT,
        adapter TEXT,
        priority TEXT NOT NULL,
        mode TEXT NOT NULL,
        prompt_tokens_estimated INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        prompt_tokens_cached INTEGER NOT NULL,
        prompt_tokens_injected INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        reserved_tokens INTEGER NOT NULL,
        gpu_memory_mb REAL NOT NULL,
        memory_source TEXT NOT NULL,
        kv_byte_seconds INTEGER NOT NULL,
        prefill_us INTEGER NOT NULL,
        decode_us INTEGER NOT NULL,
        queue_enter_ts INTEGER NOT NULL,
        start_ts INTEGER,
        first_token_ts INTEGER,
        end_ts INTEGER NOT NULL,
        latency_us INTEGER NOT NULL,
        status INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        finish_reason TEXT,
        count_source TEXT NOT NULL,
        policy_actions TEXT NOT NULL,
        price_version TEXT,
        cost TEXT,
        trace_id TEXT NOT NULL,
        reserve_seq INTEGER NOT NULL,
        settle_seq INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX operations_by_time ON operations (end_ts);
    CREATE INDEX operations_by_tenant ON operations (tenant_id, end_ts);
    CREATE INDEX operations_by_key ON operations (api_key_id, end_ts);
    CREATE TABLE checkpoint_mark (id INTEGER PRIMARY KEY CHECK (id = 1), number INTEGER NOT NULL) STRICT;
    INSERT INTO checkpoint_mark VALUES (1, 0);
    """,
)

RECORD_FIELDS: Final = OperationRecord.__struct_fields__
_ATTEMPT_IDS: Final = RECORD_FIELDS.index("attempt_ids")
_POLICY_ACTIONS: Final = RECORD_FIELDS.index("policy_actions")
_RECORD_COLUMNS: Final = ", ".join(RECORD_FIELDS)

_INSERT_JOURNAL: Final = "INSERT INTO journal VALUES (?, ?, ?, ?, ?)"
_INSERT_HELD: Final = "INSERT INTO held VALUES (?, ?, ?, ?)"
_DELETE_HELD: Final = "DELETE FROM held WHERE request_id = ?"
_INSERT_OPERATION: Final = (
    f"INSERT INTO operations ({_RECORD_COLUMNS}, reserve_seq, settle_seq)"  # noqa: S608
    f" VALUES ({', '.join('?' * (len(RECORD_FIELDS) + 2))})"
)
_SELECT_OPERATION: Final = f"SELECT {_RECORD_COLUMNS} FROM operations WHERE request_id = ?"  # noqa: S608

_SELECT_RECENT: Final = (
    f"SELECT {_RECORD_COLUMNS} FROM operations WHERE end_ts > ?"  # noqa: S608
    " AND prompt_tokens + completion_tokens > 0 ORDER BY end_ts"
)
_IS_SETTLED: Final = "SELECT 1 FROM operations WHERE request_id = ?"

Row = tuple[Any, ...]
_encoder = msgspec.json.Encoder()
_string_list_decoder = msgspec.json.Decoder(tuple[str, ...])


class Batch:
    """Rows that go into the file in one transaction.

    An operation reserved and settled within one batch is never seen in `held`.
    """

    __slots__ = ("held", "journal", "operations", "released")

    def __init__(self) -> None:
        self.journal: list[Row] = []
        self.held: dict[str, Row] = {}
        self.released: list[tuple[str]] = []
        self.operations: list[list[Any]] = []

    def add_reservation(self, reservation: Reservation, seq: int, at_us: int) -> None:
        """Opens an operation."""
        request_id = reservation.request_id
        body = _encoder.encode(reservation).decode()
        self.journal.append((seq, at_us, "reserve", request_id, body))
        self.held[request_id] = (request_id, seq, reservation.tenant_id, reservation.reserved_tokens)

    def add_settlement(self, record: OperationRecord, reserve_seq: int, seq: int, at_us: int) -> None:
        """Ends an operation whose reservation is row `reserve_seq` of the journal."""
        request_id = record.request_id
        self.journal.append((seq, at_us, "settle", request_id, _encoder.encode(record).decode()))
        if self.held.pop(request_id, None) is None:
            self.released.append((request_id,))
        values: list[Any] = list(msgspec.structs.astuple(record))
        values[_ATTEMPT_IDS] = _strings(record.attempt_ids)
        values[_POLICY_ACTIONS] = _strings(record.policy_actions)
        values.append(reserve_seq)
        values.append(seq)
        self.operations.append(values)


class LedgerFile:
    """The file and its one writing connection. Methods raise `sqlite3.Error`, except where said."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> "LedgerFile":
        """Opens or creates the file. Raises `SetupError`.

        Never waits for a lock and never checkpoints by itself: both would stop the event loop.
        """
        connection = open_database(path, SCHEMA, synchronous="NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        return cls(connection)

    def close(self) -> None:
        """Closes the file; SQLite folds the write-ahead log into it."""
        self._connection.close()

    def write(self, batch: Batch) -> None:
        """One transaction: all rows or, with `sqlite3.Error`, none."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_INSERT_JOURNAL, batch.journal)
            if batch.held:
                connection.executemany(_INSERT_HELD, batch.held.values())
            if batch.released:
                cursor = connection.executemany(_DELETE_HELD, batch.released)
                if cursor.rowcount != len(batch.released):
                    raise sqlite3.IntegrityError(
                        "an operation to be settled is not held: ledger.db was edited"
                    )
            if batch.operations:
                connection.executemany(_INSERT_OPERATION, batch.operations)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def last_seq(self) -> int:
        """The number of the newest journal row, 0 when there is none."""
        (seq,) = self._connection.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()
        return int(seq)

    def open_reservations(self) -> list[tuple[int, Reservation]]:
        """What was reserved and not settled, oldest first. Raises `SetupError` on unreadable rows."""
        rows = self._connection.execute(
            "SELECT j.seq, j.body FROM held h LEFT JOIN journal j ON j.seq = h.seq ORDER BY h.seq"
        )
        try:
            return [(seq, msgspec.json.decode(body, type=Reservation)) for seq, body in rows]
        except (msgspec.DecodeError, TypeError) as error:
            raise SetupError(f"the ledger is damaged: a held reservation is not in it ({error})") from error

    def is_settled(self, request_id: str) -> bool:
        """Whether the operation has its final row. About 2 µs."""
        return self._connection.execute(_IS_SETTLED, (request_id,)).fetchone() is not None

    def settled(self, request_id: str) -> tuple[Reservation, OperationRecord] | None:
        """Both journal rows of a settled operation, or None."""
        row = self._connection.execute(
            "SELECT r.body, s.body FROM operations o JOIN journal r ON r.seq = o.reserve_seq"
            " JOIN journal s ON s.seq = o.settle_seq WHERE o.request_id = ?",
            (request_id,),
        ).fetchone()
        if row is None:
            return None
        return (
            msgspec.json.decode(row[0], type=Reservation),
            msgspec.json.decode(row[1], type=OperationRecord),
        )

    def settled_since(self, end_ts: int) -> list[OperationRecord]:
        """Final rows with tokens that ended after this time, oldest first."""
        rows = self._connection.execute(_SELECT_RECENT, (end_ts,))
        return [_record(row) for row in rows]

    def record(self, request_id: str) -> OperationRecord | None:
        """The final row of an operation, or None."""
        return find_record(self._connection, request_id)


def find_record(connection: sqlite3.Connection, request_id: str) -> OperationRecord | None:
    """The final row of an operation through any connection. Raises `sqlite3.Error`."""
    row = connection.execute(_SELECT_OPERATION, (request_id,)).fetchone()
    return None if row is None else _record(row)


def find_records(connection: sqlite3.Connection) -> Iterator[OperationRecord]:
    """All final rows through any connection. Raises `sqlite3.Error`."""
    for row in connection.execute(f"SELECT {_RECORD_COLUMNS} FROM operations"):  # noqa: S608
        yield _record(row)


def _record(row: Row) -> OperationRecord:
    values = dict(zip(RECORD_FIELDS, row, strict=True))
    for field in ("attempt_ids", "policy_actions"):
        values[field] = _string_list_decoder.decode(values[field])
    return msgspec.convert(values, OperationRecord)


def _strings(strings: tuple[str, ...]) -> str:
    return _encoder.encode(strings).decode() if strings else "[]"
