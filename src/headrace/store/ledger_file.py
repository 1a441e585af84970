"""ledger.db: the journal and its projections, written together or not at all. Tables: `store.ledger_schema`.

Synchronous and without rules of its own: `store.journal` decides what may be written and when.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog

from headrace.errors import SetupError
from headrace.ledger.closing import EndKind
from headrace.ledger.history import History
from headrace.ledger.records import OperationRecord, Refund, Reservation
from headrace.store.ledger_schema import SCHEMA, decode_record
from headrace.store.log_tail import dropped_tail
from headrace.store.sqlite import open_database

Kind = Literal["reserve", "refuse", "late_settle", "refund"] | EndKind
"""What a row of the journal is. Fixed by a CHECK in the schema."""

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
_REPLACE_OPERATION: Final = (
    f"UPDATE operations SET ({_RECORD_COLUMNS}, late_seq) ="  # noqa: S608
    f" ({', '.join('?' * (len(RECORD_FIELDS) + 1))}) WHERE request_id = ?"
)
_REFUND_OPERATION: Final = (
    "UPDATE operations SET charged_prompt_tokens = 0, charged_completion_tokens = 0, refunded = 1,"
    " refund_seq = ? WHERE request_id = ?"
)
_SELECT_OPERATION: Final = f"SELECT {_RECORD_COLUMNS} FROM operations WHERE request_id = ?"  # noqa: S608
_SELECT_RECENT: Final = (
    f"SELECT {_RECORD_COLUMNS} FROM operations WHERE end_ts > ?"  # noqa: S608
    " AND charged_prompt_tokens + charged_completion_tokens > 0 ORDER BY end_ts"
)
_SELECT_HISTORY: Final = (
    "SELECT reserved.body, settled.body, late.body, refund.body FROM operations o"
    " LEFT JOIN journal reserved ON reserved.seq = o.reserve_seq"
    " JOIN journal settled ON settled.seq = o.settle_seq"
    " LEFT JOIN journal late ON late.seq = o.late_seq"
    " LEFT JOIN journal refund ON refund.seq = o.refund_seq WHERE o.request_id = ?"
)
_IS_SETTLED: Final = "SELECT 1 FROM operations WHERE request_id = ?"

Row = tuple[Any, ...]
_log = structlog.get_logger("headrace.ledger")
_encoder = msgspec.json.Encoder()
_string_list_decoder = msgspec.json.Decoder(tuple[str, ...])


class Batch:
    """Rows that go into the file in one transaction.

    An operation reserved and settled within one batch is never seen in `held`. What cannot be encoded
    raises before anything is added.
    """

    __slots__ = ("corrections", "held", "histories", "journal", "operations", "released")

    def __init__(self) -> None:
        self.journal: list[Row] = []
        self.held: dict[str, Row] = {}
        self.released: list[tuple[str]] = []
        self.operations: list[list[Any]] = []
        self.corrections: list[tuple[str, list[Any]]] = []
        """Statements that change rows of `operations`, in order, after those of this batch are in."""
        self.histories: dict[str, History] = {}
        """Operations that ended or were corrected in this batch: what the file does not say yet."""

    def add_reservation(self, reservation: Reservation, seq: int, at_us: int) -> None:
        """Opens an operation."""
        request_id = reservation.request_id
        body = _encoder.encode(reservation).decode()
        self.journal.append((seq, at_us, "reserve", request_id, body))
        self.held[request_id] = (request_id, seq, reservation.tenant_id, reservation.reserved_tokens)

    def add_settlement(
        self, record: OperationRecord, reserve_seq: int, seq: int, at_us: int, kind: EndKind = "settle"
    ) -> None:
        """Ends an operation whose reservation is row `reserve_seq` of the journal."""
        request_id = record.request_id
        body = _encoder.encode(record).decode()
        self.journal.append((seq, at_us, kind, request_id, body))
        if self.held.pop(request_id, None) is None:
            self.released.append((request_id,))
        self._add_operation(record, reserve_seq, seq)

    def add_refusal(self, record: OperationRecord, seq: int, at_us: int) -> None:
        """A request that held nothing: it ends as it begins."""
        body = _encoder.encode(record).decode()
        self.journal.append((seq, at_us, "refuse", record.request_id, body))
        self._add_operation(record, None, seq)

    def add_late_settlement(
        self, record: OperationRecord, row: OperationRecord, seq: int, at_us: int
    ) -> None:
        """What an expired operation used after all; its row becomes `row`."""
        body = _encoder.encode(record).decode()
        self.journal.append((seq, at_us, "late_settle", record.request_id, body))
        self.corrections.append((_REPLACE_OPERATION, [*_values(row), seq, record.request_id]))

    def add_refund(self, refund: Refund, seq: int, at_us: int) -> None:
        """Takes the charge of an ended operation back."""
        body = _encoder.encode(refund).decode()
        self.journal.append((seq, at_us, "refund", refund.request_id, body))
        self.corrections.append((_REFUND_OPERATION, [seq, refund.request_id]))

    def _add_operation(self, record: OperationRecord, reserve_seq: int | None, seq: int) -> None:
        values = _values(record)
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

        Never waits for a lock and never checkpoints by itself: both would stop the event loop. Says in the
        log what SQLite is going to drop from the end of the write-ahead log.
        """
        tail = dropped_tail(path)
        if tail is not None:
            _log.warning("ledger_tail_dropped", bytes=tail.num_bytes, frames=tail.num_frames)
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
            for statement, values in batch.corrections:
                if connection.execute(statement, values).rowcount != 1:
                    raise sqlite3.IntegrityError(
                        "an operation to be corrected is not there: ledger.db was edited"
                    )
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def last_seq(self) -> int:
        """The number of the newest journal row, 0 when there is none. Raises `SetupError`."""
        try:
            (seq,) = self._connection.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()
        except sqlite3.Error as error:
            raise SetupError(f"the ledger is damaged: its journal cannot be read ({error})") from error
        return int(seq)

    def last_request_id(self) -> str:
        """The highest id of an operation with a final row, as text; empty when there is none. Raises `SetupError`."""
        try:
            (request_id,) = self._connection.execute("SELECT max(request_id) FROM operations").fetchone()
        except sqlite3.Error as error:
            raise SetupError(f"the ledger is damaged: its operations cannot be read ({error})") from error
        return str(request_id or "")

    def open_reservations(self) -> list[tuple[int, Reservation]]:
        """What was reserved and not settled, oldest first. Raises `SetupError` on unreadable rows."""
        try:
            rows = self._connection.execute(
                "SELECT j.seq, j.body FROM held h LEFT JOIN journal j ON j.seq = h.seq ORDER BY h.seq"
            )
            return [(seq, msgspec.json.decode(body, type=Reservation)) for seq, body in rows]
        except (msgspec.DecodeError, TypeError) as error:
            raise SetupError(f"the ledger is damaged: a held reservation is not in it ({error})") from error
        except sqlite3.Error as error:
            raise SetupError(f"the ledger is damaged: what is held cannot be read ({error})") from error

    def is_settled(self, request_id: str) -> bool:
        """Whether the operation has its final row. About 2 µs."""
        return self._connection.execute(_IS_SETTLED, (request_id,)).fetchone() is not None

    def history(self, request_id: str) -> History | None:
        """The journal's entries of an operation that has ended, or None."""
        row = self._connection.execute(_SELECT_HISTORY, (request_id,)).fetchone()
        if row is None:
            return None
        reserved, settled, late, refund = row
        return History(
            reservation=None if reserved is None else msgspec.json.decode(reserved, type=Reservation),
            record=decode_record(settled),
            late=None if late is None else decode_record(late),
            refund=None if refund is None else msgspec.json.decode(refund, type=Refund),
        )

    def settled_since(self, end_ts: int) -> list[OperationRecord]:
        """Final rows with charged tokens that ended after this time, oldest first."""
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
    values["refunded"] = bool(values["refunded"])
    return msgspec.convert(values, OperationRecord)


def _values(record: OperationRecord) -> list[Any]:
    """The record as a row of `operations`."""
    values: list[Any] = list(msgspec.structs.astuple(record))
    values[_ATTEMPT_IDS] = _strings(record.attempt_ids)
    values[_POLICY_ACTIONS] = _strings(record.policy_actions)
    return values


def _strings(strings: tuple[str, ...]) -> str:
    return _encoder.encode(strings).decode() if strings else "[]"
