"""Folds the ledger's journal from its first row and compares the result with the projections.

The journal is the truth; `held` and `operations` are what it amounts to, kept beside it so that nobody has
to fold it. Should they ever differ, this says where.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.ledger.records import OperationRecord, Reservation
from headrace.store.ledger_file import find_records
from headrace.store.sqlite import open_read_only

DIFFERENCES_MAX = 100


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at and what was wrong with it."""

    entries: int
    operations: int
    held: int
    prompt_tokens: int
    completion_tokens: int
    differences: list[str]
    """At most `DIFFERENCES_MAX`; empty if the ledger is whole."""


def verify_ledger(path: Path) -> Verdict:
    """Fold and compare, in one read transaction. Raises `SetupError` if the file cannot be read."""
    connection = open_read_only(path)
    try:
        connection.execute("BEGIN")
        fold = _Fold()
        for seq, kind, request_id, body in connection.execute(
            "SELECT seq, kind, request_id, body FROM journal ORDER BY seq"
        ):
            fold.take(seq, kind, request_id, body)
        held = dict(connection.execute("SELECT request_id, reserved_tokens FROM held"))
        fold.compare_held(held)
        fold.compare_operations(find_records(connection))
        return fold.verdict()
    finally:
        connection.close()


class _Fold:
    """The journal so far."""

    def __init__(self) -> None:
        self._open: dict[str, Reservation] = {}
        self._settled: dict[str, OperationRecord] = {}
        self._last_seq = 0
        self._differences: list[str] = []

    def take(self, seq: int, kind: str, request_id: str, body: str) -> None:
        if seq != self._last_seq + 1:
            self._differ(f"journal: after entry {self._last_seq} comes {seq}")
        self._last_seq = seq
        try:
            if kind == "reserve":
                self._reserve(seq, msgspec.json.decode(body, type=Reservation), request_id)
            else:
                self._settle(seq, msgspec.json.decode(body, type=OperationRecord), request_id)
        except msgspec.DecodeError as error:
            self._differ(f"journal entry {seq}: not readable: {error}")

    def _reserve(self, seq: int, reservation: Reservation, request_id: str) -> None:
        if reservation.request_id != request_id:
            self._differ(f"journal entry {seq}: is of {request_id} and says {reservation.request_id}")
        if request_id in self._open or request_id in self._settled:
            self._differ(f"journal entry {seq}: {request_id} is reserved a second time")
        self._open[request_id] = reservation

    def _settle(self, seq: int, record: OperationRecord, request_id: str) -> None:
        reservation = self._open.pop(request_id, None)
        if reservation is None:
            again = "a second time" if request_id in self._settled else "without a reservation"
            self._differ(f"journal entry {seq}: {request_id} is settled {again}")
        elif (reservation.tenant_id, reservation.api_key_id) != (record.tenant_id, record.api_key_id):
            self._differ(f"journal entry {seq}: {request_id} is settled for another tenant or key")
        if min(record.prompt_tokens, record.completion_tokens, record.prompt_tokens_cached) < 0:
            self._differ(f"journal entry {seq}: {request_id} has negative tokens")
        self._settled[request_id] = record

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
            record = self._settled.get(row.request_id)
            if record is None:
                self._differ(f"operations: {row.request_id} has a row and the journal no settlement")
            elif record != row:
                changed = [
                    name for name in row.__struct_fields__ if getattr(row, name) != getattr(record, name)
                ]
                self._differ(f"operations: {row.request_id} differs from the journal in {', '.join(changed)}")
        for request_id in self._settled.keys() - seen:
            self._differ(f"operations: {request_id} is settled in the journal and has no row")

    def verdict(self) -> Verdict:
        return Verdict(
            entries=self._last_seq,
            operations=len(self._settled),
            held=len(self._open),
            prompt_tokens=sum(record.prompt_tokens for record in self._settled.values()),
            completion_tokens=sum(record.completion_tokens for record in self._settled.values()),
            differences=self._differences,
        )

    def _differ(self, text: str) -> None:
        if len(self._differences) < DIFFERENCES_MAX:
            self._differences.append(text)
