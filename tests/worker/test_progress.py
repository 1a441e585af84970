"""The progress file loses no count, wherever it is cut off."""

import os
from pathlib import Path

import pytest

from headrace.worker.messages import AttemptRecord
from headrace.worker.progress import ProgressFile, is_released, read_records


def record(attempt_id: str, completion_tokens: int) -> AttemptRecord:
    return AttemptRecord(
        attempt_id=attempt_id,
        tenant_id="t",
        prompt_tokens=5,
        prompt_tokens_computed=5,
        completion_tokens=completion_tokens,
        finish_reason="stop",
        ended_ts=9,
    )


def test_a_missing_file_is_a_worker_that_never_ran_anything(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none") == []


def test_running_attempts_are_read_with_their_last_count(tmp_path: Path) -> None:
    progress = ProgressFile(tmp_path / "p")
    progress.started("a", tenant_id="t", prompt_tokens=5, wall_us=100)
    progress.started("b", tenant_id="u", prompt_tokens=7, wall_us=110)
    progress.advanced([("a", 5, 1), ("b", 3, 0)], wall_us=200)
    progress.advanced([("a", 5, 2)], wall_us=300)
    first, second = read_records(tmp_path / "p")
    assert (first.attempt_id, first.prompt_tokens_computed, first.completion_tokens) == ("a", 5, 2)
    assert (first.first_token_ts, first.ended_ts, first.source) == (200, 300, "progress_file")
    assert (second.attempt_id, second.tenant_id, second.prompt_tokens_computed) == ("b", "u", 3)
    assert (second.completion_tokens, second.first_token_ts) == (0, None)


def test_a_record_replaces_the_running_count_until_it_is_acknowledged(tmp_path: Path) -> None:
    progress = ProgressFile(tmp_path / "p")
    progress.started("a", tenant_id="t", prompt_tokens=5, wall_us=1)
    progress.advanced([("a", 5, 3)], wall_us=2)
    progress.finished(record("a", 4))
    assert read_records(tmp_path / "p") == progress.unacknowledged() == [record("a", 4)]
    progress.acknowledged(["a", "never seen"])
    progress.acknowledged(["a"])
    assert read_records(tmp_path / "p") == progress.unacknowledged() == []


def test_a_rewritten_file_says_the_same_as_the_long_one(tmp_path: Path) -> None:
    long, short = ProgressFile(tmp_path / "long"), ProgressFile(tmp_path / "short", bytes_max=400)
    for progress in (long, short):
        for number in range(30):
            progress.started(f"a{number}", tenant_id="t", prompt_tokens=5, wall_us=number)
            progress.advanced([(f"a{number}", 5, number)], wall_us=100 + number)
            if number % 3:
                progress.finished(record(f"a{number}", number))
            if number % 3 == 1:
                progress.acknowledged([f"a{number}"])
    assert (tmp_path / "short").stat().st_size < (tmp_path / "long").stat().st_size
    counts = [
        sorted((one.attempt_id, one.completion_tokens, one.source) for one in read_records(tmp_path / name))
        for name in ("long", "short")
    ]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 20


def test_a_file_cut_at_any_byte_opens_and_never_says_more_than_was_written(tmp_path: Path) -> None:
    progress = ProgressFile(tmp_path / "p")
    progress.started("a", tenant_id="t", prompt_tokens=5, wall_us=1)
    for count in range(1, 6):
        progress.advanced([("a", 5, count)], wall_us=count)
    progress.finished(record("a", 5))
    whole = (tmp_path / "p").read_bytes()
    counts = []
    for length in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        records = read_records(tmp_path / "cut")
        assert len(records) <= 1
        counts.append(records[0].completion_tokens if records else -1)
    assert counts == sorted(counts)
    assert set(counts) == {-1, 0, 1, 2, 3, 4, 5}


def test_a_second_worker_never_writes_into_the_file_of_the_first(tmp_path: Path) -> None:
    ProgressFile(tmp_path / "p")
    with pytest.raises(FileExistsError):
        ProgressFile(tmp_path / "p")


def test_the_file_is_locked_while_its_writer_lives_also_after_a_rewrite(tmp_path: Path) -> None:
    progress = ProgressFile(tmp_path / "p", bytes_max=300)
    assert not is_released(tmp_path / "p")
    for number in range(20):
        progress.started(f"a{number}", tenant_id="t", prompt_tokens=5, wall_us=1)
        progress.finished(record(f"a{number}", 1))
        progress.acknowledged([f"a{number}"])
    assert not is_released(tmp_path / "p")
    progress.close()
    assert is_released(tmp_path / "p")
    assert is_released(tmp_path / "never there")


def test_a_short_write_is_finished_and_a_failed_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = ProgressFile(tmp_path / "p")
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:3]))
    progress.started("a", tenant_id="t", prompt_tokens=5, wall_us=1)
    progress.advanced([("a", 5, 2)], wall_us=2)
    monkeypatch.undo()
    assert read_records(tmp_path / "p")[0].completion_tokens == 2

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        progress.advanced([("a", 5, 3)], wall_us=3)
