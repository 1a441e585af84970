"""The writing half of the journal: what one turn of the event loop recorded becomes one transaction.

Group commit (ME-2): what is recorded in one turn of the event loop goes into one transaction
at the start of the next turn, on the loop itself; while each turn brings more, several turns share one
(`_gather`): a transaction costs much more than an entry. That costs the loop some 100 µs plus 10 µs an entry
(`benchmarks/ledger_commit.py`); a writer thread would cost the same processor time and wait up to 5 ms for
the interpreter lock at each of its many steps while the loop is busy. What waits for the disk, `fsync` and
checkpoints, runs in threads in which one call into C does everything.

Durability: at level `os` a future is done when the operating system has the data (survives `kill -9`), at
`fsync` when the disk has it (survives a power cut; what SQLite calls `synchronous=FULL`, with the wait
moved off the loop).

A commit that fails (full disk, lock) loses nothing: entries stay, in order, and are tried again with
growing pauses; their futures stay pending.
"""

import asyncio
import fcntl
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, Literal

import structlog

from headrace.errors import SetupError
from headrace.store.checkpoint import Checkpointer, is_contention
from headrace.store.errors import StoreUnavailable
from headrace.store.ledger_file import Batch, LedgerFile

Durability = Literal["os", "fsync"]
Futures = list[asyncio.Future[None]]

PENDING_MAX: Final = 20_000
"""Entries not written yet; beyond it `reserve` refuses. About 1.5 KB each."""
CHECKPOINT_ENTRIES: Final = 2000
"""Entries between two checkpoints."""
GATHER_ENTRIES: Final = 64
GATHER_SECONDS: Final = 0.003
"""A commit waits for no more entries once there are so many, or once it has waited so long. Only a loop that has
something to do in every turn meets these bounds, and it serves more requests a second for them."""
CLOSE_SECONDS_MAX: Final = 5.0
RETRY_SECONDS_FIRST: Final = 0.001
RETRY_SECONDS_MAX: Final = 0.5
CONTENTION_ATTEMPTS_MAX: Final = 8
"""Failed attempts (a quarter of a second) after which a lock counts as ill health."""

_log = structlog.get_logger("headrace.ledger")


class GroupCommit:
    """The ledger's file, the rows that wait for it, and who waits for them. Belongs to one event loop."""

    def __init__(self, path: Path, *, durability: Durability, pending_max: int) -> None:
        """Opens or creates the ledger. Raises `SetupError`, also when another process has it open."""
        assert durability in ("os", "fsync")
        self._pending_max = pending_max
        self._is_fsync = durability == "fsync"
        self._lock = _lock(path)
        try:
            self._file = LedgerFile.open(path)
            self._checkpointer = Checkpointer(path)
        except SetupError:
            os.close(self._lock)
            raise
        self._log_path = f"{path}-wal"
        self._log_descriptor = os.open(self._log_path, os.O_RDONLY | os.O_CLOEXEC)
        self._log_inode = os.fstat(self._log_descriptor).st_ino
        self._running_loop: asyncio.AbstractEventLoop | None = None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ledger")

        self._batch = Batch()
        self._batch_futures: Futures = []
        self._commit_handle: asyncio.Handle | None = None
        self._gathered = 0
        """Entries that the commit under way had in the turn before."""
        self._gather_until_s = 0.0
        self._attempts = 0
        self._failure: str | None = None

        self._unsynced: Futures = []
        self._is_syncing = False
        self._is_broken = False
        self._entries_since_checkpoint = 0
        self._is_checkpointing = False

    @property
    def is_healthy(self) -> bool:
        """False while commits fail."""
        return self._failure is None

    @property
    def failure(self) -> str | None:
        """Why commits fail, for the log and the status page."""
        return self._failure

    @property
    def num_pending(self) -> int:
        """Entries that are not written yet."""
        return len(self._batch.journal)

    def flush(self) -> asyncio.Future[None]:
        """Done when everything recorded so far is durable, and so visible to other processes."""
        return self._after_pending()

    async def close(self) -> None:
        """Writes what is pending, trying for up to `CLOSE_SECONDS_MAX`, and closes the file.

        Raises `StoreUnavailable` when something could not be written.
        """
        done = self.flush()
        try:
            await asyncio.wait((done,), timeout=CLOSE_SECONDS_MAX)
        finally:
            if self._commit_handle is not None:
                self._commit_handle.cancel()
            self._threads.shutdown(wait=True)
            self._checkpointer.close()
            self._file.close()
            os.close(self._log_descriptor)
            os.close(self._lock)
        if not done.done():
            reason = f"{self.num_pending} ledger entries could not be written: {self._failure}"
            self._fail(self._batch_futures, reason)
        await done

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        # Asked for once: in Python 3.11 `get_running_loop` is a system call.
        if self._running_loop is None:
            self._running_loop = asyncio.get_running_loop()
        return self._running_loop

    def _check_room(self) -> None:
        if len(self._batch.journal) >= self._pending_max:
            raise StoreUnavailable(f"{len(self._batch.journal)} ledger entries wait for the disk")

    def _after_pending(self) -> asyncio.Future[None]:
        future = self._loop.create_future()
        self._batch_futures.append(future)
        self._schedule()
        return future

    def _schedule(self) -> None:
        if self._commit_handle is None:
            loop = self._loop
            self._gathered = 0
            self._gather_until_s = loop.time() + GATHER_SECONDS
            self._commit_handle = loop.call_soon(self._gather)

    def _gather(self) -> None:
        """Commit, unless the last turn of the loop brought entries: then the next one may, too.

        Nothing sleeps for this: a loop that is idle commits one empty turn later, a busy one does what it
        has to do anyway before it commits.
        """
        entries = len(self._batch.journal)
        if self._gathered < entries < GATHER_ENTRIES:
            loop = self._loop
            if loop.time() < self._gather_until_s:
                self._gathered = entries
                self._commit_handle = loop.call_soon(self._gather)
                return
        self._commit()

    def _commit(self) -> None:
        self._commit_handle = None
        entries = len(self._batch.journal)
        if entries:
            try:
                self._file.write(self._batch)
            except sqlite3.Error as error:
                self._try_again(error)
                return
            self._batch = Batch()
            if not self._is_log_in_place():
                _log.critical("ledger_log_removed", hint="another program removed ledger.db-wal: restart")
                self._failure = "the write-ahead log was removed by another program"
                self._is_broken = True
                self._pending_max = 0
        if self._attempts:
            self._attempts = 0
            if self._failure is not None and not self._is_broken:
                self._failure = None
                _log.info("ledger_recovered", entries=entries)
        futures, self._batch_futures = self._batch_futures, []
        if self._is_broken:
            self._fail(futures, self._failure or "an earlier fsync failed")
        elif self._is_fsync:
            self._unsynced += futures
            self._sync()
        else:
            _resolve(futures)
        self._entries_since_checkpoint += entries
        if self._entries_since_checkpoint >= CHECKPOINT_ENTRIES and not self._is_checkpointing:
            self._checkpoint()

    def _is_log_in_place(self) -> bool:
        """Whether what was written can be found again: the log that is open is the one with its name."""
        try:
            named = os.stat(self._log_path)  # noqa: PTH116 - a Path would cost more than the call
        except FileNotFoundError:
            return False
        return named.st_ino == self._log_inode

    def _try_again(self, error: sqlite3.Error) -> None:
        delay = min(RETRY_SECONDS_FIRST * 2**self._attempts, RETRY_SECONDS_MAX)
        self._attempts = min(self._attempts + 1, 32)
        if not is_contention(error) or self._attempts > CONTENTION_ATTEMPTS_MAX:
            if self._failure is None:
                _log.error("ledger_commit_failed", error=str(error), entries=self.num_pending)
            self._failure = str(error)
        self._commit_handle = self._loop.call_later(delay, self._commit)

    # --- what waits for the disk ----------------------------------------------------------------

    def _sync(self) -> None:
        """One fsync at a time; what is committed meanwhile shares the next one."""
        if self._is_syncing or not self._unsynced:
            return
        self._is_syncing = True
        futures, self._unsynced = self._unsynced, []
        loop = self._loop
        synced = loop.run_in_executor(self._threads, os.fsync, self._log_descriptor)
        synced.add_done_callback(partial(self._synced, futures))

    def _synced(self, futures: Futures, synced: asyncio.Future[None]) -> None:
        self._is_syncing = False
        error = synced.exception()
        if error is None:
            _resolve(futures)
            self._sync()
            return
        # After a failed fsync the kernel may have dropped the pages: asking again would lie.
        _log.critical("ledger_fsync_failed", error=str(error))
        self._failure = f"fsync failed: {error}"
        self._is_broken = True
        self._pending_max = 0
        self._fail(futures + self._unsynced, self._failure)
        self._unsynced = []

    def _fail(self, futures: Futures, reason: str) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(StoreUnavailable(reason))

    def _checkpoint(self) -> None:
        self._is_checkpointing = True
        self._entries_since_checkpoint = 0
        loop = self._loop
        done = loop.run_in_executor(self._threads, self._checkpointer.run)
        done.add_done_callback(self._checkpointed)

    def _checkpointed(self, done: asyncio.Future[int]) -> None:
        self._is_checkpointing = False
        error = done.exception()
        if error is None:
            return
        assert isinstance(error, sqlite3.Error), error
        if not is_contention(error):
            _log.warning("ledger_checkpoint_failed", error=str(error))


def _resolve(futures: Futures) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _lock(path: Path) -> int:
    """Two cores on one ledger would number the same rows twice. The kernel frees the lock when we die."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SetupError(f"cannot open {path}.lock: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise SetupError(f"{path} is in use by another headrace process") from error
    return descriptor
