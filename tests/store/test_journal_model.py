"""ME-1 as a stateful property: whatever is reserved, ended, corrected, refused, repeated, restarted and
crashed, in any order, the ledger is what a few dictionaries say."""

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.ledger.records import OperationRecord, Refund, Reservation
from headrace.store.errors import LedgerConflict
from headrace.store.journal import Journal
from headrace.store.verify import verify_ledger
from tests.store.ledger_samples import StubClock, record, reservation

IDS = st.integers(0, 7).map(lambda number: f"req_{number}")
SIZES = st.integers(1, 3)
KINDS = st.sampled_from(["reserve", "settle", "void", "expire", "late_settle", "refund", "refuse"])
STEPS = st.lists(st.tuples(KINDS, IDS, SIZES), max_size=6)
REASONS = ("", "ours", "theirs", "nobody's")


class Model:
    """What the ledger has to say, in dictionaries by request id."""

    def __init__(self) -> None:
        self.reserved: dict[str, Reservation] = {}
        self.ended: dict[str, tuple[str, OperationRecord]] = {}
        """The first end of each, refusals included, with its kind."""
        self.late: dict[str, OperationRecord] = {}
        self.refunded: dict[str, Refund] = {}
        self.journal: list[tuple[str, str]] = []

    def copy(self) -> "Model":
        copy = Model()
        for name, value in vars(self).items():
            setattr(copy, name, value.copy())
        return copy

    def row(self, request_id: str) -> OperationRecord | None:
        if request_id not in self.ended:
            return None
        row = self.late.get(request_id, self.ended[request_id][1])
        if request_id in self.refunded:
            row = msgspec.structs.replace(
                row, charged_prompt_tokens=0, charged_completion_tokens=0, refunded=True
            )
        return row

    def may(self, kind: str, entry: Any) -> bool:
        """Whether the step is allowed; notes it if it is."""
        request_id = entry.request_id
        is_reserved = request_id in self.reserved
        first_kind, first = self.ended.get(request_id, (None, None))
        if kind == "reserve":
            return first_kind != "refuse" and self.note(kind, self.reserved, entry)
        if kind == "refuse":
            allowed = not is_reserved
            return allowed and self.note(kind, self.ended, entry, (kind, entry))
        if kind == "late_settle":
            return first_kind == "expire" and self.note(kind, self.late, entry)
        if kind == "refund":
            return first is not None and self.note(kind, self.refunded, entry)
        return is_reserved and self.note(kind, self.ended, entry, (kind, entry))

    def note(self, kind: str, where: dict[str, Any], entry: Any, value: Any = None) -> bool:
        value = entry if value is None else value
        if entry.request_id in where:
            return bool(where[entry.request_id] == value)
        where[entry.request_id] = value
        self.journal.append((kind, entry.request_id))
        return True


def entry_of(kind: str, request_id: str, size: int) -> Any:
    match kind:
        case "reserve":
            return reservation(request_id, reserved_tokens=size)
        case "refund":
            return Refund(request_id=request_id, reason=REASONS[size], actor="key_a", at_ts=0)
        case "refuse" | "void":
            return record(
                request_id, outcome="refused", count_source="none", prompt_tokens=0, completion_tokens=0,
                status=428 + size,
            )  # fmt: skip
        case _:
            outcome = {"settle": "completed", "expire": "expired", "late_settle": "late"}[kind]
            return record(request_id, outcome=outcome, completion_tokens=size, charged_completion_tokens=size)


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.db"
        self.loop = asyncio.new_event_loop()
        self.model = Model()
        self.dead: list[Journal] = []
        self.journal = Journal(self.path, StubClock())

    def run(self, function: Callable[[], Any], *, is_awaited: bool = True) -> None:
        async def body() -> None:
            result = function()
            if is_awaited and result is not None:
                await result

        self.loop.run_until_complete(body())

    def step(self, kind: str, request_id: str, size: int) -> asyncio.Future[None] | None:
        """Applies one step to journal and model; both must agree on whether it is allowed."""
        entry = entry_of(kind, request_id, size)
        act = getattr(self.journal, "settle" if kind in ("settle", "void", "expire") else kind)
        if self.model.may(kind, entry):
            future: asyncio.Future[None] | None = act(entry)
            return future
        with pytest.raises(LedgerConflict):
            act(entry)
        return None

    @rule(kind=KINDS, request_id=IDS, size=SIZES)
    def one(self, kind: str, request_id: str, size: int) -> None:
        self.run(lambda: self.step(kind, request_id, size))

    @rule(steps=STEPS)
    def a_group(self, steps: list[tuple[str, str, int]]) -> None:
        def group() -> asyncio.Future[None]:
            for step in steps:
                self.step(*step)
            return self.journal.flush()

        self.run(group)

    @rule(steps=STEPS)
    def crash_before_the_commit(self, steps: list[tuple[str, str, int]]) -> None:
        before = self.model.copy()

        def group() -> None:
            for step in steps:
                self.step(*step)
            self.crash()

        self.run(group)
        self.model = before
        self.journal = Journal(self.path, StubClock())

    @rule()
    def crash_after_the_commit(self) -> None:
        self.crash()
        self.journal = Journal(self.path, StubClock())

    @rule(steps=STEPS)
    def restart(self, steps: list[tuple[str, str, int]]) -> None:
        async def body() -> None:
            for step in steps:
                self.step(*step)
            await self.journal.close()

        self.loop.run_until_complete(body())
        self.journal = Journal(self.path, StubClock())

    @rule()
    def checkpoint(self) -> None:
        assert self.journal._checkpointer.run() == 0

    def crash(self) -> None:
        """The process is gone: nothing more is written, nothing is closed, the kernel frees the lock."""
        if self.journal._commit_handle is not None:
            self.journal._commit_handle.cancel()
        os.close(self.journal._lock)
        self.dead.append(self.journal)

    @invariant()
    def memory_and_model_agree(self) -> None:
        model = self.model
        still_open = {held.request_id: held for held in self.journal.open_reservations()}
        assert still_open == {i: held for i, held in model.reserved.items() if i not in model.ended}
        for number in range(8):
            request_id = f"req_{number}"
            assert self.journal.get(request_id, "demo") == model.row(request_id)

    @invariant()
    def projections_are_the_fold_of_the_journal(self) -> None:
        self.run(lambda: self.journal.flush())
        with closing(sqlite3.connect(self.path)) as connection:
            journal = connection.execute("SELECT seq, kind, request_id FROM journal ORDER BY seq").fetchall()
        assert [row[0] for row in journal] == list(range(1, len(journal) + 1))
        assert [row[1:] for row in journal] == self.model.journal
        verdict = verify_ledger(self.path)
        assert verdict.differences == []
        rows = [self.model.row(request_id) for request_id in self.model.ended]
        assert verdict.charged_completion_tokens == sum(row.charged_completion_tokens for row in rows if row)

    def teardown(self) -> None:
        if not hasattr(self, "journal"):
            return
        for journal in self.dead:
            journal._threads.shutdown()
            journal._checkpointer.close()
            journal._file.close()
            os.close(journal._log_descriptor)
        self.loop.run_until_complete(self.journal.close())
        self.loop.close()
        self.folder.cleanup()


LedgerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=15, deadline=None)
TestLedger = LedgerMachine.TestCase
