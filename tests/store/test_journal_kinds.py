"""ME-1: what can happen to an operation besides being settled: void, expired, late, refunded, refused."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from headrace.ledger.charging import without_charge
from headrace.ledger.records import OperationRecord, Refund
from headrace.store.errors import LedgerConflict, OperationOpen, OperationUnknown, StoreUnavailable
from headrace.store.journal import Journal
from headrace.store.verify import verify_ledger
from tests.store.ledger_samples import BASE_TS, StubClock, record, reservation

pytestmark = pytest.mark.asyncio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@asynccontextmanager
async def opened(path: Path, pending_max: int = 1000) -> AsyncIterator[Journal]:
    journal = Journal(path, StubClock(), pending_max=pending_max)
    try:
        yield journal
    finally:
        await journal.close()
        assert verify_ledger(path).differences == []


def kinds(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [kind for (kind,) in connection.execute("SELECT kind FROM journal ORDER BY seq")]


def used(request_id: str = "req_1", **changes: Any) -> OperationRecord:
    return record(request_id, **({"charged_prompt_tokens": 90, "charged_completion_tokens": 10} | changes))


def expired(request_id: str = "req_1") -> OperationRecord:
    return record(
        request_id, outcome="expired", count_source="none", prompt_tokens=0, completion_tokens=0, status=500
    )


def late(request_id: str = "req_1", **changes: Any) -> OperationRecord:
    return used(request_id, **({"outcome": "late", "end_ts": BASE_TS + 9_000_000} | changes))


def refused(request_id: str = "req_1", **changes: Any) -> OperationRecord:
    fields = {"outcome": "refused", "status": 429, "code": "queue_full", "count_source": "none"}
    return record(request_id, **(fields | {"prompt_tokens": 0, "completion_tokens": 0} | changes))


def refund(request_id: str = "req_1", **changes: Any) -> Refund:
    fields: dict[str, Any] = {"reason": "ours", "actor": "key_a", "at_ts": BASE_TS}
    return Refund(request_id=request_id, **(fields | changes))


async def test_the_record_decides_what_an_end_is_called(path: Path) -> None:
    async with opened(path) as journal:
        for number, final in enumerate([used("req_0"), refused("req_1"), expired("req_2")]):
            journal.reserve(reservation(f"req_{number}"))
            await journal.settle(final)
    assert kinds(path) == ["reserve", "settle", "reserve", "void", "reserve", "expire"]


@pytest.mark.parametrize("is_written", [True, False])
async def test_what_an_expired_operation_used_is_posted_late(path: Path, is_written: bool) -> None:
    async with opened(path) as journal:
        journal.reserve(reservation())
        journal.settle(expired())
        if is_written:
            await journal.flush()
        assert journal.settled_since(0) == [], "nothing is charged yet"
        done = journal.late_settle(late())
        assert journal.get("req_1", "demo") == late()
        await done
        assert journal.get("req_1", "demo") == late()
        assert journal.settled_since(BASE_TS + 1) == [late()]
        await journal.late_settle(late())
        await journal.settle(expired())
        await journal.reserve(reservation())
        for conflict in (late(completion_tokens=11), late(charged_prompt_tokens=0)):
            with pytest.raises(LedgerConflict):
                journal.late_settle(conflict)
    assert kinds(path) == ["reserve", "expire", "late_settle"]
    async with opened(path) as again:
        await again.late_settle(late())
        assert again.get("req_1", "demo") == late()
    assert len(kinds(path)) == 3


@pytest.mark.parametrize("is_written", [True, False])
async def test_only_an_expired_operation_can_be_settled_late(path: Path, is_written: bool) -> None:
    async with opened(path) as journal:
        with pytest.raises(LedgerConflict):
            journal.late_settle(late())
        journal.reserve(reservation())
        with pytest.raises(LedgerConflict):
            journal.late_settle(late())
        with pytest.raises(LedgerConflict, match="not expired"):
            journal.settle(late())
        journal.settle(used())
        journal.refuse(refused("req_2"))
        if is_written:
            await journal.flush()
        for request_id in ("req_1", "req_2"):
            with pytest.raises(LedgerConflict):
                journal.late_settle(late(request_id))
        journal.reserve(reservation("req_3"))
        journal.settle(expired("req_3"))
        for wrong in (used("req_3"), late("req_3", tenant_id="other"), late("req_3", prompt_tokens=-1)):
            with pytest.raises(LedgerConflict):
                journal.late_settle(wrong)
        await journal.flush()
        assert journal.get("req_3", "demo") == expired("req_3")


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_refund_takes_the_charge_and_leaves_the_use(path: Path, is_written: bool) -> None:
    async with opened(path) as journal:
        journal.reserve(reservation())
        journal.settle(used())
        if is_written:
            await journal.flush()
        await journal.refund(refund())
        assert journal.get("req_1", "demo") == without_charge(used())
        assert journal.settled_since(0) == []
        await journal.refund(refund(at_ts=BASE_TS + 5))
        await journal.settle(used())
        for other in (refund(reason="other"), refund(actor="key_b")):
            with pytest.raises(LedgerConflict, match="refunded before: ours"):
                journal.refund(other)
    assert kinds(path) == ["reserve", "settle", "refund"]
    verdict = verify_ledger(path)
    assert (verdict.refunds, verdict.completion_tokens, verdict.charged_completion_tokens) == (1, 10, 0)


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_refund_made_before_a_late_settlement_stands(path: Path, is_written: bool) -> None:
    async with opened(path) as journal:
        journal.reserve(reservation())
        journal.settle(expired())
        journal.refund(refund())
        if is_written:
            await journal.flush()
        await journal.late_settle(late())
        assert journal.get("req_1", "demo") == without_charge(late())
    assert kinds(path) == ["reserve", "expire", "refund", "late_settle"]


async def test_what_cannot_be_refunded(path: Path) -> None:
    async with opened(path, pending_max=2) as journal:
        with pytest.raises(OperationUnknown, match="req_1"):
            journal.refund(refund())
        journal.reserve(reservation())
        with pytest.raises(OperationOpen):
            journal.refund(refund())
        journal.settle(used())
        with pytest.raises(StoreUnavailable):
            journal.refund(refund())
        await journal.flush()
        await journal.refund(refund())


async def test_a_refusal_that_held_nothing_is_one_row(path: Path) -> None:
    async with opened(path) as journal:
        journal.refuse(refused(num_requests=5))
        assert journal.get("req_1", "demo") == refused(num_requests=5)
        await journal.flush()
        journal.refuse(refused(num_requests=5))
        assert journal.num_pending == 0
        assert journal.get("req_1", "demo") == refused(num_requests=5)
        assert journal.num_refusals_dropped == 0
    assert kinds(path) == ["refuse"]


async def test_a_refusal_is_written_though_nobody_waits(path: Path) -> None:
    async with opened(path) as journal:
        journal.refuse(refused())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert journal.num_pending == 0
        assert kinds(path) == ["refuse"]


@pytest.mark.parametrize("is_written", [True, False])
async def test_the_id_of_a_refusal_is_used_up(path: Path, is_written: bool) -> None:
    async with opened(path) as journal:
        journal.refuse(refused())
        journal.reserve(reservation("req_2"))
        journal.reserve(reservation("req_3"))
        journal.settle(used("req_3"))
        if is_written:
            await journal.flush()
        with pytest.raises(LedgerConflict):
            journal.reserve(reservation())
        with pytest.raises(LedgerConflict, match="never reserved"):
            journal.settle(refused())
        for conflict in (refused(code="other"), refused("req_2"), refused("req_3")):
            with pytest.raises(LedgerConflict):
                journal.refuse(conflict)
        await journal.flush()
    assert kinds(path) == ["refuse", "reserve", "reserve", "settle"]


@pytest.mark.parametrize(
    "changes", [{"prompt_tokens": 1}, {"num_requests": 0}, {"outcome": "expired"}, {"outcome": "late"}]
)
async def test_a_refusal_has_used_nothing(path: Path, changes: dict[str, Any]) -> None:
    async with opened(path) as journal:
        with pytest.raises(LedgerConflict):
            journal.refuse(refused(**changes))
    assert kinds(path) == []


async def test_refusals_that_find_no_room_are_dropped_and_counted(path: Path) -> None:
    async with opened(path, pending_max=2) as journal:
        for number in range(3):
            journal.refuse(refused(f"req_{number}"))
        journal.refuse(refused("req_4", num_requests=10))
        assert journal.num_refusals_dropped == 11
        await journal.flush()
        journal.refuse(refused("req_5"))
        await journal.flush()
        assert journal.num_refusals_dropped == 11
    assert kinds(path) == ["refuse"] * 3


async def test_a_refusal_is_dropped_where_the_ledger_cannot_be_read(path: Path) -> None:
    async with opened(path) as journal:
        journal.refuse(refused("req_9"))  # an id above all that have ended would not be looked up
        await journal.flush()
        connection, journal._file._connection = journal._file._connection, sqlite3.connect(":memory:")
        journal.refuse(refused())
        assert journal.num_refusals_dropped == 1
        with pytest.raises(StoreUnavailable, match="cannot be read"):
            journal.reserve(reservation())
        journal._file._connection.close()
        journal._file._connection = connection
        assert journal.num_pending == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": -1},
        {"completion_tokens": -3},
        {"charged_prompt_tokens": 91},
        {"charged_completion_tokens": 11},
        {"prompt_tokens": 2**60},
    ],
)
async def test_numbers_that_cannot_be_are_refused_and_change_nothing(
    path: Path, changes: dict[str, int]
) -> None:
    async with opened(path) as journal:
        with pytest.raises(LedgerConflict):
            journal.reserve(reservation(reserved_tokens=-1))
        journal.reserve(reservation())
        with pytest.raises(LedgerConflict):
            journal.settle(used(**changes))
        await journal.flush()
        assert [held.request_id for held in journal.open_reservations()] == ["req_1"]
        await journal.settle(used())
    assert kinds(path) == ["reserve", "settle"]


async def test_what_cannot_be_encoded_changes_nothing(path: Path) -> None:
    async with opened(path) as journal:
        with pytest.raises(UnicodeEncodeError):
            journal.reserve(reservation(user_id="\ud800"))
        await journal.reserve(reservation())
        with pytest.raises(UnicodeEncodeError):
            journal.settle(used(user_id="\ud800"))
        await journal.settle(used())
    assert kinds(path) == ["reserve", "settle"]
