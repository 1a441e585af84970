"""Closes what an earlier life of the server left open, from what its workers noted."""

import asyncio
from collections.abc import Iterable

import structlog

from headrace.clock import Clock
from headrace.core.embedded import counts_of
from headrace.ledger.closing import LATE, NOTHING, RECOVERED, close
from headrace.ledger.records import AbortPolicy, OperationRecord
from headrace.store.journal import Journal
from headrace.worker.messages import AttemptRecord

_log = structlog.get_logger()


async def close_left_open(
    journal: Journal, records: Iterable[AttemptRecord], clock: Clock, *, abort_policy: AbortPolicy
) -> int:
    """Give every open operation its final record, and expired ones their late record. How many there were."""
    by_request: dict[str, AttemptRecord] = {}
    for record in records:
        # Of several attempts of a request only the last one can have run.
        by_request[record.attempt_id.rpartition(".")[0]] = record
    durable = []
    for reservation in journal.open_reservations():
        found = by_request.get(reservation.request_id)
        counts = NOTHING if found is None else counts_of(found)
        durable.append(
            journal.settle(
                close(
                    reservation,
                    RECOVERED,
                    counts,
                    worker_id=None,
                    end_ts=clock.wall_us(),
                    abort_policy=abort_policy,
                )
            )
        )
    for request_id, noted in by_request.items():
        late = _late_record(journal, request_id, noted, clock, abort_policy=abort_policy)
        if late is not None:
            durable.append(journal.late_settle(late))
    if durable:
        await asyncio.gather(*durable)
        _log.warning("operations_recovered", count=len(durable))
    return len(durable)


def _late_record(
    journal: Journal, request_id: str, found: AttemptRecord, clock: Clock, *, abort_policy: AbortPolicy
) -> OperationRecord | None:
    """The late record of an operation that expired in an earlier life; None if it did not."""
    history = journal.expired(request_id)
    if history is None or history.reservation is None:
        return None
    return close(
        history.reservation,
        LATE,
        counts_of(found),
        worker_id=history.record.worker_id,
        end_ts=clock.wall_us(),
        abort_policy=abort_policy,
    )
