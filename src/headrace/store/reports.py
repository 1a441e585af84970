"""Usage reports straight from `operations` in ledger.db, through a connection that cannot write.

Opened anew for each report, so any thread may make one. A report sees what was committed when it began
(ask the core for `FlushLedger` first); it ends with `ReportTooLong` rather than hold the write-ahead log
open for ever.
"""

import sqlite3
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.ledger.records import OperationRecord
from headrace.store.errors import StoreUnavailable
from headrace.store.ledger_file import find_record
from headrace.store.sqlite import open_read_only

ROWS_MAX: Final = 10_000
"""Groups in one report; beyond it `truncated` is set."""
PERCENTILE_OPERATIONS_MAX: Final = 200_000
"""Percentiles need all latencies sorted; with more operations than this they are left out."""
REPORT_SECONDS_MAX: Final = 10.0
_STEPS_BETWEEN_CHECKS: Final = 100_000

_GROUP_SQL: Final = {
    "tenant": "tenant_id",
    "key": "api_key_id",
    "model": "model",
    "user": "user_id",
    "department": "department",
    "day": "strftime('%Y-%m-%d', end_ts / 1000000, 'unixepoch')",
    "hour": "strftime('%Y-%m-%dT%H:00:00Z', end_ts / 1000000, 'unixepoch')",
    "outcome": "outcome",
}
GROUPS: Final = tuple(_GROUP_SQL)
_GROUP_FIELDS: Final = {"tenant": "tenant_id", "key": "api_key_id", "user": "user_id"}
"""What a group is called in a row, where that differs: the field of `OperationRecord`."""
# A row stands for `num_requests` requests: more than one where refusals were summed up.
_SUMS: Final = {
    "operations": "coalesce(sum(num_requests), 0)",
    "prompt_tokens": "coalesce(sum(prompt_tokens), 0)",
    "prompt_tokens_cached": "coalesce(sum(prompt_tokens_cached), 0)",
    "completion_tokens": "coalesce(sum(completion_tokens), 0)",
    "charged_prompt_tokens": "coalesce(sum(charged_prompt_tokens), 0)",
    "charged_completion_tokens": "coalesce(sum(charged_completion_tokens), 0)",
    "refusals": "coalesce(sum(num_requests * (outcome = 'refused')), 0)",
    "aborted": "coalesce(sum(num_requests * (outcome = 'client_closed')), 0)",
    "errors": "coalesce(sum(num_requests * (outcome NOT IN ('completed', 'refused', 'client_closed'))), 0)",
}
_SUMMED_COLUMNS: Final = (
    "num_requests",
    "prompt_tokens",
    "prompt_tokens_cached",
    "completion_tokens",
    "charged_prompt_tokens",
    "charged_completion_tokens",
    "outcome",
    "latency_us",
)
_PERCENTILES: Final = {"latency_us_p50": 50, "latency_us_p99": 99}


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which operations to sum. Times are microseconds since 1970 UTC of the operation's end, half-open:
    `from_us` is included, `to_us` is not.
    """

    tenant: str | None = None
    key: str | None = None
    """The key's `jti`."""
    model: str | None = None
    from_us: int | None = None
    to_us: int | None = None
    group_by: tuple[str, ...] = ()


class ReportTooLong(HeadraceError):
    """The report took longer than `REPORT_SECONDS_MAX`; a shorter time range helps."""


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sums, overall and by group.

    A row has the groups by their field names in `OperationRecord` (`tenant_id`, `api_key_id`, `user_id`,
    `department`, `model`, `outcome`; `day` and `hour` in UTC) and the sums: operations, prompt_tokens (cached
    ones included), prompt_tokens_cached, completion_tokens, charged_prompt_tokens and
    charged_completion_tokens (what is charged after aborts and refunds), refusals (`refused`), aborted
    (`client_closed`), errors (all other outcomes but `completed`), latency_us_p50 and latency_us_p99 (microseconds, nearest rank, null
    without operations or when there are too many to sort).
    """

    rows: list[dict[str, Any]]
    total: dict[str, Any]
    truncated: bool
    """Whether there are more groups than are shown."""


def usage_report(path: Path, query: UsageQuery, clock: Clock) -> UsageReport:
    """One report. Raises `SetupError` (no ledger), `StoreUnavailable`, `ReportTooLong`."""
    connection = open_read_only(path)
    deadline_us = clock.monotonic_us() + int(REPORT_SECONDS_MAX * 1_000_000)
    connection.set_progress_handler(lambda: clock.monotonic_us() > deadline_us, _STEPS_BETWEEN_CHECKS)
    try:
        connection.execute("BEGIN")  # all parts of the report see the same state
        where, values = where_of(query)
        (num_rows,) = connection.execute(
            f"SELECT count(*) FROM operations WHERE {where}",  # noqa: S608
            values,
        ).fetchone()
        has_percentiles = num_rows <= PERCENTILE_OPERATIONS_MAX
        total = _rows(connection, (), where, values, has_percentiles=has_percentiles)[0]
        rows = [total]
        if query.group_by:
            rows = _rows(connection, query.group_by, where, values, has_percentiles=has_percentiles)
        return UsageReport(rows=rows[:ROWS_MAX], total=total, truncated=len(rows) > ROWS_MAX)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
            raise ReportTooLong(
                f"the report took longer than {REPORT_SECONDS_MAX:.0f} s; narrow it with from and to"
            ) from error
        raise StoreUnavailable(f"the ledger cannot be read: {error}") from error
    except sqlite3.Error as error:
        raise StoreUnavailable(f"the ledger cannot be read: {error}") from error
    finally:
        connection.close()


def usage_record(path: Path, request_id: str) -> OperationRecord | None:
    """The final row of one operation, or None. Raises `SetupError`, `StoreUnavailable`."""
    connection = open_read_only(path)
    try:
        return find_record(connection, request_id)
    except sqlite3.Error as error:
        raise StoreUnavailable(f"the ledger cannot be read: {error}") from error
    finally:
        connection.close()


def where_of(query: UsageQuery) -> tuple[str, dict[str, Any]]:
    """The condition for rows of `operations`, and the values to bind."""
    conditions = {
        "tenant_id = :tenant": query.tenant,
        "api_key_id = :key": query.key,
        "model = :model": query.model,
        "end_ts >= :from_us": query.from_us,
        "end_ts < :to_us": query.to_us,
    }
    used = [condition for condition, value in conditions.items() if value is not None]
    return " AND ".join(used) or "TRUE", msgspec.structs.asdict(query)


def _rows(
    connection: sqlite3.Connection,
    group_by: tuple[str, ...],
    where: str,
    values: dict[str, Any],
    *,
    has_percentiles: bool,
) -> list[dict[str, Any]]:
    """One row for each group, in the order of the groups; without groups exactly one."""
    columns = [f"g{number}" for number in range(len(group_by))]
    groups = [f"{_GROUP_SQL[name]} AS {column}" for name, column in zip(group_by, columns, strict=True)]
    partition = f"PARTITION BY {', '.join(columns)} " if columns else ""
    ranks = (
        ", sum(num_requests) OVER (w ORDER BY latency_us ROWS UNBOUNDED PRECEDING) AS rank"
        ", sum(num_requests) OVER w AS num"
    )
    selected = ", ".join([*_SUMMED_COLUMNS, *groups])
    # Only constants of this module are put into the text; what was asked for is bound.
    source = f"SELECT {selected} FROM operations WHERE {where}"  # noqa: S608
    if has_percentiles:
        source = f"SELECT *{ranks} FROM ({source}) WINDOW w AS ({partition})"  # noqa: S608
    sums = [f"{sql} AS {name}" for name, sql in _SUMS.items()]
    sums += [
        # Nearest rank: the smallest latency that is not exceeded by `percent` of the operations.
        f"min(CASE WHEN rank * 100 >= num * {percent} THEN latency_us END) AS {name}"
        if has_percentiles
        else f"NULL AS {name}"
        for name, percent in _PERCENTILES.items()
    ]
    grouping = f"GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)}" if columns else ""
    sql = f"SELECT {', '.join([*columns, *sums])} FROM ({source}) {grouping} LIMIT {ROWS_MAX + 1}"  # noqa: S608
    names = (*(_GROUP_FIELDS.get(name, name) for name in group_by), *_SUMS, *_PERCENTILES)
    return [dict(zip(names, row, strict=True)) for row in connection.execute(sql, values)]
