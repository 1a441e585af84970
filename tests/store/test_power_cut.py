"""ME-1, ME-2: the power goes at any byte of the write-ahead log. What was committed before the cut is there, the
journal and its projections agree, and what was lost behind it is said."""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headrace.errors import SetupError
from headrace.ledger.records import Refund
from headrace.store import group_commit
from headrace.store.journal import Journal
from headrace.store.ledger_file import LedgerFile
from headrace.store.log_tail import FRAME_HEADER_BYTES, HEADER_BYTES, Tail, dropped_tail
from headrace.store.verify import verify_ledger
from tests.store.ledger_samples import BASE_TS, StubClock, record, reservation

FRAME_BYTES = FRAME_HEADER_BYTES + 4096
STRIDE = 2711
"""Prime to the frame, so the sample falls everywhere in it."""


class Run(msgspec.Struct, frozen=True):
    """A ledger that was written to, as it lay on the disk before it was closed."""

    database: bytes
    log: bytes
    commits: list[tuple[int, int]]
    """For each commit of this round of the log: where it ends in the file, and the journal's last row then."""
    seq_before: int
    """The last row that is in the database itself."""


def steps(journal: Journal, first: int) -> Iterator[asyncio.Future[None]]:
    """Commits of all kinds, one for each future."""
    for number in range(first, first + 3):
        yield journal.reserve(reservation(f"req_{number}"))
        yield journal.settle(record(f"req_{number}", charged_completion_tokens=10))
    yield journal.reserve(reservation(f"late_{first}"))
    yield journal.settle(record(f"late_{first}", outcome="expired", completion_tokens=0))
    yield journal.late_settle(record(f"late_{first}", outcome="late", charged_prompt_tokens=90))
    yield journal.refund(Refund(request_id=f"req_{first}", reason="ours", actor="key_a", at_ts=BASE_TS))
    journal.refuse(
        record(
            f"refused_{first}", outcome="refused", count_source="none", prompt_tokens=0, completion_tokens=0
        )
    )
    yield journal.flush()
    for number in range(20):
        journal.reserve(reservation(f"many_{first}_{number}", trace_id="x" * 300))
    yield journal.flush()


def end_of_log(path: Path) -> int:
    """Where the next frame goes: the log's own count of frames, from SQLite."""
    index = Path(f"{path}-shm").read_bytes()
    return HEADER_BYTES + int.from_bytes(index[16:20], "little") * FRAME_BYTES


async def write(path: Path, *, is_checkpointed: bool) -> Run:
    journal = Journal(path, StubClock())
    seq_before = 0
    if is_checkpointed:
        for done in steps(journal, 0):
            await done
        size = Path(f"{path}-wal").stat().st_size
        assert journal._checkpointer.run() == 0
        seq_before = journal._seq
    commits = []
    for done in steps(journal, 100):
        await done
        commits.append((end_of_log(path), journal._seq))
    log = Path(f"{path}-wal").read_bytes()
    if is_checkpointed:
        assert len(log) == size, "this round has overwritten a part of the earlier one"
    run = Run(path.read_bytes(), log, commits, seq_before)
    await journal.close()
    return run


@pytest.fixture(scope="module", params=[False, True], ids=["first_round", "after_a_checkpoint"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("run") / "ledger.db"
    return asyncio.run(write(path, is_checkpointed=request.param))


def cuts(run: Run) -> list[int]:
    """All borders of frames, the bytes beside them, and a sample of all others, up to the end of the round."""
    end = run.commits[-1][0]
    borders = range(HEADER_BYTES, end + 1, FRAME_BYTES)
    near = {border + offset for border in borders for offset in (-1, 0, 1, 8, FRAME_HEADER_BYTES)}
    every = set(range(0, end, STRIDE))
    return sorted(position for position in near | every | {0, 1, 31} if 0 <= position <= end)


def opened(folder: Path, database: bytes, log: bytes) -> tuple[int, list[Any]]:
    """Opens a ledger of these bytes, as after a power cut: its last row, and what was logged. Checks that it
    is whole."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / "ledger.db"
    path.write_bytes(database)
    Path(f"{path}-wal").write_bytes(log)
    with capture_logs() as logs:
        file = LedgerFile.open(path)
    try:
        assert verify_ledger(path).differences == []
        file.open_reservations()
        return file.last_seq(), [(line["event"], line["bytes"], line["frames"]) for line in logs]
    finally:
        file._connection.execute("PRAGMA synchronous=OFF")  # hundreds of times: no need to wait for the disk
        file.close()


def kept(run: Run, position: int) -> tuple[int, int]:
    """The last commit that lies completely before this position: its end and the journal's last row."""
    done = [commit for commit in run.commits if commit[0] <= position]
    return done[-1] if done else (HEADER_BYTES, run.seq_before)


def test_the_samples_are_what_the_tests_think(run: Run) -> None:
    assert len(run.commits) == 12
    assert len({end for end, _ in run.commits}) == 12
    assert any(
        after - before > 3 * FRAME_BYTES
        for (before, _), (after, _) in zip(run.commits, run.commits[1:], strict=False)
    )


def test_the_log_ends_at_any_byte(run: Run, tmp_path: Path) -> None:
    for position in cuts(run):
        end, seq = kept(run, position)
        found, logs = opened(tmp_path / "cut", run.database, run.log[:position])
        assert found == seq, position
        behind = position - end
        if position < HEADER_BYTES:
            assert logs == ([("ledger_tail_dropped", position, 0)] if position else [])
        elif seq > run.seq_before:  # before that come commits of the schema's, whose ends are not noted
            lost = -(-behind // FRAME_BYTES)
            assert logs == ([("ledger_tail_dropped", behind, lost)] if behind else []), position


def first_difference(log: bytes, whole: bytes) -> int:
    """Where the cut really is: what stands behind it may happen to be what was to be written."""
    return next(
        (at for at, (one, other) in enumerate(zip(log, whole, strict=False)) if one != other), len(whole)
    )


def test_the_rest_of_the_file_is_there_and_empty(run: Run, tmp_path: Path) -> None:
    """File systems may write a file's new length before its contents."""
    whole = run.log[: run.commits[-1][0]]
    for position in cuts(run)[::3]:
        if position < HEADER_BYTES or 8 < (position - HEADER_BYTES) % FRAME_BYTES < 16:
            continue  # half of the salts: nobody can say whose they are
        log = run.log[:position].ljust(len(whole), b"\0")
        end, seq = kept(run, first_difference(log, whole))
        found, logs = opened(tmp_path / "cut", run.database, log)
        assert found == seq, position
        if seq > run.seq_before:
            lost = len(whole) - end
            assert logs == ([("ledger_tail_dropped", lost, lost // FRAME_BYTES)] if lost else []), position


async def test_what_an_earlier_round_left_behind_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    run = await write(path, is_checkpointed=True)
    end = run.commits[-1][0]
    assert len(run.log) > end, "frames of the earlier round lie behind"
    found, logs = opened(tmp_path / "whole", run.database, run.log)
    assert (found, logs) == (run.commits[-1][1], [])


async def test_overwriting_an_earlier_round_is_cut_off(tmp_path: Path) -> None:
    """Behind the cut lies what was there before: only the torn frame, if any, is a loss."""
    path = tmp_path / "ledger.db"
    journal = Journal(path, StubClock())
    for done in steps(journal, 0):
        await done
    earlier = Path(f"{path}-wal").read_bytes()
    assert journal._checkpointer.run() == 0
    seq_before = journal._seq
    commits = []
    for done in steps(journal, 100):
        await done
        commits.append((end_of_log(path), journal._seq))
    run = Run(path.read_bytes(), Path(f"{path}-wal").read_bytes(), commits, seq_before)
    await journal.close()
    whole = run.log[: commits[-1][0]]
    for position in cuts(run)[::2]:
        if position < HEADER_BYTES:
            continue
        log = run.log[:position] + earlier[position:]
        at = first_difference(log, whole)
        end, seq = kept(run, at)
        found, logs = opened(tmp_path / "cut", run.database, log)
        assert found == seq, position
        if seq > seq_before:
            lost = (at - end) // FRAME_BYTES
            torn = end + lost * FRAME_BYTES
            lost += torn < at and log[torn + 8 : torn + 16] == whole[torn + 8 : torn + 16]
            assert logs == ([("ledger_tail_dropped", lost * FRAME_BYTES, lost)] if lost else []), position


async def test_a_flipped_bit_ends_the_log_there(tmp_path: Path) -> None:
    run = await write(tmp_path / "ledger.db", is_checkpointed=False)
    whole = run.commits[-1][0]
    for position in range(HEADER_BYTES + 5, whole, 40_009):
        log = bytearray(run.log[:whole])
        log[position] ^= 0x10
        found, logs = opened(tmp_path / "cut", run.database, bytes(log))
        end, seq = kept(run, position)
        assert found == seq, position
        if seq:
            assert [line[0] for line in logs] == ["ledger_tail_dropped"]
            assert logs[0][1] <= whole - end


async def test_with_fsync_everything_acknowledged_lies_before_the_last_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    synced = [0]
    sync = os.fsync

    def watched(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        sync(descriptor)
        synced.append(size)

    journal = Journal(path, StubClock(), durability="fsync")
    monkeypatch.setattr(group_commit.os, "fsync", watched)
    database = path.read_bytes()
    acknowledged: list[tuple[int, str]] = []

    async def one(number: int) -> None:
        request_id = f"req_{number}"
        await journal.reserve(reservation(request_id))
        acknowledged.append((synced[-1], request_id))
        await asyncio.sleep(0)
        await journal.settle(record(request_id))
        acknowledged.append((synced[-1], request_id))

    await asyncio.gather(*(one(number) for number in range(20)))
    log = Path(f"{path}-wal").read_bytes()
    monkeypatch.undo()
    await journal.close()
    assert len(acknowledged) == 40
    for size in sorted({size for size, _ in acknowledged}):
        folder = tmp_path / f"cut_{size}"
        found, _ = opened(folder, database, log[:size])
        expected = [request_id for at, request_id in acknowledged if at <= size]
        assert found >= len(expected)
        # `opened` has closed the file, which folds the log into it.
        with closing(sqlite3.connect(folder / "ledger.db")) as connection:
            rows = [row[0] for row in connection.execute("SELECT request_id FROM journal")]
        for request_id in set(expected):
            assert rows.count(request_id) >= expected.count(request_id)


def big_endian(log: bytes) -> bytes:
    """The same log as a machine of the other byte order writes it."""

    def checksum(data: bytes, first: int, second: int) -> tuple[int, int]:
        for at in range(0, len(data), 8):
            first = (first + int.from_bytes(data[at : at + 4], "big") + second) % 2**32
            second = (second + int.from_bytes(data[at + 4 : at + 8], "big") + first) % 2**32
        return first, second

    def packed(sums: tuple[int, int]) -> bytes:
        return sums[0].to_bytes(4, "big") + sums[1].to_bytes(4, "big")

    head = (0x377F0683).to_bytes(4, "big") + log[4:24]
    sums = checksum(head, 0, 0)
    parts = [head, packed(sums)]
    for start in range(HEADER_BYTES, len(log), FRAME_BYTES):
        frame = log[start : start + FRAME_BYTES]
        sums = checksum(frame[:8] + frame[FRAME_HEADER_BYTES:], *sums)
        parts += [frame[:16], packed(sums), frame[FRAME_HEADER_BYTES:]]
    return b"".join(parts)


async def test_a_log_of_the_other_byte_order_is_understood(tmp_path: Path) -> None:
    run = await write(tmp_path / "ledger.db", is_checkpointed=False)
    end, seq = run.commits[-2]
    log = big_endian(run.log[: run.commits[-1][0]])
    assert opened(tmp_path / "whole", run.database, log) == (run.commits[-1][1], [])
    behind = 2 * FRAME_BYTES + 100
    assert opened(tmp_path / "cut", run.database, log[: end + behind]) == (
        seq,
        [("ledger_tail_dropped", behind, 3)],
    )


def test_no_log_or_an_empty_one_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    assert dropped_tail(path) is None
    LedgerFile.open(path).close()
    assert dropped_tail(path) is None
    Path(f"{path}-wal").write_bytes(b"")
    assert dropped_tail(path) is None


@pytest.mark.parametrize("junk", [b"x", b"\0" * 32, b"junk" * 5000])
def test_a_log_that_is_none_is_dropped_whole(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "ledger.db"
    file = LedgerFile.open(path)
    file.close()
    Path(f"{path}-wal").write_bytes(junk)
    assert dropped_tail(path) == Tail(len(junk), 0)
    with capture_logs() as logs:
        LedgerFile.open(path).close()
    assert [line["bytes"] for line in logs] == [len(junk)]


def damaged(database: bytes, how: str) -> bytes:
    match how:
        case "garbage":
            return b"not a database, whatever its name says" * 200
        case "truncated":
            return database[: len(database) // 2 // 4096 * 4096]
        case "schema page":
            return database[:100] + b"\xff" * 3996 + database[4096:]
        case _:
            return database[:4096] + b"\xff" * (len(database) - 4096)


@pytest.mark.parametrize("how", ["garbage", "truncated", "schema page", "all other pages"])
async def test_a_damaged_database_is_said(tmp_path: Path, how: str) -> None:
    path = tmp_path / "ledger.db"
    journal = Journal(path, StubClock())
    for number in range(200):
        journal.reserve(reservation(f"req_{number}"))
    await journal.close()
    path.write_bytes(damaged(path.read_bytes(), how))
    for _ in range(2):  # said again: the first try leaves no lock behind
        with pytest.raises(SetupError, match=r"ledger.*(malformed|not a database|damaged)"):
            Journal(path, StubClock())
