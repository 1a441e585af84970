"""Refunds as an administrator asks for them: checked, put on the record of changes, carried out."""

import asyncio

from headrace import bounds
from headrace.clock import Clock
from headrace.core.checks import check_reason
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.ledger.records import OperationRecord, Refund
from headrace.store.errors import LedgerConflict, OperationOpen, OperationUnknown, StoreUnavailable
from headrace.store.journal import Journal


class Refunds:
    """Belongs to the core's event loop."""

    def __init__(self, journal: Journal, directory: Directory, clock: Clock) -> None:
        self._journal = journal
        self._directory = directory
        self._clock = clock

    async def refund(self, request_id: str, reason: str, actor: str) -> OperationRecord:
        """Takes back what an ended operation is charged; returns its row as it stands then, durable.

        The same again is a no-op. Raises `ControlFailure` 400 (reason), 404 (no such operation), 409 (not ended,
        refunded before for another reason) and `StoreUnavailable`.
        """
        check_reason(reason)
        refund = Refund(request_id=request_id, reason=reason, actor=actor, at_ts=self._clock.wall_us())
        shown = request_id[:64]
        try:
            record = self._journal.find(request_id)
            if not record.refunded:
                # On record first: what an administrator does must not happen unseen if the second write fails.
                self._directory.note("operation.refunded", request_id, {"reason": reason}, actor=actor)
            durable = self._journal.refund(refund)
        except OperationUnknown:
            raise ControlFailure(404, "operation_not_found", f"there is no operation {shown!r}") from None
        except OperationOpen:
            raise ControlFailure(
                409, "operation_open", f"operation {shown!r} has not ended; refund it when it has"
            ) from None
        except LedgerConflict:
            raise ControlFailure(
                409,
                "already_refunded",
                f"operation {shown!r} was refunded before, for another reason or by another key",
            ) from None
        try:
            async with asyncio.timeout(bounds.LEDGER_SECONDS_MAX):
                await asyncio.shield(durable)
        except TimeoutError:
            raise StoreUnavailable("the refund waits for the disk; ask again to see it written") from None
        return self._journal.find(request_id)
