"""What goes wrong in a world: deaths, faults of network and disk, slow engines, changed limits."""

from typing import Any

import msgspec

from tests.simulation.scenario import Event, random_limits
from tests.simulation.server import DRAIN_SECONDS


class Misfortunes:
    """Lets the events of a scenario happen."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def happen(self, event: Event) -> None:
        self._world.note("event", event.kind)
        self._world.disturbed(event.for_s)
        match event.kind:
            case "kill_worker":
                self.kill_a_worker()
            case "kill_computing":
                self._kill_in_step(event, is_writing=False)
            case "kill_writing":
                self._kill_in_step(event, is_writing=True)
            case "kill_server":
                self._world.kill_server()
            case "restart_server":
                self._world.loop.create_task(self._restart())
            case "cut":
                self._world.network.cut_one()
            case "late":
                self._for(event.for_s, "late", 0.02 + 0.3 * event.pick)
            case "stall":
                self._world.disturbed(4 * event.for_s)
                self._world.network.stall_one(4 * event.for_s)
            case "shaky":
                self._for(event.for_s, "cut", 0.02 * event.pick)
            case "doubled" | "dropped":
                self._for(event.for_s, event.kind, 0.02 + 0.2 * event.pick)
            case "mute":
                self._mute()
            case "slow" | "stuck":
                self._slow(event)
            case "full_disk":
                self._world.disk_fails = True
                self._world.loop.call_later(event.for_s, self._disk_works)
            case "limits":
                self._change_limits()

    async def _restart(self) -> None:
        server = self._world.server
        if server is None or not server.is_ready or server.has_ended or self._world.disk_fails:
            return
        await self._world.stop_server(DRAIN_SECONDS * self._world.rng.random())
        self._world.loop.call_later(self._world.rng.uniform(0.1, 0.5), self._world.start_server)

    def kill_a_worker(self) -> None:
        self._world.disturbed(0.0)
        if self._world.workers:
            self._world.rng.choice(self._world.workers).kill()

    def _kill_in_step(self, event: Event, *, is_writing: bool) -> None:
        """A worker dies soon in its engine, before anything of that call is noted, or while it notes it."""
        self._world.disturbed(60.0)
        workers = [
            worker
            for worker in self._world.workers
            if worker.engine is not None and worker.progress is not None
        ]
        if not workers:
            return
        worker = self._world.rng.choice(workers)
        calls = 1 + int(8 * event.pick)
        assert worker.engine is not None and worker.progress is not None
        if is_writing:
            worker.progress.writes_left = calls
            worker.progress.written_part = self._world.rng.random()
        else:
            worker.engine.calls_left = calls

    def _for(self, seconds: float, fault: str, chance: float) -> None:
        setattr(self._world.network.faults, fault, chance)
        self._world.loop.call_later(seconds, setattr, self._world.network.faults, fault, 0.0)

    def _mute(self) -> None:
        for worker in self._world.workers:
            attempt_id = worker.mute()
            if attempt_id is not None:
                self._world.note("muted", attempt_id)
                self._world.muted[attempt_id] = None

    def _slow(self, event: Event) -> None:
        if self._world.workers:
            worker = self._world.rng.choice(self._world.workers)
            worker.slowness = 1000.0 if event.kind == "stuck" else 5.0
            self._world.loop.call_later(event.for_s, setattr, worker, "slowness", 1.0)

    def _disk_works(self) -> None:
        self._world.disk_fails = False

    def _change_limits(self) -> None:
        server = self._world.server
        if server is None or not server.is_ready:
            return
        tenant = self._world.rng.randrange(len(self._world.scenario.tenants))
        changes = random_limits(self._world.rng)
        server.directory.update_tenant(f"t{tenant}", limits=changes, actor="simulation")
        account = self._world.truth.account("tenant", f"t{tenant}")
        limits = msgspec.structs.replace(account.limits, **changes)
        account.set_limits(limits, self._world.clock.monotonic_us())
