"""`ledger verify` finds every difference between the journal and what is kept beside it."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.ledger.records import Refund
from headrace.store.journal import Journal
from headrace.store.verify import verify_ledger
from tests.store.ledger_samples import StubClock, record, reservation


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """Three operations settled, one open."""
    path = tmp_path / "ledger.db"
    journal = Journal(path, StubClock())
    for number in range(4):
        await journal.reserve(reservation(f"req_{number}"))
    for number in range(3):
        await journal.settle(record(f"req_{number}"))
    await journal.close()
    return path


def test_a_whole_ledger(path: Path) -> None:
    verdict = verify_ledger(path)
    assert verdict.differences == []
    assert (verdict.entries, verdict.operations, verdict.held) == (7, 3, 1)
    assert verdict.completion_tokens == 3 * record("x").completion_tokens


def change_tokens(database: sqlite3.Connection) -> None:
    database.execute("UPDATE operations SET completion_tokens = 1 WHERE request_id = 'req_1'")


def drop_row(database: sqlite3.Connection) -> None:
    database.execute("DELETE FROM operations WHERE request_id = 'req_1'")


def drop_held(database: sqlite3.Connection) -> None:
    database.execute("DELETE FROM held")


def hold_more(database: sqlite3.Connection) -> None:
    database.execute("UPDATE held SET reserved_tokens = reserved_tokens + 1")


def hold_a_ghost(database: sqlite3.Connection) -> None:
    database.execute("INSERT INTO held VALUES ('req_1', 1, 'demo', 5)")


def without_triggers(*statements: str) -> Callable[[sqlite3.Connection], None]:
    def damage(database: sqlite3.Connection) -> None:
        database.execute("DROP TRIGGER journal_no_update")
        database.execute("DROP TRIGGER journal_no_delete")
        for statement in statements:
            database.execute(statement)

    return damage


cut_the_tail = without_triggers("DELETE FROM journal WHERE seq = 7")
cut_the_middle = without_triggers("DELETE FROM journal WHERE seq = 2")
edit_an_entry = without_triggers("UPDATE journal SET body = replace(body, 'demo', 'evil') WHERE seq = 6")
garble_an_entry = without_triggers("UPDATE journal SET body = 'x' WHERE seq = 6")


def added(kind: str, *entries: Any) -> Callable[[sqlite3.Connection], None]:
    """More entries in the journal, which is allowed to grow."""

    def damage(database: sqlite3.Connection) -> None:
        for seq, entry in enumerate(entries, 8):
            body = msgspec.json.encode(entry).decode()
            values = (seq, 0, kind, entry.request_id, body)
            database.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", values)

    return damage


def charge_more(database: sqlite3.Connection) -> None:
    database.execute("UPDATE operations SET charged_prompt_tokens = 91 WHERE request_id = 'req_1'")


def swap_kinds(database: sqlite3.Connection) -> None:
    without_triggers("UPDATE journal SET kind = 'void' WHERE seq = 6")(database)


REFUND = Refund(request_id="req_1", reason="ours", actor="key_a", at_ts=0)
NOBODY = msgspec.structs.replace(REFUND, request_id="nobody")
OPEN = msgspec.structs.replace(REFUND, request_id="req_3")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (charge_more, "req_1 differs from the journal in charged_prompt_tokens"),
        (added("refund", REFUND), "req_1 differs from the journal in refunded"),
        (swap_kinds, "req_1 is a void and should be a settle"),
        (added("refund", REFUND, REFUND), "req_1 is refunded a second time"),
        (added("refund", NOBODY), "nobody is refunded and has not ended"),
        (added("refund", OPEN), "req_3 is refunded and has not ended"),
        (added("late_settle", record("req_1", outcome="late")), "req_1 is settled late and had not expired"),
        (added("late_settle", record("x", outcome="late")), "x is settled late and had not expired"),
        (added("settle", record("req_1")), "req_1 is settled a second time"),
        (added("expire", record("x", outcome="expired")), "x is settled without a reservation"),
        (added("refuse", record("req_1")), "req_1 is refused and was there before"),
        (added("refuse", record("req_3")), "req_3 is refused and was there before"),
        (added("settle", record("req_3", tenant_id="x")), "req_3 is settled for another tenant or key"),
        (added("settle", record("req_3", prompt_tokens=-1)), "req_3 has tokens or charges out of range"),
        (
            added("settle", record("req_3", charged_prompt_tokens=91)),
            "req_3 has tokens or charges out of range",
        ),
        (added("refund", record("x")), "journal entry 8: not readable"),
        (change_tokens, "req_1 differs from the journal in completion_tokens"),
        (drop_row, "req_1 is settled in the journal and has no row"),
        (drop_held, "req_3 holds None"),
        (hold_more, "req_3 holds"),
        (hold_a_ghost, "req_1 is held and the journal has it not open"),
        (cut_the_tail, "req_2 has a row and the journal no settlement"),
        (cut_the_middle, "after entry 1 comes 3"),
        (edit_an_entry, "req_1"),
        (garble_an_entry, "journal entry 6: not readable"),
    ],
)
def test_damage_is_found_and_named(
    path: Path, damage: Callable[[sqlite3.Connection], None], says: str
) -> None:
    database = sqlite3.connect(path)
    damage(database)
    database.commit()
    database.close()
    assert any(says in difference for difference in verify_ledger(path).differences)


def test_the_samples_are_what_the_tests_think(path: Path) -> None:
    assert msgspec.to_builtins(record("x"))["tenant_id"] == "demo"
    assert reservation("x").tenant_id == "demo"
