"""The core around its state machine: leases that run out, records that come late, ledgers that fail."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from headrace.admission.invariants import check
from headrace.clock import SystemClock
from headrace.config.limits import Limits
from headrace.config.settings import LedgerSettings, ModelSettings, Settings
from headrace.core import watch
from headrace.core.core import Core
from headrace.core.directory import Directory
from headrace.core.metrics import CoreMetrics
from headrace.core.operation import Operation
from headrace.core.replica import Task
from headrace.errors import Refusal
from headrace.ledger.closing import NOTHING, Counts
from headrace.ledger.records import Reservation
from headrace.request.controls import Controls
from headrace.request.messages import Message
from headrace.store.journal import Journal
from headrace.store.verify import verify_ledger

pytestmark = pytest.mark.asyncio

USED = Counts(source="engine", attempt_ids=("a.1",), prompt_tokens=7, completion_tokens=5)


class SilentAnswer:
    """An attempt of which nothing is heard until somebody says what it was."""

    exact_total = None
    prompt_tokens = None
    is_recorded = True
    tokens_told = 2
    tokens_generated = 2
    can_preempt = True
    stopped: Callable[[int], None] | None = None
    num_resumed = 0

    def __init__(self) -> None:
        self.heard_us = 0
        self.known: asyncio.Future[Counts] = asyncio.get_running_loop().create_future()
        self.is_aborted = False
        self.is_acknowledged = False

    async def begin(self) -> None:
        """Taken at once."""

    async def complete(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def stream(self, *, quiet_s: float) -> AsyncIterator[bytes]:
        yield await self.complete()

    def ending(self) -> bytes:
        return b""

    def abort(self) -> None:
        self.is_aborted = True

    def preempt(self, on_stopped: Callable[[int], None]) -> None:
        self.stopped = on_stopped

    def resume(self) -> None:
        self.num_resumed += 1

    async def counts(self) -> Counts:
        return await asyncio.shield(self.known)

    def acknowledge(self) -> None:
        self.is_acknowledged = True


class SilentReplica:
    replica_id = worker_id = "silent"
    context_tokens = 100
    kv_bytes_per_token: int | None = None
    can_count = False

    def __init__(self) -> None:
        self.answers: list[SilentAnswer] = []

    async def count_prompt(self, messages: list[Message]) -> int | None:
        return None

    def adjust(self, controls: Controls) -> None:
        """Computes nothing."""

    def end_session(self, session: str) -> None:
        """Keeps nothing."""

    def start(self, task: Task) -> SilentAnswer:
        self.answers.append(SilentAnswer())
        return self.answers[-1]


class World:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.clock = SystemClock()
        self.directory = Directory.open(folder, self.clock)
        self.directory.create_tenant("acme", None, limits=Limits(tpm=1000, rps=1000), actor="test")
        self.jti = self.directory.create_key(tenant="acme", actor="test").view.jti
        self.path = folder / "ledger.db"
        self.journal = Journal(self.path, self.clock)
        self.core = Core(
            Settings(lease_s=0.2, **settings),
            directory=self.directory,
            journal=self.journal,
            clock=self.clock,
            metrics=CoreMetrics(CollectorRegistry()),
        )
        self.core.add_model(ModelSettings(id="m", upstream="http://localhost:1/v1"))
        self.replica = SilentReplica()
        self.core.add_replica("m", self.replica, capacity=4)
        self.number = 0

    def accept(self) -> Operation:
        self.number += 1
        reservation = Reservation(
            request_id=f"req_{self.number}",
            tenant_id="acme",
            api_key_id=self.jti,
            model="m",
            mode="stream",
            prompt_tokens_estimated=10,
            reserved_tokens=0,
            queue_enter_ts=self.clock.wall_us(),
            trace_id="",
        )
        return self.core.accept(reservation, [], max_tokens=20, is_exact=True)

    async def run(self, operation: Operation) -> None:
        """What the gateway does, as far as the core is concerned."""
        async with operation:
            assert await operation.granted()
            answer = operation.start(None)  # type: ignore[arg-type]
            await answer.begin()
            await answer.complete()

    def row(self) -> Any:
        return self.journal.get("req_1", "acme")

    def window(self) -> tuple[int, int, int]:
        """(used, held, running) of the tenant."""
        accounts = self.core.accounts.of(tenant_id="acme", api_key_id=self.jti, user_id=None, model_id="m")
        tenant = next(one for one in accounts if one.level == "tenant")
        return tenant.window.used(self.clock.monotonic_us()), tenant.window.held, tenant.running


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(watch, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(watch, "LEASE_CHECK_TICKS", 1)
    world = World(tmp_path)
    yield world
    await world.core.stop()
    check(world.core.controller, world.clock.monotonic_us())
    await world.journal.close()
    world.directory.close()
    verdict = verify_ledger(world.path)
    assert (verdict.differences, verdict.held) == ([], 0)


async def test_a_lease_that_runs_out_ends_the_request_and_gives_back_what_it_held(world: World) -> None:
    with pytest.raises(Refusal) as refused:
        await world.run(world.accept())
    assert (refused.value.status, refused.value.code) == (502, "lease_expired")
    assert (world.row().outcome, world.row().count_source, world.row().charged_prompt_tokens) == (
        "expired",
        "none",
        0,
    )
    assert world.window() == (0, 0, 0)
    assert world.replica.answers[0].is_aborted
    world.replica.answers[0].known.set_result(NOTHING)


async def test_what_an_expired_request_used_is_posted_when_it_becomes_known(world: World) -> None:
    with pytest.raises(Refusal):
        await world.run(world.accept())
    answer = world.replica.answers[0]
    answer.known.set_result(USED)
    async with asyncio.timeout(5):
        while not answer.is_acknowledged:
            await asyncio.sleep(0.01)
    row = world.row()
    assert (row.outcome, row.prompt_tokens, row.completion_tokens) == ("late", 7, 5)
    assert (row.charged_prompt_tokens, row.charged_completion_tokens) == (7, 5)
    assert world.window() == (12, 0, 0)


async def test_a_request_that_is_heard_of_keeps_its_lease(world: World) -> None:
    task = asyncio.ensure_future(world.run(world.accept()))
    for _ in range(20):
        await asyncio.sleep(0.03)
        for answer in world.replica.answers:
            answer.heard_us = world.clock.monotonic_us()
    assert not task.done()
    world.replica.answers[0].known.set_result(USED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.core.settle_open(seconds=5)
    assert (world.row().outcome, world.row().completion_tokens) == ("client_closed", 5)


async def test_a_client_that_leaves_an_attempt_of_which_nothing_is_heard(world: World) -> None:
    """Its worker never says how far it was: the lease ends it, and the late record is still posted."""
    task = asyncio.ensure_future(world.run(world.accept()))
    while not world.replica.answers:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while world.row() is None:
            await asyncio.sleep(0.01)
    assert world.row().outcome == "expired"
    world.replica.answers[0].known.set_result(USED)
    async with asyncio.timeout(5):
        while world.row().outcome != "late":
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("policy", "charged"), [("generated", (7, 5)), ("delivered", (7, 2)), ("free_on_error", (7, 5))]
)
async def test_what_a_client_that_left_is_charged_is_the_policys(
    tmp_path: Path, policy: Any, charged: tuple[int, int]
) -> None:
    world = World(tmp_path, ledger=LedgerSettings(abort_policy=policy))
    task = asyncio.ensure_future(world.run(world.accept()))
    while not world.replica.answers:
        await asyncio.sleep(0.01)
    world.replica.answers[0].known.set_result(USED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.core.settle_open(seconds=5)
    row = world.row()
    assert (row.prompt_tokens, row.completion_tokens, row.abort_policy) == (7, 5, policy)
    assert (row.charged_prompt_tokens, row.charged_completion_tokens) == charged
    assert world.window()[0] == sum(charged), "limits count what is charged"
    await world.core.stop()
    await world.journal.close()
    world.directory.close()


async def test_a_ledger_that_takes_too_long_refuses_and_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    operation = world.accept()
    operation.journalled = never
    world.core._watch._ledger_us = 50_000
    with pytest.raises(Refusal) as refused:
        await world.run(operation)
    assert refused.value.code == "ledger_unavailable"
    assert world.window() == (0, 0, 0)
