"""The write-ahead log of the ledger stays bounded, and a checkpoint harms neither writer nor reader."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.store import checkpoint
from headrace.store.checkpoint import Checkpointer, is_contention
from headrace.store.ledger_file import Batch, LedgerFile
from headrace.store.sqlite import open_read_only
from tests.store.ledger_samples import record, reservation


class Ledger:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = LedgerFile.open(path)
        self.checkpointer = Checkpointer(path)
        self.seq = 0

    def write(self, times: int) -> None:
        for _ in range(times):
            batch = Batch()
            name = f"req_{self.seq}"
            batch.add_reservation(reservation(name), self.seq + 1, 0)
            batch.add_settlement(record(name), self.seq + 1, self.seq + 2, 0)
            self.seq += 2
            self.file.write(batch)

    @property
    def log_bytes(self) -> int:
        return Path(f"{self.path}-wal").stat().st_size


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.checkpointer.close()
    ledger.file.close()


def test_the_writer_alone_never_checkpoints(ledger: Ledger) -> None:
    """SQLite would do so every 1000 pages, and wait for the disk on the event loop."""
    ledger.write(400)
    assert ledger.log_bytes > 1200 * 4096


def test_the_log_is_used_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LOG_PAGES_MAX", 50)
    ledger.write(50)
    assert ledger.checkpointer.run() == 0
    size = ledger.log_bytes
    for _ in range(10):
        ledger.write(40)
        assert ledger.checkpointer.run() == 0
    assert ledger.log_bytes == size


def test_a_reader_keeps_what_it_sees_and_the_log_until_it_ends(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "LOG_PAGES_MAX", 10)
    ledger.write(5)
    reader = open_read_only(ledger.path)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM operations").fetchone() == (5,)
    ledger.write(20)
    assert ledger.checkpointer.run() > 0
    ledger.write(20)
    assert reader.execute("SELECT count(*) FROM operations").fetchone() == (5,)
    reader.execute("COMMIT")
    assert reader.execute("SELECT count(*) FROM operations").fetchone() == (45,)
    reader.close()
    assert ledger.checkpointer.run() == 0


def test_contention_is_told_from_trouble(ledger: Ledger) -> None:
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError) as locked:
        ledger.write(1)
    assert is_contention(locked.value)
    other.execute("ROLLBACK")
    with pytest.raises(sqlite3.OperationalError) as wrong:
        other.execute("SELECT nothing FROM nowhere")
    assert not is_contention(wrong.value)
    other.close()
    ledger.write(1)
