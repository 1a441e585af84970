"""A ledger that an earlier version wrote (`ledger_version_1.sql`, its dump) goes on where it stopped."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.errors import SetupError
from headrace.ledger.records import OperationRecord, Refund
from headrace.store.errors import LedgerConflict
from headrace.store.journal import Journal
from headrace.store.ledger_schema import SCHEMA, is_version_1
from headrace.store.sqlite import open_database
from headrace.store.verify import verify_ledger
from tests.store.ledger_samples import BASE_TS, StubClock, record, reservation

DUMP = Path(__file__).with_name("ledger_version_1.sql")
USER = 'a"abort_policy":'
"""Contents that must not be taken for a field's name."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(DUMP.read_text())
    return path


def charged(
    request_id: str, delivered_tokens: int, completion_tokens: int, **changes: object
) -> OperationRecord:
    fields: dict[str, object] = {
        "completion_tokens": completion_tokens,
        "delivered_tokens": delivered_tokens,
        "charged_prompt_tokens": 90,
        "charged_completion_tokens": completion_tokens,
    }
    return record(request_id, **(fields | changes))


ROWS = [
    charged("req_0", 10, 10, user_id=USER),
    charged("req_1", 0, 4, outcome="client_closed", status=499),
    charged(
        "req_2", 0, 0, outcome="refused", status=429, count_source="none", prompt_tokens=0,
        charged_prompt_tokens=0,
    ),
    charged(
        "req_3", 0, 10, outcome="worker_lost", status=502, count_source="progress_file",
        end_ts=BASE_TS + 2_000_000,
    ),
]  # fmt: skip


async def test_every_row_is_kept_and_charged_what_it_used(path: Path) -> None:
    journal = Journal(path, StubClock())
    assert [journal.get(f"req_{number}", "demo") for number in range(4)] == ROWS
    assert journal.settled_since(0) == [ROWS[0], ROWS[1], ROWS[3]]
    assert journal.open_reservations() == [reservation("req_4")]
    assert verify_ledger(path).differences == []
    await journal.close()


def test_verify_does_not_change_the_file_and_says_what_brings_it_up_to_date(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(SetupError, match=r"schema version 1, this headrace reads version 2; .*first start"):
        verify_ledger(path)
    assert path.read_bytes() == before


async def test_the_rules_hold_across_the_change(path: Path) -> None:
    journal = Journal(path, StubClock())
    await journal.settle(ROWS[0])
    with pytest.raises(LedgerConflict):
        journal.settle(record("req_0", user_id=USER))
    with pytest.raises(LedgerConflict):
        journal.reserve(reservation("req_0", reserved_tokens=1))
    await journal.settle(record("req_4"))
    await journal.refund(Refund(request_id="req_1", reason="ours", actor="key_a", at_ts=BASE_TS))
    await journal.close()
    verdict = verify_ledger(path)
    assert verdict.differences == []
    assert (verdict.entries, verdict.operations, verdict.held, verdict.refunds) == (11, 5, 0, 1)
    assert (verdict.charged_prompt_tokens, verdict.charged_completion_tokens) == (180, 20)


def test_the_journal_stays_append_only_and_knows_its_kinds(path: Path) -> None:
    with closing(open_database(path, SCHEMA, synchronous="NORMAL")) as connection:
        for statement in ("UPDATE journal SET body = '{}'", "DELETE FROM journal"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(statement)
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            connection.execute("INSERT INTO journal VALUES (100, 0, 'odd', 'x', '{}')")


def test_both_ways_to_the_present_version_lead_to_the_same_tables(path: Path, tmp_path: Path) -> None:
    def tables(path: Path) -> list[tuple[str, str]]:
        with closing(open_database(path, SCHEMA, synchronous="NORMAL")) as connection:
            found = connection.execute(
                "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name"
            )
            return [(name, " ".join(sql.split())) for name, sql in found]

    migrated = tables(path)
    assert migrated == tables(tmp_path / "new.db")
    assert {"journal_no_update", "journal_no_delete", "operations_by_time"} <= {name for name, _ in migrated}


def test_which_version_wrote_a_record(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        bodies = [body for (body,) in connection.execute("SELECT body FROM journal WHERE kind = 'settle'")]
    assert len(bodies) == 4
    assert all(is_version_1(body) for body in bodies)
