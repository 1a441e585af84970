"""SI-3: the traffic in a ledger is read without disturbing whoever writes it."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.clock import SystemClock
from headrace.errors import SetupError
from headrace.store import traffic
from headrace.store.control import Change, ControlStore, Tenant
from headrace.store.ledger_file import Batch, LedgerFile
from headrace.store.reports import ReportTooLong, UsageQuery, usage_report
from headrace.store.traffic import TrafficRow, read_traffic, tenant_weights
from tests.store.ledger_samples import BASE_TS, record, reservation

SECOND_US = 1_000_000


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[LedgerFile]:
    """Twenty operations a second apart, written last first; the file stays open, as a server has it."""
    file = LedgerFile.open(tmp_path / "ledger.db")
    batch = Batch()
    for number in reversed(range(20)):
        final = record(
            f"req_{number:02}",
            tenant_id=f"tenant_{number % 2}",
            queue_enter_ts=BASE_TS + number * SECOND_US,
            end_ts=BASE_TS + number * SECOND_US + 500_000,
            start_ts=BASE_TS + number * SECOND_US + 100,
            prompt_tokens_cached=number,
            outcome="client_closed" if number == 3 else "completed",
        )
        opened = reservation(final.request_id, tenant_id=final.tenant_id)
        batch.add_reservation(opened, 2 * (20 - number) - 1, 0)
        batch.add_settlement(final, 2 * (20 - number) - 1, 2 * (20 - number), 0)
    file.write(batch)
    yield file
    file.close()


def test_rows_are_as_they_stand_by_arrival(ledger: LedgerFile, tmp_path: Path) -> None:
    rows = read_traffic(tmp_path / "ledger.db", UsageQuery(), SystemClock())
    assert [row.request_id for row in rows] == [f"req_{number:02}" for number in range(20)]
    for row in rows:
        final = ledger.record(row.request_id)
        for field in TrafficRow.__struct_fields__:
            assert getattr(row, field) == getattr(final, field), field


def test_what_is_chosen_is_what_a_usage_report_counts(ledger: LedgerFile, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    for query in (
        UsageQuery(from_us=BASE_TS + 5 * SECOND_US, to_us=BASE_TS + 9 * SECOND_US + 500_000),
        UsageQuery(tenant="tenant_1"),
        UsageQuery(model="other"),
    ):
        rows = read_traffic(path, query, SystemClock())
        assert len(rows) == usage_report(path, query, SystemClock()).total["operations"]
    assert rows == []


def test_the_writer_goes_on(ledger: LedgerFile, tmp_path: Path) -> None:
    read_traffic(tmp_path / "ledger.db", UsageQuery(), SystemClock())
    batch = Batch()
    batch.add_refusal(record("req_99", outcome="refused"), 41, 0)
    ledger.write(batch)
    assert len(read_traffic(tmp_path / "ledger.db", UsageQuery(), SystemClock())) == 21


def test_what_cannot_be_read_is_said(
    ledger: LedgerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match=r"there is no ledger at .*/nowhere/ledger.db"):
        read_traffic(tmp_path / "nowhere" / "ledger.db", UsageQuery(), SystemClock())
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "text.db").write_text("no database, but long enough to be looked at" * 50)
    with pytest.raises(SetupError, match=r"cannot read .*not a database"):
        read_traffic(tmp_path / "text.db", UsageQuery(), SystemClock())
    with contextlib.closing(sqlite3.connect(tmp_path / "newer.db")) as newer:
        newer.executescript("CREATE TABLE schema_version (version); INSERT INTO schema_version VALUES (99)")
    with pytest.raises(SetupError, match="schema version 99"):
        read_traffic(tmp_path / "newer.db", UsageQuery(), SystemClock())
    monkeypatch.setattr(traffic, "OPERATIONS_MAX", 19)
    with pytest.raises(SetupError, match="more than 19 operations; choose fewer"):
        read_traffic(tmp_path / "ledger.db", UsageQuery(), SystemClock())
    monkeypatch.setattr(traffic, "SECONDS_MAX", -1.0)
    monkeypatch.setattr(traffic, "_STEPS_BETWEEN_CHECKS", 1)
    with pytest.raises(ReportTooLong, match="narrow it"):
        read_traffic(tmp_path / "ledger.db", UsageQuery(), SystemClock())


def test_weights_are_those_of_the_control_store_where_it_has_them(tmp_path: Path) -> None:
    path = tmp_path / "control.db"
    assert tenant_weights(path) == {}
    store = ControlStore.open(path)
    tenant = Tenant(id="acme", name=None, status="active", created_us=1, updated_us=1, version=1)
    store.save_tenant(tenant, Change(at_us=1, actor="test", action="create", subject="acme"))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(tenants)")}
        if "weight" not in columns:  # a store from before tenants had weights
            assert tenant_weights(path) == {}
            connection.execute("ALTER TABLE tenants ADD COLUMN weight REAL NOT NULL DEFAULT 1.0")
        connection.execute("UPDATE tenants SET weight = 2.5")
        connection.commit()
    assert tenant_weights(path) == {"acme": 2.5}
    store.close()
