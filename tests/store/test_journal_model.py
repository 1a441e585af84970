"""ME-1 as a stateful property: whatever is reserved, settled, repeated, restarted and crashed, in any
order, the ledger is what a pair of dictionaries says."""

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.ledger.records import OperationRecord, Reservation
from headrace.store.errors import LedgerConflict
from headrace.store.journal import Journal
from tests.store.ledger_samples import StubClock, record, reservation

IDS = st.integers(0, 7).map(lambda number: f"req_{number}")
SIZES = st.integers(1, 3)
STEPS = st.lists(st.tuples(st.sampled_from(["reserve", "settle"]), IDS, SIZES), max_size=6)


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.db"
        self.loop = asyncio.new_event_loop()
        self.reserved: dict[str, Reservation] = {}
        self.settled: dict[str, OperationRecord] = {}
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
        if kind == "reserve":
            wanted = reservation(request_id, reserved_tokens=size)
            if self.reserved.setdefault(request_id, wanted) == wanted:
                return self.journal.reserve(wanted)
            with pytest.raises(LedgerConflict):
                self.journal.reserve(wanted)
            return None
        final = record(request_id, completion_tokens=size)
        if request_id in self.reserved and self.settled.setdefault(request_id, final) == final:
            return self.journal.settle(final)
        with pytest.raises(LedgerConflict):
            self.journal.settle(final)
        return None

    @rule(kind=st.sampled_from(["reserve", "settle"]), request_id=IDS, size=SIZES)
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
        reserved, settled = dict(self.reserved), dict(self.settled)

        def group() -> None:
            for step in steps:
                self.step(*step)
            self.crash()

        self.run(group)
        self.reserved, self.settled = reserved, settled
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
        still_open = {held.request_id: held for held in self.journal.open_reservations()}
        assert still_open == {i: held for i, held in self.reserved.items() if i not in self.settled}
        for request_id in self.reserved:
            assert self.journal.get(request_id, "demo") == self.settled.get(request_id)

    @invariant()
    def projections_are_the_fold_of_the_journal(self) -> None:
        connection = sqlite3.connect(self.path)
        journal = connection.execute(
            "SELECT seq, kind, request_id, body FROM journal ORDER BY seq"
        ).fetchall()
        held = dict(connection.execute("SELECT request_id, seq FROM held"))
        operations = dict(connection.execute("SELECT request_id, completion_tokens FROM operations"))
        connection.close()
        assert [row[0] for row in journal] == list(range(1, len(journal) + 1))
        folded_held, folded_operations = {}, {}
        for seq, kind, request_id, body in journal:
            if kind == "reserve":
                assert request_id not in folded_held
                assert request_id not in folded_operations
                folded_held[request_id] = seq
                assert msgspec.json.decode(body, type=Reservation) == self.reserved[request_id]
            else:
                del folded_held[request_id]
                final = msgspec.json.decode(body, type=OperationRecord)
                assert final == self.settled[request_id]
                folded_operations[request_id] = final.completion_tokens
        assert held == folded_held
        assert operations == folded_operations

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
