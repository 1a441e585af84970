"""One seed, one world: the platform, its clients and its misfortunes, from the first start to the last stop.

    start ─▶ clients and faults ─▶ faults end, everybody gets an answer ─▶ checks ─▶ stop ─▶ checks

The first violation ends it.
"""

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.limits import LevelChanges, Limits
from headrace.core.directory import Directory
from headrace.http import HttpRequest
from headrace.store.ledger_file import find_records
from headrace.store.sqlite import open_read_only
from tests.simulation import invariants
from tests.simulation.clients import NETWORK_SECONDS, Client, ClientConnection
from tests.simulation.misfortunes import Misfortunes
from tests.simulation.network import LATE_SECONDS_MAX, VirtualNetwork
from tests.simulation.scenario import (
    DEPARTMENT,
    QUEUE_TIMEOUT_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    STEP_TIMEOUT_SECONDS,
    USERS,
    Scenario,
)
from tests.simulation.server import DRAIN_SECONDS, SimulatedServer
from tests.simulation.truth import Attempt, Truth
from tests.simulation.virtual_loop import VirtualClock, VirtualLoop
from tests.simulation.worker import SimulatedWorker

ANSWER_SECONDS_MAX = QUEUE_TIMEOUT_SECONDS + REQUEST_TIMEOUT_SECONDS + 30.0
"""After the last fault and the last client: longer than any time-out that a request can meet."""
ABORT_SECONDS_MAX = 1.0
"""In quiet times an engine computes no longer for a client that has left."""
DISTURBED_SECONDS = STEP_TIMEOUT_SECONDS + LATE_SECONDS_MAX + 2.0
"""For so long after a fault times are not quiet."""
LOOK_SECONDS = 0.25


class Violation(Exception):
    """An invariant does not hold."""


class World:
    """The state of a simulation. `run` raises `Violation`."""

    def __init__(self, scenario: Scenario, path: Path, loop: VirtualLoop) -> None:
        self.scenario = scenario
        self.is_quiet = scenario.is_quiet
        self.path = path
        self.loop = loop
        self.rng = random.Random(f"world {scenario.seed}")
        self.clock = VirtualClock(loop)
        self.trace: list[tuple[Any, ...]] = []
        self.network = VirtualNetwork(loop, self.rng, self.note)
        self.truth = Truth(self.violated, self.clock.monotonic_us, scenario.settings)
        self.truth.on_token = self._computed
        self._misfortunes = Misfortunes(self)
        self.workers: list[SimulatedWorker] = []
        self.server: SimulatedServer | None = None
        self.clients: list[Client] = []
        self.keys: list[str] = []
        self.muted: dict[str, None] = {}
        """Attempts that their worker computes without telling anybody."""
        self.violation: str | None = None
        self.client_of: dict[str, Client | None] = {}
        self._unanswered = len(scenario.plans)
        self._all_answered = asyncio.Event()
        self._stopped: asyncio.Future[None] = loop.create_future()
        self._life = 0
        self._pid = 1000
        self._is_quiet_from_s = 0.0
        self.disk_fails = False
        self._began_s = loop.time()
        loop.on_error = self.violated

    # --- what everybody uses --------------------------------------------------------------------

    def note(self, *what: Any) -> None:
        """An entry of the trace. Something may die right after it."""
        if self.loop.has_ended:
            return
        self.trace.append((round(self.loop.time() * 1e6), *what))
        victim = self.scenario.crash_points.get(len(self.trace))
        if victim is not None:
            self.loop.call_next(self.kill_server if victim == "server" else self._misfortunes.kill_a_worker)

    def violated(self, what: str) -> None:
        """Ends the world. Only the first one counts."""
        if self.violation is None and not self.loop.has_ended:
            self.violation = what
            self.trace.append((round(self.loop.time() * 1e6), "VIOLATION", what))
            if not self._stopped.done():
                self._stopped.set_exception(Violation(what))

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    # --- the course of things -----------------------------------------------------------------------

    async def run(self) -> None:
        course = asyncio.ensure_future(self._course())
        await asyncio.wait((course, self._stopped), return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            self._stopped.result()
        course.result()

    async def _course(self) -> None:
        self.start_server()
        self._look()
        for plan in self.scenario.plans:
            client = Client(plan)
            self.clients.append(client)
            self.loop.call_later(plan.at_s, self._arrive, client)
        last_s = max([plan.at_s for plan in self.scenario.plans])
        for event in self.scenario.events:
            self.loop.call_later(event.at_s, self._misfortunes.happen, event)
            last_s = max(last_s, event.at_s + event.for_s)
        await self._answers(last_s + ANSWER_SECONDS_MAX)
        self.scenario.crash_points.clear()
        await self._calm()
        assert self.server is not None
        invariants.check_quiet(self)
        await self.stop_server(DRAIN_SECONDS)
        invariants.check_end(self)

    def _look(self) -> None:
        """Every now and then: is the core's state in order, and is nobody held for whom nobody works?"""
        server = self.server
        if server is not None and server.is_ready:
            now_us = self.clock.monotonic_us()
            wrong = invariants.check_state(server, now_us)
            if wrong is not None:
                self.violated(wrong)
            for request_id in invariants.forgotten(server, now_us):
                self.violated(f"{request_id} is still held although its lease is over")
        self.loop.call_later(LOOK_SECONDS, self._look)

    async def _answers(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._all_answered.wait()
        except TimeoutError:
            waiting = [client.plan.number for client in self.clients if not client.is_ended]
            self.violated(f"clients {waiting} never got an answer")
            await asyncio.sleep(1)

    async def _calm(self) -> None:
        """All faults are over: wait until the server is up and has nothing to do."""
        end_s = self.loop.time() + ANSWER_SECONDS_MAX
        last_s = self._began_s + max((one.at_s + one.for_s for one in self.scenario.events), default=0.0)
        await asyncio.sleep(max(0.0, last_s - self.loop.time()) + 0.01)
        while self.loop.time() < end_s:
            if self.server is not None and self.server.is_ready and not invariants.is_busy(self.server):
                return
            await asyncio.sleep(0.5)
        busy = "no server is up" if self.server is None else "operations are still open or being closed"
        self.violated(f"{ANSWER_SECONDS_MAX} s after the last answer {busy}")
        await asyncio.sleep(1)

    # --- clients ------------------------------------------------------------------------------------

    def _arrive(self, client: Client) -> None:
        server = self.server
        client.sent_s = self.loop.time()
        if server is None or not server.is_listening:
            client.is_ended = True
            self.client_ended(client)
            return
        plan = client.plan
        key = "hr_nonsense" if plan.fault == "key" else self.keys[plan.tenant * 2 + plan.key]
        body = client.body()
        headers = {
            b"authorization": b"Bearer " + key.encode(),
            b"content-type": b"application/json",
            b"content-length": b"%d" % len(body),
        }
        request = HttpRequest("POST", "/v1/chat/completions", b"", headers, body, "203.0.113.7")
        self.note("request", plan.number)
        client.connection = connection = ClientConnection(client, self.loop, server.process, self)
        server.connections[connection] = None
        self.loop.call_later(
            NETWORK_SECONDS, server.connect, connection, request, context=server.process.context.copy()
        )
        if plan.leaves_after_s is not None:
            self.loop.call_later(plan.leaves_after_s, connection.leave)

    def answered(self, client: Client) -> None:
        """A client has its whole reply. By now its record has to be durable, whatever dies next."""
        self.note("answered", client.plan.number)
        invariants.check_answer(self, client)

    def client_ended(self, client: Client) -> None:
        self.note("client ended", client.plan.number, client.left_s is not None)
        self._unanswered -= 1
        if not self._unanswered:
            self._all_answered.set()

    def _computed(self, attempt: Attempt) -> None:
        """An engine has computed something for an attempt: does anybody still want it?"""
        client = self.client_of.get(attempt.attempt_id.rpartition(".")[0])
        if client is None or client.left_s is None or attempt.attempt_id in self.muted:
            return
        now_s = self.loop.time()
        over_s = now_s - max(client.left_s, self._is_quiet_from_s)
        if over_s > ABORT_SECONDS_MAX:
            self.violated(f"{attempt.attempt_id} is still computed {over_s:.1f} s after its client left")

    # --- the server -----------------------------------------------------------------------------------

    def make_tenants(self, directory: Directory) -> None:
        for number, limits in enumerate(self.scenario.tenants):
            levels = self.scenario.levels[number]
            directory.create_tenant(f"t{number}", None, limits=limits, levels=levels, actor="simulation")
            self._know_levels(number, levels)
            self.truth.account("tenant", f"t{number}").set_limits(limits, 0)
            for which in range(2):
                key_limits = self.scenario.keys[number * 2 + which]
                issued = directory.create_key(
                    tenant=f"t{number}",
                    limits=key_limits,
                    department=DEPARTMENT if which == 1 else None,
                    actor="simulation",
                )
                self.keys.append(issued.key)
                self.truth.account("key", issued.view.jti).set_limits(key_limits, 0)
        for model in self.scenario.settings.models:
            self.truth.account("model", model.id).set_limits(model.limits, 0)
        self.truth.account("cluster", "").set_limits(self.scenario.settings.limits, 0)
        for account in self.truth.accounts.values():
            account.history.clear()

    def _know_levels(self, number: int, levels: LevelChanges) -> None:
        inner = {
            "department": levels.departments,
            "tenant_model": levels.model_limits,
            "user": dict.fromkeys(USERS, levels.user_limits) | levels.users,
        }
        for level, entries in inner.items():
            for name, values in entries.items():
                limits = msgspec.convert(values, Limits)
                self.truth.account(level, f"t{number}/{name}").set_limits(limits, 0)

    def write_journal(self, write: Callable[[Any], None], batch: Any) -> None:
        if self.disk_fails:
            raise sqlite3.OperationalError("database or disk is full")
        write(batch)
        self.note("committed", len(batch.journal))

    def start_server(self) -> None:
        self._life += 1
        self.note("server starts", self._life)
        self.server = SimulatedServer(self, self._life)

    def kill_server(self) -> None:
        server = self.server
        if server is None or server.has_ended:
            return
        server.kill()
        self.server = None
        self.truth.crashed_lives.add(server.life)
        self._core_died()
        self.disturbed(1.0)
        self.loop.call_later(self.rng.uniform(0.1, 1.5), self.start_server)

    async def stop_server(self, drain_s: float) -> None:
        server = self.server
        assert server is not None
        self.note("server stops", server.life)
        await asyncio.wait((server.process.spawn(server.stop(drain_s)),))
        server.process.kill()
        for connection in server.connections:
            connection.server_died()
        self.server = None
        self._core_died()

    def _core_died(self) -> None:
        with self.ledger() as connection:
            durable = list(find_records(connection)) if connection else []
        offset_us = self.clock.wall_us() - self.clock.monotonic_us()
        self.truth.core_died(durable, lambda wall_us: wall_us - offset_us)

    @contextmanager
    def ledger(self) -> Iterator[sqlite3.Connection | None]:
        """The ledger's file as another process sees it; None before it is there."""
        path = self.path / "ledger.db"
        if not path.exists():
            yield None
            return
        connection = open_read_only(path)
        try:
            yield connection
        finally:
            connection.close()

    def server_gave_up(self) -> None:
        """It cannot start: it stops, and whoever keeps it running starts it again."""
        self.disturbed(1.0)
        self.loop.call_soon(lambda: self.loop.create_task(self._give_up()), context=self.loop.world.context)

    async def _give_up(self) -> None:
        if self.server is None:  # it died in the same moment
            return
        await self.stop_server(0.0)
        self.loop.call_later(0.5, self.start_server)

    def disturbed(self, for_s: float) -> None:
        until_s = self.loop.time() + for_s + DISTURBED_SECONDS
        self._is_quiet_from_s = max(self._is_quiet_from_s, until_s)
