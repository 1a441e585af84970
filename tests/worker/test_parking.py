"""States are put aside without anybody waiting for the disk, and are what they were or not there."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.caching.index import Holding
from headrace.worker import parking as module
from headrace.worker.parking import Parking

FAR = 10**18


class Gate:
    """Holds the writer up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        write = module._write

        def held(path: Path, head: module._Head, state: bytes) -> None:
            self.reached.set()
            assert self.opened.wait(10)
            write(path, head, state)

        monkeypatch.setattr(module, "_write", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def a_parking(tmp_path: Path, state_key: str = "k") -> Parking:
    return Parking(tmp_path / "kv", state_key=state_key, bytes_max=1 << 30)


def a_holding(*tokens: int) -> Holding:
    return Holding(tenant="t", tokens=list(tokens), slot=0)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.suffix for path in (tmp_path / "kv").iterdir())


def test_a_state_can_be_read_before_and_after_it_is_written(tmp_path: Path, gate: Gate) -> None:
    parking = a_parking(tmp_path)
    name = parking.save(a_holding(1, 2), b"state", expires_ts=FAR)
    assert parking.load(name) == b"state"
    assert files(tmp_path) == []
    gate.opened.set()
    parking.close()
    assert files(tmp_path) == [".kv"]
    assert parking.load(name) == b"state"
    assert not parking._unwritten, "nothing stays in memory"


def test_what_was_put_aside_is_as_it_was_then(tmp_path: Path, gate: Gate) -> None:
    parking, holding = a_parking(tmp_path), a_holding(1, 2)
    parking.save(holding, b"state", expires_ts=FAR)
    holding.tokens.append(3)
    gate.opened.set()
    parking.close()
    ((found, expires_ts),) = a_parking(tmp_path).scan(0)
    assert (found.tokens, found.tenant, expires_ts) == ([1, 2], "t", FAR)


@pytest.mark.parametrize("is_begun", [True, False])
def test_what_is_removed_on_its_way_leaves_no_file(tmp_path: Path, gate: Gate, is_begun: bool) -> None:
    parking = a_parking(tmp_path)
    first = parking.save(a_holding(1), b"first", expires_ts=FAR)
    second = parking.save(a_holding(2), b"second", expires_ts=FAR)
    assert gate.reached.wait(10)
    parking.remove(first if is_begun else second)
    gate.opened.set()
    parking.close()
    left = second if is_begun else first
    assert [path.stem for path in (tmp_path / "kv").iterdir()] == [left]
    assert parking.load(first if is_begun else second) is None


def test_more_than_may_be_unwritten_waits_for_the_disk(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARKING_UNWRITTEN_BYTES_MAX", 10)
    parking = a_parking(tmp_path)
    names = [parking.save(a_holding(1), b"12345", expires_ts=FAR) for _ in range(2)]
    saved = threading.Event()

    def save() -> None:
        names.append(parking.save(a_holding(2), b"123456", expires_ts=FAR))
        saved.set()

    thread = threading.Thread(target=save)
    thread.start()
    assert not saved.wait(0.1)
    gate.opened.set()
    thread.join(10)
    assert saved.is_set()
    parking.close()
    assert [parking.load(name) for name in names] == [b"12345", b"12345", b"123456"]


def test_what_the_disk_does_not_take_is_gone_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parking = a_parking(tmp_path)

    def full(path: str, flags: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_private", full)
    name = parking.save(a_holding(1), b"state", expires_ts=FAR)
    parking.close()
    assert parking.load(name) is None
    assert files(tmp_path) == []


def test_another_life_finds_what_is_whole_and_of_its_kind(tmp_path: Path) -> None:
    parking = a_parking(tmp_path)
    name = parking.save(a_holding(1), b"state", expires_ts=FAR)
    parking.close()
    (tmp_path / "kv" / "cut.new").write_bytes(b"half")
    damaged = tmp_path / "kv" / "damaged.kv"
    damaged.write_bytes((tmp_path / "kv" / f"{name}.kv").read_bytes()[:9])
    assert [holding.parked for holding, _ in a_parking(tmp_path).scan(0)] == [name]
    assert files(tmp_path) == [".kv"]
    assert a_parking(tmp_path, "other").scan(0) == []
    assert files(tmp_path) == []
