"""`ledger verify` finds every difference between the journal and what is kept beside it."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

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


@pytest.mark.parametrize(
    ("damage", "says"),
    [
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
