"""What a server was asked and when, out of its ledger: sizes and times of operations, no content.

Like reports: a connection that cannot write, opened anew, one read transaction that ends rather than hold the
write-ahead log open for ever. Only for processes that are not the server itself.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.clock import Clock
from headrace.errors import SetupError
from headrace.store.ledger_schema import check_version
from headrace.store.reports import ReportTooLong, UsageQuery, where_of
from headrace.store.sqlite import open_read_only

OPERATIONS_MAX: Final = 5_000_000
SECONDS_MAX: Final = 60.0
_STEPS_BETWEEN_CHECKS: Final = 100_000


class TrafficRow(msgspec.Struct, frozen=True, gc=False):
    """One row of the ledger, as it stands there; fields as in `OperationRecord`. Times in microseconds since 1970 UTC."""

    request_id: str
    num_requests: int
    tenant_id: str
    model: str
    priority: str
    prompt_tokens: int
    prompt_tokens_cached: int
    completion_tokens: int
    prefill_us: int
    decode_us: int
    queue_enter_ts: int
    start_ts: int | None
    first_token_ts: int | None
    end_ts: int
    outcome: str
    worker_id: str | None


_COLUMNS: Final = ", ".join(TrafficRow.__struct_fields__)


def read_traffic(path: Path, query: UsageQuery, clock: Clock) -> list[TrafficRow]:
    """The operations of a ledger by the time they came, chosen as for a usage report (by the time they ended).

    Raises `SetupError` if there is no ledger, it cannot be read, or there are more than `OPERATIONS_MAX`;
    `ReportTooLong` after `SECONDS_MAX`.
    """
    if not path.is_file():
        raise SetupError(f"there is no ledger at {path}: is its directory the data directory of a server?")
    where, values = where_of(query)
    deadline_us = clock.monotonic_us() + int(SECONDS_MAX * 1_000_000)
    with _reading(path) as connection:
        connection.set_progress_handler(lambda: clock.monotonic_us() > deadline_us, _STEPS_BETWEEN_CHECKS)
        connection.execute("BEGIN")
        check_version(connection, path)
        # Only constants of this module are put into the text; what was asked for is bound.
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM operations WHERE {where} LIMIT {OPERATIONS_MAX + 1}",  # noqa: S608
            values,
        )
        found = [TrafficRow(*row) for row in rows]
    if len(found) > OPERATIONS_MAX:
        raise SetupError(f"more than {OPERATIONS_MAX:,} operations; choose fewer with from, to or tenant")
    found.sort(key=lambda row: (row.queue_enter_ts, row.request_id))
    return found


def tenant_weights(path: Path) -> dict[str, float]:
    """Each tenant's weight now, from control.db; empty where there is no such file or its tenants have no weights.
    Raises `SetupError`."""
    if not path.is_file():
        return {}
    with _reading(path) as connection:
        columns = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info('tenants')")}
        if "weight" not in columns:
            return {}
        rows: list[tuple[str, Any]] = connection.execute("SELECT id, weight FROM tenants").fetchall()
    return {tenant: float(weight) for tenant, weight in rows if weight is not None}


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    connection = open_read_only(path)
    try:
        yield connection
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise ReportTooLong(
                f"reading took longer than {SECONDS_MAX:.0f} s; narrow it with from and to"
            ) from error
        raise SetupError(f"cannot read {path}: {error}") from error
    finally:
        connection.close()
