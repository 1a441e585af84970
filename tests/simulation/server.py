"""A simulated server process: the parts of `headrace.runtime.serve`, without ports, metrics and admin API."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from headrace.admission.controller import NeedsCount, NeedsTrim
from headrace.core.core import Core
from headrace.core.directory import Directory
from headrace.core.metrics import CoreMetrics
from headrace.errors import Refusal, SetupError
from headrace.gateway.app import Gateway
from headrace.gateway.identify import Identifier
from headrace.http import HttpRequest
from headrace.identity import TENANT_KEY, KeyVerifier
from headrace.ledger.records import OperationRecord, Reservation
from headrace.request.messages import Message
from headrace.runtime.child import Child
from headrace.runtime.fleet import Fleet
from headrace.runtime.recovery import recover
from headrace.runtime.workers import PROGRESS_SUFFIX
from headrace.store.journal import Journal
from headrace.telemetry.request_log import RequestLog
from headrace.worker.process import WorkerOrders
from tests.simulation.clients import ClientConnection, serving
from tests.simulation.virtual_loop import Process, VirtualClock
from tests.simulation.worker import SimulatedWorker, child_of, prompts

DRAIN_SECONDS = 3.0
SETTLE_SECONDS = 5.0


class DataPaths:
    """What `Fleet` needs of a data directory."""

    def __init__(self, path: Path, life: int) -> None:
        self.path = path
        self.sockets = path / f"sockets-{life}"

    def progress_files(self) -> list[Path]:
        return sorted((self.path / "progress").glob(f"*{PROGRESS_SUFFIX}"))


class SimulatedServer:
    """One life of the server."""

    def __init__(self, world: Any, life: int) -> None:
        self.life = life
        self.is_listening = False
        self.is_ready = False
        self.has_ended = False
        self.connections: dict[ClientConnection, None] = {}
        self.workers: list[SimulatedWorker] = []
        self.forgotten_since_us: dict[str, int] = {}
        """Requests that their worker does not know (any more), and since when."""
        self._world = world
        self._data = DataPaths(world.path, life)
        self.process = Process(world.loop, f"server.{life}")
        self.process.spawn(self._run())

    async def _run(self) -> None:
        world, scenario = self._world, self._world.scenario
        clock = VirtualClock(world.loop)
        self.directory = Directory.open(self._data.path, clock)
        if self.life == 1:
            world.make_tenants(self.directory)
        self.journal = Journal(self._data.path / "ledger.db", clock)
        metrics = CoreMetrics(CollectorRegistry())
        self.core = Core(
            scenario.settings, directory=self.directory, journal=self.journal, clock=clock, metrics=metrics
        )
        self._observe()
        verifier = KeyVerifier(self.directory.keyring.public_keys, TENANT_KEY)
        identifier = Identifier(verifier, self.directory, clock, metrics)
        log = RequestLog(clock, level="error", fmt="json", process="gateway")
        self.gateway = Gateway(self.core, identifier, scenario.settings, clock, log)
        self.fleet = Fleet(
            scenario.settings,
            self.core,
            clock,
            self._data,  # type: ignore[arg-type]
            Path("no-model"),
            start_child=self._start_child,
        )
        await recover(self.core, self._data.progress_files())
        world.note("recovered", self.life)
        self.is_listening = True
        await self.fleet.start()
        try:
            await self.fleet.started()
        except SetupError as error:
            world.note("gives up", str(error))
            world.server_gave_up()
            return
        self.is_ready = True

    async def _start_child(
        self, role: str, orders: bytes, *, environment: dict[str, str] | None = None
    ) -> Child:
        worker = SimulatedWorker(self._world, msgspec.json.decode(orders, type=WorkerOrders))
        self._world.workers.append(worker)
        self.workers.append(worker)
        self._world.note("worker starts", worker.name)
        return child_of(worker)

    # --- requests ---------------------------------------------------------------------------------

    def connect(self, connection: ClientConnection, request: HttpRequest) -> None:
        """A client's request has arrived. What the HTTP layer refuses before its body ends here too."""
        refused = self.gateway.check_head(request)
        if refused is not None:
            status, headers, body = refused
            connection.write(
                b"HTTP/1.1 %d x\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)
            )
            return
        connection.serve(self.gateway, request)

    # --- observation --------------------------------------------------------------------------------

    def _observe(self) -> None:
        """Write down what crosses the core's border, and let the disk fail when the schedule says so."""
        world, core, journal, life = self._world, self.core, self.journal, self.life
        accept, settle, late_settle = core.accept, journal.settle, journal.late_settle
        write = journal._file.write

        def observed_accept(reservation: Reservation, messages: list[Message], **options: Any) -> Any:
            try:
                operation = accept(reservation, messages, **options)
            except (NeedsCount, NeedsTrim):
                raise
            except Refusal as refusal:
                world.note("refused", reservation.request_id, refusal.code)
                if refusal.details.get("limit_type") == "memory":
                    world.note("no memory", reservation.request_id, refusal.details["level"])
                world.truth.turned_away(reservation, refusal)
                raise
            held = operation.reservation.reserved_tokens
            world.note("accepted", reservation.request_id, held)
            prompt, maximum = len(prompts().build(messages)), operation.size.maximum
            world.truth.accepted(
                operation.reservation,
                life,
                held=min(held, prompt + maximum),
                prompt=prompt,
                maximum=maximum,
                is_ready=self.is_ready,
            )
            if operation.entry.is_throttled:
                world.note("throttled", reservation.request_id)
            world.client_of[reservation.request_id] = serving.get()
            return operation

        def observed_settle(record: OperationRecord) -> asyncio.Future[None]:
            done = settle(record)
            world.note("settled", record.request_id, record.outcome, record.completion_tokens)
            world.truth.settled(record)
            return done

        def observed_late_settle(record: OperationRecord) -> asyncio.Future[None]:
            done = late_settle(record)
            world.note("settled late", record.request_id, record.completion_tokens)
            world.truth.settled_late(record)
            return done

        def observed_write(batch: Any) -> None:
            world.write_journal(write, batch)

        core.accept = observed_accept  # type: ignore[method-assign]
        journal.settle = observed_settle  # type: ignore[method-assign]
        journal.late_settle = observed_late_settle  # type: ignore[method-assign]
        journal._file.write = observed_write  # type: ignore[method-assign]

    # --- ends ---------------------------------------------------------------------------------------

    def kill(self) -> None:
        """`kill -9`. Its workers find the end of their standard input a moment later."""
        if self.has_ended:
            return
        self.has_ended = True
        self.is_listening = self.is_ready = False
        self.process.kill()
        self._world.network.lose(self.process)
        for connection in self.connections:
            connection.server_died()
        for worker in self.workers:
            if worker.returncode is None:
                delay_s = self._world.rng.uniform(0.0, 0.6)
                self._world.loop.call_later(delay_s, worker.parent_gone)
        self.let_go()
        self._world.note("server died", self.life)

    def let_go(self) -> None:
        """What the kernel does with a dead process's files."""
        if hasattr(self, "journal"):
            _let_go(self.journal)
        if hasattr(self, "directory"):
            self.directory.close()

    async def stop(self, drain_s: float) -> None:
        """As `serve` stops: drain, settle, stop the workers, close the stores. Call in the server's process."""
        self.is_listening = self.is_ready = False
        self.core.begin_stop(drain_s=drain_s)
        await self._drain(drain_s)
        await self.core.settle_open(seconds=SETTLE_SECONDS)
        await self.fleet.stop()
        await self.core.stop()
        await self.journal.close()
        self.directory.close()
        if not self.journal.open_reservations():
            for file in self._data.progress_files():
                file.unlink()
        self.has_ended = True
        self._world.note("server stopped", self.life)

    async def _drain(self, drain_s: float) -> None:
        tasks = [one.task for one in self.connections if one.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s)
        for connection in self.connections:
            connection.cancel()
        tasks = [one.task for one in self.connections if one.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=SETTLE_SECONDS)
        for connection in self.connections:
            if connection.task is not None:
                connection.abort()


def _let_go(journal: Journal) -> None:
    """Nothing is written, locks end."""
    journal._threads.shutdown(wait=False)
    journal._checkpointer.close()
    journal._file.close()
    os.close(journal._log_descriptor)
    os.close(journal._lock)
