"""Folds the write-ahead log of ledger.db into the database, off the event loop.

A checkpoint waits for the disk twice, so the loop's connection never does one. A thread with a connection
of its own does it: `PASSIVE`, which disturbs nobody, and when the log has grown anyway (a busy writer
never lets it be reused) `RESTART`, which locks the writer out for some milliseconds; the journal tries
again then. The first commit into a log that was folded in whole starts it anew and waits for the disk as
well, so the thread makes that one itself.
"""

import sqlite3
from pathlib import Path
from typing import Final

from headrace.store.ledger_schema import SCHEMA
from headrace.store.sqlite import open_database

LOG_PAGES_MAX: Final = 4096
"""16 MiB at SQLite's 4 KiB pages; from here on the log is restarted."""
_READER_WAIT_SECONDS: Final = 0.005
"""How long a restart may wait for a reader while it keeps the writer out."""


class Checkpointer:
    """A second connection to the ledger. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._connection = open_database(path, SCHEMA, synchronous="NORMAL", timeout_s=_READER_WAIT_SECONDS)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def run(self) -> int:
        """Does what is due and returns how many pages the log still holds. Raises `sqlite3.Error`."""
        pages, folded = self._checkpoint("PASSIVE")
        if pages >= LOG_PAGES_MAX:  # folded or not: the writer has gone on meanwhile
            pages, folded = self._checkpoint("RESTART")
        if pages == folded:
            self._connection.execute("UPDATE checkpoint_mark SET number = number + 1")
        return pages - folded

    def _checkpoint(self, mode: str) -> tuple[int, int]:
        _busy, pages, folded = self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        return int(pages), int(folded)


def is_contention(error: sqlite3.Error) -> bool:
    """Whether another connection was merely in the way."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
