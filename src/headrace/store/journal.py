"""The ledger as the core uses it: two-phase, exactly once, durable before it says so.

Rules (ME-1): an operation is reserved once and ends once: settled, void (nothing ran) or expired (nobody knows
yet what was used). What an expired one used can be posted late, once; what an ended one is charged can be
refunded, once. Each is a new row of the journal, and `operations` shows what they amount to. A refusal that
held nothing is one row. The same again is a no-op that waits for the first to be durable; the same id with
other content, an end without a reservation, or numbers that cannot be are a `LedgerConflict`, and nothing
has changed.

Opening, writing and closing the file is `store.group_commit`.
"""

import asyncio
import sqlite3
from pathlib import Path

from headrace.clock import Clock
from headrace.ledger.closing import kind_of
from headrace.ledger.history import History, flaw_of, flaw_of_reservation
from headrace.ledger.records import OperationRecord, Refund, Reservation
from headrace.store.errors import LedgerConflict, OperationOpen, OperationUnknown, StoreUnavailable
from headrace.store.group_commit import PENDING_MAX, Durability, GroupCommit


class Journal(GroupCommit):
    """Owned by the core's event loop; what returns a future needs it to be running."""

    def __init__(
        self, path: Path, clock: Clock, *, durability: Durability = "os", pending_max: int = PENDING_MAX
    ) -> None:
        """Opens or creates the ledger. Raises `SetupError`, also when another process has it open."""
        super().__init__(path, durability=durability, pending_max=pending_max)
        self._clock = clock
        self._seq = self._file.last_seq()
        self._open = {held.request_id: (held, seq) for seq, held in self._file.open_reservations()}
        self._last_ended_id = self._file.last_request_id()
        """The highest id of all operations that have ended, as text: one above it has certainly not."""
        self._num_refusals_dropped = 0

    @property
    def num_refusals_dropped(self) -> int:
        """Refusals that are on no record, because too much waited for the disk."""
        return self._num_refusals_dropped

    def reserve(self, reservation: Reservation) -> asyncio.Future[None]:
        """Opens an operation; the future is done when the reservation is durable.

        Raises `StoreUnavailable` when too much waits to be written, `LedgerConflict` when the id was used
        for something else. Cancelling the future does not take the reservation back: settle it.
        """
        request_id = reservation.request_id
        if self._is_reserved(reservation):
            return self._after_pending()
        flaw = flaw_of_reservation(reservation)
        if flaw is not None:
            raise LedgerConflict(flaw)
        self._check_room()
        seq = self._seq + 1
        self._batch.add_reservation(reservation, seq, self._clock.wall_us())
        self._seq = seq
        self._open[request_id] = (reservation, seq)
        return self._after_pending()

    def settle(self, record: OperationRecord) -> asyncio.Future[None]:
        """Ends an operation; the future is done when its final row is durable. What the journal calls the end
        follows from the record (`ledger.closing.kind_of`).

        Raises `LedgerConflict`. Never refused for want of space: each open operation ends once.
        """
        request_id = record.request_id
        held = self._open.get(request_id)
        if held is None:
            history = self._history(request_id)
            if history is None or history.reservation is None:
                raise LedgerConflict(f"{request_id} was never reserved")
            if history.record != record:
                raise LedgerConflict(f"{request_id} was settled before with other content")
            return self._after_pending()
        reservation, reserve_seq = held
        _check(record, reservation)
        if record.outcome == "late":
            raise LedgerConflict(f"{request_id} has not expired, so nothing can be late")
        seq = self._seq + 1
        self._batch.add_settlement(record, reserve_seq, seq, self._clock.wall_us(), kind_of(record))
        self._seq = seq
        del self._open[request_id]
        self._note_end(request_id, History(reservation, record))
        return self._after_pending()

    def late_settle(self, record: OperationRecord) -> asyncio.Future[None]:
        """Posts what an operation used whose lease had run out: its row, until now `expired`, becomes this
        record, whose outcome is `late`. A refund that was made meanwhile stands.

        Raises `LedgerConflict`, also for an operation that did not expire.
        """
        request_id = record.request_id
        history = self._history(request_id)
        if history is None or history.record.outcome != "expired" or record.outcome != "late":
            raise LedgerConflict(f"{request_id} cannot be settled late: only `expired` becomes `late`")
        if history.late is not None:
            if history.late != record:
                raise LedgerConflict(f"{request_id} was settled late before with other content")
            return self._after_pending()
        _check(record, history.record)
        changed = History(history.reservation, history.record, record, history.refund)
        seq = self._seq + 1
        self._batch.add_late_settlement(record, changed.row, seq, self._clock.wall_us())
        self._seq = seq
        self._batch.histories[request_id] = changed
        return self._after_pending()

    def refund(self, refund: Refund) -> asyncio.Future[None]:
        """Takes back what an ended operation is charged. Again with the same reason by the same actor is a
        no-op; the first time stands.

        Raises `OperationUnknown`, `OperationOpen`, `LedgerConflict` when it was refunded for another reason,
        `StoreUnavailable` when too much waits to be written.
        """
        request_id = refund.request_id
        history = self._ended(request_id)
        if history.refund is not None:
            if (history.refund.reason, history.refund.actor) != (refund.reason, refund.actor):
                raise LedgerConflict(f"{request_id} was refunded before: {history.refund.reason}")
            return self._after_pending()
        self._check_room()
        changed = History(history.reservation, history.record, history.late, refund)
        seq = self._seq + 1
        self._batch.add_refund(refund, seq, self._clock.wall_us())
        self._seq = seq
        self._batch.histories[request_id] = changed
        return self._after_pending()

    def refuse(self, record: OperationRecord) -> None:
        """Records a request that was refused before it held anything. Nobody waits for it.

        Dropped and counted when too much waits to be written. Raises `LedgerConflict` only.
        """
        request_id = record.request_id
        if len(self._batch.journal) >= self._pending_max:
            self._num_refusals_dropped += record.num_requests
            return
        try:
            is_known = self._is_refused(record)
        except StoreUnavailable:
            self._num_refusals_dropped += record.num_requests
            return
        if is_known:
            return
        flaw = flaw_of(record)
        if flaw is not None:
            raise LedgerConflict(flaw)
        if record.prompt_tokens or record.completion_tokens or record.outcome in ("expired", "late"):
            raise LedgerConflict(f"{request_id} has used something and was never reserved")
        seq = self._seq + 1
        self._batch.add_refusal(record, seq, self._clock.wall_us())
        self._seq = seq
        self._note_end(request_id, History(None, record))
        self._schedule()

    def get(self, request_id: str, tenant_id: str) -> OperationRecord | None:
        """The final row as it stands now, written or not. None when there is none or it is another tenant's."""
        unwritten = self._batch.histories.get(request_id)
        record = unwritten.row if unwritten is not None else self._file.record(request_id)
        return record if record is not None and record.tenant_id == tenant_id else None

    def get_open(self, request_id: str, tenant_id: str) -> Reservation | None:
        """The reservation of an operation that has not ended."""
        held = self._open.get(request_id)
        return held[0] if held is not None and held[0].tenant_id == tenant_id else None

    def find(self, request_id: str) -> OperationRecord:
        """The final row whoever's it is, written or not: for administrators.

        Raises `OperationUnknown`, `OperationOpen`, `StoreUnavailable`.
        """
        return self._ended(request_id).row

    def expired(self, request_id: str) -> History | None:
        """What is known of an operation that expired and whose late record has not come; None of any other."""
        history = None if request_id in self._open else self._history(request_id)
        if history is None or history.record.outcome != "expired" or history.late is not None:
            return None
        return history

    def open_reservations(self) -> list[Reservation]:
        """All operations that have not ended, oldest first: at start, those to recover."""
        return [reservation for reservation, _ in self._open.values()]

    def settled_since(self, end_ts: int) -> list[OperationRecord]:
        """Final rows with charged tokens that ended after this time, oldest first: at start, what limits count."""
        return self._file.settled_since(end_ts)

    # --- the rules ------------------------------------------------------------------------------

    def _is_reserved(self, reservation: Reservation) -> bool:
        """Whether this very reservation was made before. Raises `LedgerConflict` if another one was."""
        request_id = reservation.request_id
        held = self._open.get(request_id)
        if held is not None:
            known: Reservation | None = held[0]
        elif self._has_ended(request_id):
            history = self._history(request_id)
            assert history is not None
            known = history.reservation
        else:
            return False
        if known != reservation:
            raise LedgerConflict(f"{request_id} was reserved before with other content")
        return True

    def _is_refused(self, record: OperationRecord) -> bool:
        """Whether this very refusal is on record. Raises `LedgerConflict` if the id is something else's."""
        request_id = record.request_id
        if request_id not in self._open and not self._has_ended(request_id):
            return False
        history = self._history(request_id)
        if history is None or history.reservation is not None or history.record != record:
            raise LedgerConflict(f"{request_id} was used before for something else")
        return True

    def _note_end(self, request_id: str, history: History) -> None:
        self._batch.histories[request_id] = history
        if request_id > self._last_ended_id:
            self._last_ended_id = request_id

    def _has_ended(self, request_id: str) -> bool:
        # The gateway's ids begin with the time, so a new one is nearly always above all that have ended:
        # that spares each reservation a look into the file.
        if request_id > self._last_ended_id:
            return False
        if request_id in self._batch.histories:
            return True
        try:
            return self._file.is_settled(request_id)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the ledger cannot be read: {error}") from error

    def _ended(self, request_id: str) -> History:
        history = self._history(request_id)
        if history is None:
            if request_id in self._open:
                raise OperationOpen(f"{request_id} has not ended")
            raise OperationUnknown(f"there is no operation {request_id}")
        return history

    def _history(self, request_id: str) -> History | None:
        history = self._batch.histories.get(request_id)
        if history is not None:
            return history
        try:
            return self._file.history(request_id)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the ledger cannot be read: {error}") from error

    def _check_room(self) -> None:
        if len(self._batch.journal) >= self._pending_max:
            raise StoreUnavailable(f"{len(self._batch.journal)} ledger entries wait for the disk")


def _check(record: OperationRecord, opened: Reservation | OperationRecord) -> None:
    """Whether the record may end, or correct, what was opened. Raises `LedgerConflict`."""
    if (record.tenant_id, record.api_key_id) != (opened.tenant_id, opened.api_key_id):
        raise LedgerConflict(f"{record.request_id} was reserved by another tenant or key")
    flaw = flaw_of(record)
    if flaw is not None:
        raise LedgerConflict(flaw)
