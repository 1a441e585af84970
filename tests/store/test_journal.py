"""ME-1, ME-2: two-phase, exactly once, durable before it says so, nothing lost on a full disk."""

import asyncio
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.errors import SetupError
from headrace.ledger.records import OperationRecord
from headrace.store import group_commit
from headrace.store.errors import LedgerConflict, StoreUnavailable
from headrace.store.group_commit import Durability
from headrace.store.journal import Journal
from headrace.store.ledger_file import Batch
from headrace.store.ledger_schema import SCHEMA
from tests.store.ledger_samples import StubClock, record, reservation

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def opened(
    path: Path, durability: Durability = "os", pending_max: int = 1000
) -> AsyncIterator[Journal]:
    journal = Journal(path, StubClock(), durability=durability, pending_max=pending_max)
    try:
        yield journal
    finally:
        await journal.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


async def test_another_program_that_opens_and_closes_the_file_takes_nothing_away(path: Path) -> None:
    """As `sqlite3 ledger.db` does: the last one to close a database removes its log, and it must not be that."""
    look = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM held').fetchall(); c.close()"
    async with opened(path) as journal:
        await journal.reserve(reservation())
        inode = os.stat(f"{path}-wal").st_ino
        subprocess.run([sys.executable, "-c", look, str(path)], check=True)
        assert os.stat(f"{path}-wal").st_ino == inode
        await journal.settle(record())
        count = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM operations').fetchone()[0])"
        said = subprocess.run(
            [sys.executable, "-c", count, str(path)], check=True, capture_output=True, text=True
        )
        assert said.stdout.strip() == "1"
        assert journal.is_healthy


async def test_a_log_that_was_removed_is_noticed_and_nothing_more_is_promised(path: Path) -> None:
    async with opened(path) as journal:
        await journal.reserve(reservation())
        os.unlink(f"{path}-wal")
        with pytest.raises(StoreUnavailable, match="removed"):
            await journal.settle(record())
        assert not journal.is_healthy
        with pytest.raises(StoreUnavailable):
            journal.reserve(reservation(request_id="req_2"))
        with pytest.raises(StoreUnavailable):
            await journal.flush()
        journal._is_broken = False  # so that it can be closed


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_an_operation_is_held_then_final(path: Path, durability: Durability) -> None:
    async with opened(path, durability) as journal:
        await journal.reserve(reservation())
        assert rows(path, "SELECT request_id, seq, tenant_id, reserved_tokens FROM held") == [
            ("req_1", 1, "demo", 228)
        ]
        assert journal.open_reservations() == [reservation()]
        assert journal.get_open("req_1", "demo") == reservation()
        assert journal.get("req_1", "demo") is None
        await journal.settle(record())
        assert rows(path, "SELECT count(*) FROM held") == [(0,)]
        assert rows(path, "SELECT seq, kind, request_id FROM journal") == [
            (1, "reserve", "req_1"),
            (2, "settle", "req_1"),
        ]
        assert journal.open_reservations() == []
        assert journal.get_open("req_1", "demo") is None
        assert journal.get("req_1", "demo") == record()


async def test_nothing_is_said_before_it_is_written_and_a_turn_is_one_transaction(path: Path) -> None:
    async with opened(path) as journal:
        futures = [journal.reserve(reservation(f"req_{i}")) for i in range(5)]
        futures.append(journal.settle(record("req_0")))
        assert not any(future.done() for future in futures)
        assert journal.num_pending == 6
        assert rows(path, "SELECT count(*) FROM journal") == [(0,)]
        assert journal.get("req_0", "demo") == record("req_0"), "also before it is written"
        await futures[0]
        assert all(future.done() for future in futures)
        assert rows(path, "SELECT count(*) FROM journal") == [(6,)]
        assert rows(path, "SELECT count(*) FROM held") == [(4,)]


async def test_another_tenants_operation_looks_like_none(path: Path) -> None:
    async with opened(path) as journal:
        journal.reserve(reservation())
        assert journal.get_open("req_1", "other") is None
        await journal.settle(record())
        assert journal.get("req_1", "other") is None
        assert journal.get("req_2", "demo") is None


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("is_settled", [True, False])
async def test_the_same_twice_is_one_record(path: Path, is_written: bool, is_settled: bool) -> None:
    async with opened(path) as journal:
        journal.reserve(reservation())
        if is_settled:
            journal.settle(record())
        if is_written:
            await journal.flush()
        await journal.reserve(reservation())
        if is_settled:
            await journal.settle(record())
        assert rows(path, "SELECT count(*) FROM journal") == [(2 if is_settled else 1,)]
        assert rows(path, "SELECT count(*) FROM operations") == [(1 if is_settled else 0,)]


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("is_settled", [True, False])
async def test_the_same_id_with_other_content_is_an_error(
    path: Path, is_written: bool, is_settled: bool
) -> None:
    async with opened(path) as journal:
        journal.reserve(reservation())
        if is_settled:
            journal.settle(record())
        if is_written:
            await journal.flush()
        with pytest.raises(LedgerConflict):
            journal.reserve(reservation(reserved_tokens=1))
        if is_settled:
            with pytest.raises(LedgerConflict):
                journal.settle(record(completion_tokens=11))
        await journal.flush()
        assert rows(path, "SELECT count(*) FROM journal") == [(2 if is_settled else 1,)]


async def test_settling_without_a_reservation_is_an_error(path: Path) -> None:
    async with opened(path) as journal:
        with pytest.raises(LedgerConflict, match="never reserved"):
            journal.settle(record())
        assert journal.num_pending == 0


@pytest.mark.parametrize("field", ["tenant_id", "api_key_id"])
async def test_an_operation_cannot_be_settled_to_another_account(path: Path, field: str) -> None:
    async with opened(path) as journal:
        journal.reserve(reservation())
        with pytest.raises(LedgerConflict):
            journal.settle(record(**{field: "other"}))
        await journal.settle(record())
        assert journal.get("req_1", "demo") == record()


async def test_the_journal_cannot_be_edited_or_cut(path: Path) -> None:
    async with opened(path) as journal:
        await journal.reserve(reservation())
    connection = sqlite3.connect(path)
    for statement in ("UPDATE journal SET body = '{}'", "DELETE FROM journal"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()


async def test_there_is_one_column_for_each_field_of_the_record(path: Path) -> None:
    async with opened(path):
        columns = [row[1] for row in rows(path, "PRAGMA table_info(operations)")]
    assert columns == [
        *OperationRecord.__struct_fields__,
        "reserve_seq",
        "settle_seq",
        "late_seq",
        "refund_seq",
    ]


async def test_only_the_owner_can_read_the_files(path: Path) -> None:
    async with opened(path) as journal:
        await journal.reserve(reservation())
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock"), 0o600)


async def test_a_second_core_on_the_same_ledger_is_refused(path: Path) -> None:
    async with opened(path):
        with pytest.raises(SetupError, match="in use"):
            Journal(path, StubClock())
    async with opened(path) as again:
        assert again.is_healthy


async def test_a_ledger_of_a_newer_headrace_is_refused(path: Path) -> None:
    async with opened(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO schema_version VALUES (?)", (len(SCHEMA) + 1,))
    connection.commit()
    connection.close()
    with pytest.raises(SetupError, match="newer headrace"):
        Journal(path, StubClock())


async def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"not a database at all, not even a short one" * 100)
    with pytest.raises(SetupError, match=r"cannot use .*ledger\.db"):
        Journal(path, StubClock())


async def test_a_cancelled_wait_leaves_the_entry_in_place(path: Path) -> None:
    async with opened(path) as journal:
        waiting = journal.reserve(reservation())
        waiting.cancel()
        await journal.flush()
        assert rows(path, "SELECT count(*) FROM held") == [(1,)]


async def test_reservations_are_refused_when_too_much_waits_but_settlements_never(path: Path) -> None:
    async with opened(path, pending_max=3) as journal:
        for number in range(3):
            journal.reserve(reservation(f"req_{number}"))
        with pytest.raises(StoreUnavailable):
            journal.reserve(reservation("req_3"))
        journal.settle(record("req_0"))
        await journal.flush()
        await journal.reserve(reservation("req_3"))
        assert rows(path, "SELECT count(*) FROM journal") == [(5,)]


async def until(journal: Journal, is_healthy: bool) -> None:
    async with asyncio.timeout(10):
        while journal.is_healthy != is_healthy:
            await asyncio.sleep(0.005)


async def fill(journal: Journal) -> list[asyncio.Future[None]]:
    """Reserves and settles until a commit fails; returns the futures that are waiting then."""
    futures = []
    for number in range(2000):
        futures = [
            journal.reserve(reservation(f"req_{number}")),
            journal.settle(record(f"req_{number}", trace_id="x" * 2000)),
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not journal.is_healthy:
            return futures
    pytest.fail("the disk never became full")


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_a_full_database_loses_nothing_and_recovers(path: Path, durability: Durability) -> None:
    async with opened(path, durability) as journal:
        await journal.reserve(reservation("before"))
        connection = journal._file._connection
        connection.execute("PRAGMA max_page_count = 60")
        waiting = await fill(journal)
        assert journal.failure is not None
        assert "full" in journal.failure
        waiting.append(journal.reserve(reservation("later")))
        await asyncio.sleep(0.02)
        assert not any(future.done() for future in waiting)
        assert journal.num_pending == 3
        connection.execute("PRAGMA max_page_count = 100000")
        await asyncio.gather(*waiting)
        assert journal.is_healthy
        assert journal.failure is None
    assert rows(path, "SELECT request_id FROM held ORDER BY seq") == [("before",), ("later",)]
    (operations,) = rows(path, "SELECT count(*), count(DISTINCT request_id) FROM operations")
    assert operations[0] == operations[1] > 1
    assert rows(path, "SELECT count(*), max(seq) FROM journal") == [(operations[0] * 2 + 2,) * 2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("cannot mount a tmpfs here; the test with max_page_count stands in")
    yield folder
    subprocess.run(["umount", folder], check=True)


async def test_a_really_full_disk_loses_nothing_and_recovers(small_disk: Path) -> None:
    path = small_disk / "ledger.db"
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 400_000)
    async with opened(path) as journal:
        waiting = await fill(journal)
        assert not waiting[1].done()
        filler.unlink()
        await asyncio.gather(*waiting)
        assert journal.is_healthy
        done = len(rows(path, "SELECT 1 FROM operations"))
        assert done > 1
        assert rows(path, "SELECT count(*) FROM journal") == [(2 * done,)]
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]


async def test_closing_while_the_disk_refuses_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "CLOSE_SECONDS_MAX", 0.05)
    journal = Journal(path, StubClock())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = journal.reserve(reservation())
    with pytest.raises(StoreUnavailable, match="1 ledger entries could not be written"):
        await journal.close()
    with pytest.raises(StoreUnavailable):
        await waiting
    other.close()
    async with opened(path) as again:
        assert again.open_reservations() == []


async def test_a_lock_by_somebody_else_is_waited_for(path: Path) -> None:
    async with opened(path) as journal:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = journal.reserve(reservation())
        await asyncio.sleep(0.005)
        assert not waiting.done()
        assert journal.is_healthy, "a short lock is nothing to worry about"
        await until(journal, False)
        assert not waiting.done()
        other.execute("ROLLBACK")
        other.close()
        await waiting
        assert journal.is_healthy
        assert journal.open_reservations() == [reservation()]


async def test_a_failed_fsync_is_final(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(path, "fsync") as journal:
        await journal.reserve(reservation("good"))

        def broken(descriptor: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(group_commit.os, "fsync", broken)
        with pytest.raises(StoreUnavailable, match="fsync failed"):
            await journal.reserve(reservation("bad"))
        monkeypatch.undo()
        assert not journal.is_healthy
        with pytest.raises(StoreUnavailable):
            journal.reserve(reservation("refused"))
        with pytest.raises(StoreUnavailable):
            await journal.settle(record("good"))
        assert not journal.is_healthy
        journal._is_broken = False


async def test_many_operations_with_checkpoints_between(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "CHECKPOINT_ENTRIES", 10)
    monkeypatch.setattr("headrace.store.checkpoint.LOG_PAGES_MAX", 20)

    async def operations(journal: Journal, name: str) -> None:
        for number in range(60):
            await journal.reserve(reservation(f"req_{name}_{number}"))
            await journal.settle(record(f"req_{name}_{number}"))

    async with opened(path) as journal:
        await asyncio.gather(*(operations(journal, name) for name in "abcdefgh"))
        assert journal.is_healthy
        rounds = 8
        # On a busy machine the checkpointing thread may need a while to fold a log in whole.
        while rows(path, "SELECT number > 0 FROM checkpoint_mark") != [(1,)]:
            await operations(journal, f"more{rounds}")
            rounds += 1
            assert rounds < 100, "no checkpoint was ever completed"
    number = 60 * rounds
    assert rows(path, "SELECT count(*), count(DISTINCT request_id) FROM operations") == [(number, number)]
    assert rows(path, "SELECT count(*), min(seq), max(seq) FROM journal") == [(2 * number, 1, 2 * number)]


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.store.ledger_samples import StubClock, record, reservation
from headrace.store.journal import Journal
from headrace.store.ledger_file import Batch

async def main():
    journal = Journal(Path(sys.argv[1]), StubClock(), durability=sys.argv[3])
    number = 0
    while True:
        await journal.reserve(reservation(f"req_{number}"))
        print(f"reserved {number}", flush=True)
        await journal.settle(record(f"req_{number}"))
        print(f"settled {number}", flush=True)
        number += 1

asyncio.run(main())
"""


def run_until_killed(path: Path, durability: Durability) -> list[list[str]]:
    """What another process said about its ledger until it was killed."""
    arguments = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parents[2]), durability]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().split() for _ in range(101)]
        os.kill(process.pid, signal.SIGKILL)
        lines = process.stdout.read().splitlines(keepends=True)
    return said + [line.split() for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("durability", ["os", "fsync"])
async def test_what_was_said_to_be_durable_survives_kill_9(path: Path, durability: Durability) -> None:
    said = run_until_killed(path, durability)
    async with opened(path) as journal:
        still_open = {held.request_id for held in journal.open_reservations()}
        assert len(still_open) <= 1
        for what, number in said:
            request_id = f"req_{number}"
            final = journal.get(request_id, "demo")
            assert final == record(request_id) or (what == "reserved" and request_id in still_open)
        for held in journal.open_reservations():
            await journal.settle(record(held.request_id, outcome="recovered"))
        assert rows(path, "SELECT count(*) FROM held") == [(0,)]


async def watched_writes(journal: Journal, num_turns: int) -> list[int]:
    """One reservation in each of so many turns of the loop: entries in each transaction."""
    sizes: list[int] = []
    write = journal._file.write

    def counted(batch: Batch) -> None:
        sizes.append(len(batch.journal))
        write(batch)

    journal._file.write = counted  # type: ignore[method-assign]
    for number in range(num_turns):
        durable = journal.reserve(reservation(f"req_{number}"))
        await asyncio.sleep(0)
    await durable
    return sizes


async def test_turns_that_follow_each_other_share_a_transaction(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "GATHER_SECONDS", 60.0)
    async with opened(path) as journal:
        assert await watched_writes(journal, 5) == [5]


async def test_a_transaction_gathers_for_so_many_entries_or_so_long(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "GATHER_SECONDS", 60.0)
    monkeypatch.setattr(group_commit, "GATHER_ENTRIES", 4)
    async with opened(path) as journal:
        assert max(await watched_writes(journal, 9)) == 4
    monkeypatch.setattr(group_commit, "GATHER_SECONDS", 0.0)
    async with opened(path.with_name("other.db")) as journal:
        assert await watched_writes(journal, 3) == [1, 1, 1]


async def test_an_old_id_is_known_again_wherever_it_stands_among_the_others(path: Path) -> None:
    """Ids above all that have ended are not looked up; the others are, also after a restart."""
    async with opened(path) as journal:
        for name in ("req_5", "req_2"):
            journal.reserve(reservation(name))
            await journal.settle(record(name))
        for name in ("req_2", "req_5"):
            with pytest.raises(LedgerConflict):
                journal.reserve(reservation(name, reserved_tokens=1))
        await journal.reserve(reservation("req_3"))
    async with opened(path) as journal:
        for name in ("req_2", "req_3", "req_5"):
            with pytest.raises(LedgerConflict):
                journal.reserve(reservation(name, reserved_tokens=1))
        await journal.reserve(reservation("req_6"))
        assert [held.request_id for held in journal.open_reservations()] == ["req_3", "req_6"]
