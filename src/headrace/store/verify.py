"""Folds the ledger's journal from its first row and compares the result with the projections.

The journal is the truth; `held` and `operations` are what it amounts to, kept beside it so that nobody has
to fold it. Should they ever differ, this says where.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import SetupError
from headrace.ledger.closing import kind_of
from headrace.ledger.history import History, flaw_of
from headrace.ledger.records import OperationRecord, Refund, Reservation
from headrace.store.ledger_file import find_records
from headrace.store.ledger_schema import check_version, decode_record, is_version_1
from headrace.store.sqlite import open_read_only

DIFFERENCES_MAX = 100
_ENDS: Final = frozenset({"settle", "void", "expire"})


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at and what was wrong with it."""

    entries: int
    operations: int
    """Rows; of refusals that were summed up one stands for many."""
    held: int
    refunds: int
    prompt_tokens: int
    completion_tokens: int
    charged_prompt_tokens: int
    charged_completion_tokens: int
    differences: list[str]
    """At most `DIFFERENCES_MAX`; empty if the ledger is whole."""


def verify_ledger(path: Path) -> Verdict:
    """Fold and compare, in one read transaction. Raises `SetupError` if the file cannot be read."""
    connection = open_read_only(path)
    try:
        connection.execute("BEGIN")
        check_version(connection, path)
        fold = _Fold()
        for seq, kind, request_id, body in connection.execute(
            "SELECT seq, kind, request_id, body FROM journal ORDER BY seq"
        ):
            fold.take(seq, kind, request_id, body)
        held = dict(connection.execute("SELECT request_id, reserved_tokens FROM held"))
        fold.compare_held(held)
        fold.compare_operations(find_records(connection))
        return fold.verdict()
    except sqlite3.Error as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    finally:
        connection.close()


class _Fold:
    """The journal so far."""

    def __init__(self) -> None:
        self._open: dict[str, Reservation] = {}
        self._ended: dict[str, History] = {}
        self._last_seq = 0
        self._differences: list[str] = []

    def take(self, seq: int, kind: str, request_id: str, body: str) -> None:
        if seq != self._last_seq + 1:
            self._differ(f"journal: after entry {self._last_seq} comes {seq}")
        self._last_seq = seq
        try:
            if kind == "reserve":
                self._reserve(seq, msgspec.json.decode(body, type=Reservation), request_id)
            elif kind == "refund":
                self._refund(seq, msgspec.json.decode(body, type=Refund), request_id)
            else:
                self._record(seq, kind, body, request_id)
        except msgspec.DecodeError as error:
            self._differ(f"journal entry {seq}: not readable: {error}")

    def _reserve(self, seq: int, reservation: Reservation, request_id: str) -> None:
        self._check_id(seq, reservation.request_id, request_id)
        if request_id in self._open or request_id in self._ended:
            self._differ(f"journal entry {seq}: {request_id} is reserved a second time")
        self._open[request_id] = reservation

    def _record(self, seq: int, kind: str, body: str, request_id: str) -> None:
        record = decode_record(body)
        self._check_id(seq, record.request_id, request_id)
        flaw = flaw_of(record)
        if flaw is not None:
            self._differ(f"journal entry {seq}: {flaw}")
        if kind in _ENDS:
            if kind != kind_of(record) and not is_version_1(body):  # version 1 called every end `settle`
                self._differ(
                    f"journal entry {seq}: {request_id} is a {kind} and should be a {kind_of(record)}"
                )
            self._end(seq, record)
        elif kind == "late_settle":
            self._settle_late(seq, record)
        else:
            self._refuse(seq, record)

    def _end(self, seq: int, record: OperationRecord) -> None:
        request_id = record.request_id
        reservation = self._open.pop(request_id, None)
        if reservation is None:
            again = "a second time" if request_id in self._ended else "without a reservation"
            self._differ(f"journal entry {seq}: {request_id} is settled {again}")
        elif (reservation.tenant_id, reservation.api_key_id) != (record.tenant_id, record.api_key_id):
            self._differ(f"journal entry {seq}: {request_id} is settled for another tenant or key")
        self._ended[request_id] = History(reservation, record)

    def _settle_late(self, seq: int, record: OperationRecord) -> None:
        history = self._ended.get(record.request_id)
        if history is None or history.record.outcome != "expired":
            self._differ(f"journal entry {seq}: {record.request_id} is settled late and had not expired")
        elif history.late is not None:
            self._differ(f"journal entry {seq}: {record.request_id} is settled late a second time")
        else:
            if (history.record.tenant_id, history.record.api_key_id) != (record.tenant_id, record.api_key_id):
                self._differ(f"journal entry {seq}: {record.request_id} is settled for another tenant or key")
            history.late = record

    def _refuse(self, seq: int, record: OperationRecord) -> None:
        request_id = record.request_id
        if request_id in self._open or request_id in self._ended:
            self._differ(f"journal entry {seq}: {request_id} is refused and was there before")
        self._ended[request_id] = History(None, record)

    def _refund(self, seq: int, refund: Refund, request_id: str) -> None:
        self._check_id(seq, refund.request_id, request_id)
        history = self._ended.get(request_id)
        if history is None:
            self._differ(f"journal entry {seq}: {request_id} is refunded and has not ended")
        elif history.refund is not None:
            self._differ(f"journal entry {seq}: {request_id} is refunded a second time")
        else:
            history.refund = refund

    def _check_id(self, seq: int, said: str, request_id: str) -> None:
        if said != request_id:
            self._differ(f"journal entry {seq}: is of {request_id} and says {said}")

    def compare_held(self, held: dict[str, int]) -> None:
        for request_id in self._open.keys() | held.keys():
            reservation = self._open.get(request_id)
            if reservation is None:
                self._differ(f"held: {request_id} is held and the journal has it not open")
            elif held.get(request_id) != reservation.reserved_tokens:
                self._differ(
                    f"held: {request_id} holds {held.get(request_id)}, reserved were {reservation.reserved_tokens}"
                )

    def compare_operations(self, rows: Iterator[OperationRecord]) -> None:
        seen = set()
        for row in rows:
            seen.add(row.request_id)
            history = self._ended.get(row.request_id)
            if history is None:
                self._differ(f"operations: {row.request_id} has a row and the journal no settlement")
            elif (folded := history.row) != row:
                changed = [
                    name for name in row.__struct_fields__ if getattr(row, name) != getattr(folded, name)
                ]
                self._differ(f"operations: {row.request_id} differs from the journal in {', '.join(changed)}")
        for request_id in self._ended.keys() - seen:
            self._differ(f"operations: {request_id} is settled in the journal and has no row")

    def verdict(self) -> Verdict:
        rows = [history.row for history in self._ended.values()]
        return Verdict(
            entries=self._last_seq,
            operations=len(rows),
            held=len(self._open),
            refunds=sum(history.refund is not None for history in self._ended.values()),
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            completion_tokens=sum(row.completion_tokens for row in rows),
            charged_prompt_tokens=sum(row.charged_prompt_tokens for row in rows),
            charged_completion_tokens=sum(row.charged_completion_tokens for row in rows),
            differences=self._differences,
        )

    def _differ(self, text: str) -> None:
        if len(self._differences) < DIFFERENCES_MAX:
            self._differences.append(text)
