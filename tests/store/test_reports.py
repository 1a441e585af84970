"""ME-8: reports from the ledger equal what a loop over the records says."""

import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.clock import SystemClock
from headrace.errors import SetupError
from headrace.ledger.records import OperationRecord
from headrace.store import reports
from headrace.store.errors import StoreUnavailable
from headrace.store.ledger_file import Batch, LedgerFile
from headrace.store.reports import ReportTooLong, UsageQuery, usage_record, usage_report
from tests.store.ledger_samples import BASE_TS, StubClock, record, reservation

HOUR_US = 3_600_000_000
OUTCOMES = ("completed", "client_closed", "refused", "worker_lost", "timeout")


def sample(number: int) -> OperationRecord:
    return record(
        f"req_{number:03}",
        tenant_id=f"tenant_{number % 3}",
        api_key_id=f"key_{number % 4}",
        user_id=None if number % 2 else f"user_{number % 5}",
        department=None if number % 3 else f"department_{number % 4}",
        num_requests=7 if OUTCOMES[number % 5] == "refused" else 1,
        charged_prompt_tokens=number // 3,
        charged_completion_tokens=number // 4,
        model=f"model_{number % 2}",
        outcome=OUTCOMES[number % 5],
        prompt_tokens=number,
        prompt_tokens_cached=number // 2,
        completion_tokens=number * 2,
        latency_us=(number * 7919) % 1000,
        end_ts=BASE_TS + number * HOUR_US // 2,
    )


RECORDS = [sample(number) for number in range(100)]
REQUESTS = 80 + 20 * 7
"""Twenty rows stand for seven refusals each."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("reports") / "ledger.db"
    file = LedgerFile.open(path)
    batch = Batch()
    for number, final in enumerate(RECORDS):
        opened = reservation(final.request_id, tenant_id=final.tenant_id, api_key_id=final.api_key_id)
        batch.add_reservation(opened, 2 * number + 1, 0)
        batch.add_settlement(final, 2 * number + 1, 2 * number + 2, 0)
    file.write(batch)
    yield path
    file.close()


FIELDS = {
    "tenant": "tenant_id",
    "key": "api_key_id",
    "user": "user_id",
    "model": "model",
    "department": "department",
    "outcome": "outcome",
}


def group_of(final: OperationRecord, name: str) -> Any:
    if name in FIELDS:
        return getattr(final, FIELDS[name])
    with contextlib.closing(sqlite3.connect(":memory:")) as memory:
        text = memory.execute("SELECT datetime(?, 'unixepoch')", (final.end_ts // 10**6,)).fetchone()
    day, hour = text[0].split(" ")
    return day if name == "day" else f"{day}T{hour[:2]}:00:00Z"


def percentile(values: list[int], percent: int) -> int | None:
    ordered = sorted(values)
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None


def summed(finals: list[OperationRecord]) -> dict[str, Any]:
    latencies = [final.latency_us for final in finals for _ in range(final.num_requests)]
    return {
        "operations": len(latencies),
        "prompt_tokens": sum(final.prompt_tokens for final in finals),
        "prompt_tokens_cached": sum(final.prompt_tokens_cached for final in finals),
        "completion_tokens": sum(final.completion_tokens for final in finals),
        "charged_prompt_tokens": sum(final.charged_prompt_tokens for final in finals),
        "charged_completion_tokens": sum(final.charged_completion_tokens for final in finals),
        "refusals": sum(final.num_requests for final in finals if final.outcome == "refused"),
        "aborted": sum(final.outcome == "client_closed" for final in finals),
        "errors": sum(final.outcome in ("worker_lost", "timeout") for final in finals),
        "latency_us_p50": percentile(latencies, 50),
        "latency_us_p99": percentile(latencies, 99),
    }


@given(
    tenant=st.none() | st.sampled_from(["tenant_0", "tenant_2", "nobody"]),
    key=st.none() | st.sampled_from(["key_0", "key_3"]),
    model=st.none() | st.sampled_from(["model_0", "model_1"]),
    times=st.tuples(*[st.none() | st.integers(-1, 101)] * 2),
    group_by=st.lists(st.sampled_from(reports.GROUPS), unique=True, max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_a_report_is_what_a_loop_over_the_records_says(
    ledger: Path,
    tenant: str | None,
    key: str | None,
    model: str | None,
    times: tuple[int | None, int | None],
    group_by: list[str],
) -> None:
    from_us, to_us = (None if time is None else BASE_TS + time * HOUR_US // 2 for time in times)
    query = UsageQuery(
        tenant=tenant, key=key, model=model, from_us=from_us, to_us=to_us, group_by=tuple(group_by)
    )
    chosen = [
        final
        for final in RECORDS
        if tenant in (None, final.tenant_id)
        and key in (None, final.api_key_id)
        and model in (None, final.model)
        and (from_us is None or final.end_ts >= from_us)
        and (to_us is None or final.end_ts < to_us)
    ]
    groups: dict[tuple[Any, ...], list[OperationRecord]] = defaultdict(list)
    for final in chosen:
        groups[tuple(group_of(final, name) for name in group_by)].append(final)
    report = usage_report(ledger, query, SystemClock())
    assert report.total == summed(chosen)
    assert not report.truncated
    names = [FIELDS.get(name, name) for name in group_by]
    if not group_by:
        assert report.rows == [summed(chosen)]
    else:
        got = {tuple(row[name] for name in names): row for row in report.rows}
        assert len(got) == len(report.rows)
        assert {group: {n: v for n, v in row.items() if n not in names} for group, row in got.items()} == {
            group: summed(finals) for group, finals in groups.items()
        }


def test_too_many_groups_are_cut_and_said(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "ROWS_MAX", 2)
    report = usage_report(ledger, UsageQuery(group_by=("tenant",)), SystemClock())
    assert [row["tenant_id"] for row in report.rows] == ["tenant_0", "tenant_1"]
    assert report.truncated
    assert report.total["operations"] == REQUESTS


def test_percentiles_are_left_out_when_there_is_too_much_to_sort(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "PERCENTILE_OPERATIONS_MAX", 99)
    report = usage_report(ledger, UsageQuery(group_by=("tenant",)), SystemClock())
    assert {row["latency_us_p50"] for row in [*report.rows, report.total]} == {None}
    assert report.total["operations"] == REQUESTS


def test_a_report_that_takes_too_long_ends(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_STEPS_BETWEEN_CHECKS", 1)

    class Rushing(StubClock):
        def monotonic_us(self) -> int:
            self.now_us += 5_000_000
            return self.now_us

    with pytest.raises(ReportTooLong):
        usage_report(ledger, UsageQuery(), Rushing())


def test_one_record(ledger: Path) -> None:
    assert usage_record(ledger, "req_042") == RECORDS[42]
    assert usage_record(ledger, "req_x") is None


def test_the_connection_cannot_write(ledger: Path) -> None:
    connection = reports.open_read_only(ledger)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM held")
    connection.close()


def test_a_missing_ledger_is_said(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(SetupError, match="cannot read"):
        usage_report(path, UsageQuery(), SystemClock())
    assert not path.exists()


def test_a_damaged_ledger_is_said(tmp_path: Path) -> None:
    path = tmp_path / "bad.db"
    path.write_bytes(b"junk" * 1000)
    with pytest.raises((StoreUnavailable, SetupError)):
        usage_report(path, UsageQuery(), SystemClock())
    with pytest.raises((StoreUnavailable, SetupError)):
        usage_record(path, "x")
