"""What deciding costs, without HTTP: python -m benchmarks.admission [--operations 20000]. Prints one JSON object.

`core`: accept, grant and settle of the real core with its ledger at level `os`, by requests under way at once;
every request has to be durable twice. `accept_us` is accept and grant in one call, on the event loop, with the
commits that fall due not in it; `operation_us` is all of it, commits included. `controller`: the state machine
alone, one request accepted, granted and settled, while so many others wait, of so many tenants, with limits at
the cluster, the tenant and the key. `contended`: the same in one model's queue, which keeps its length: accepted at its
end, and another one granted the place that comes free, without what asking for the
time takes. Processor time of one thread.
"""

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from headrace.admission.accounts import LevelLimits
from headrace.admission.applicant import Applicant
from headrace.admission.controller import AdmissionController
from headrace.admission.entry import Entry
from headrace.clock import SystemClock
from headrace.config.limits import UNLIMITED, Limits
from headrace.config.settings import ModelSettings, Settings
from headrace.core.core import Core
from headrace.core.directory import Directory
from headrace.core.metrics import CoreMetrics
from headrace.core.upstream import UpstreamReplica
from headrace.http import HttpClient
from headrace.ledger.closing import COMPLETED, Counts
from headrace.ledger.records import Reservation
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import Demand
from headrace.scheduling.queue_bounds import QueueBounds
from headrace.store.journal import Journal
from headrace.telemetry.process import quieten_garbage_collection

LIMITS = Limits(rps=1e6, tpm=10**12, concurrency=1_000_000, streams=1_000_000)
MODEL = "m"
GROUPS = (1, 8, 32, 128)
WAITING = (100, 1_000, 10_000)
TENANTS = (10, 1_000)


# --- the core -------------------------------------------------------------------------------------------


class Desk:
    """A core with one replica that always has room, and a caller with limits at three levels or none."""

    def __init__(self, folder: Path, *, is_limited: bool) -> None:
        limits = LIMITS if is_limited else UNLIMITED
        self.clock = clock = SystemClock()
        directory = Directory.open(folder, clock)
        directory.create_tenant("acme", None, limits=limits, actor="benchmark")
        self.jti = directory.create_key(tenant="acme", limits=limits, actor="benchmark").view.jti
        self.journal = Journal(folder / "ledger.db", clock)
        self.core = Core(
            Settings(limits=limits),
            directory=directory,
            journal=self.journal,
            clock=clock,
            metrics=CoreMetrics(CollectorRegistry()),
        )
        url = "http://localhost:1/v1"
        self.core.add_model(ModelSettings(id=MODEL, upstream=url))
        replica = UpstreamReplica(
            replica_id="r", client=HttpClient(url), upstream_model=None, key=None, clock=clock
        )
        self.core.add_replica(MODEL, replica, capacity=1_000_000)
        self.accept_ns = 0

    async def operations(self, numbers: range) -> None:
        """One after the other, each as the gateway does it."""
        for number in numbers:
            began_ns = time.thread_time_ns()
            reservation = Reservation(
                request_id=f"req_{number:032x}",
                tenant_id="acme",
                api_key_id=self.jti,
                model=MODEL,
                mode="complete",
                prompt_tokens_estimated=100,
                reserved_tokens=0,
                queue_enter_ts=self.clock.wall_us(),
                trace_id="0" * 32,
            )
            operation = self.core.accept(reservation, [], max_tokens=100, is_exact=True)
            self.accept_ns += time.thread_time_ns() - began_ns
            async with operation:
                await operation.granted()
                counts = Counts(
                    source="upstream_usage",
                    attempt_ids=(operation.next_attempt_id(),),
                    prompt_tokens=90,
                    completion_tokens=50,
                    start_ts=self.clock.wall_us(),
                )
                await self.core.settle(operation, COMPLETED, counts)


async def core_cost(folder: Path, *, group: int, count: int, is_limited: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        desk = Desk(Path(place), is_limited=is_limited)
        share = count // group
        began_ns = time.thread_time_ns()
        await asyncio.gather(*(desk.operations(range(i, share * group, group)) for i in range(group)))
        spent_ns = time.thread_time_ns() - began_ns
        await desk.core.stop()
        await desk.journal.close()
        desk.core.directory.close()
    return {
        "under_way": group,
        "limits": is_limited,
        "accept_us": round(desk.accept_ns / (share * group) / 1000, 1),
        "operation_us": round(spent_ns / (share * group) / 1000, 1),
    }


# --- the controller -------------------------------------------------------------------------------------


def controller_cost(*, waiting: int, tenants: int, count: int) -> dict[str, Any]:
    controller = AdmissionController(lease_us=30_000_000)
    bounds = QueueBounds(length=2 * waiting, tokens=10**9, tenant_length=2 * waiting, tenant_tokens=10**9)
    # The others wait for a model whose only replica is full; limits are shared with the one that has room.
    for model in (MODEL, "full"):
        queue: FairQueue[Entry] = FairQueue(bounds)
        queue.add(f"{model}.1", capacity=1)
        controller.add_model(model, queue)
    numbers = iter(range(10**9))

    def applicant(model: str) -> Applicant:
        number = next(numbers)
        tenant = f"t{number % tenants}"
        levels: tuple[LevelLimits, ...] = (
            ("cluster", "", LIMITS),
            ("tenant", tenant, LIMITS),
            ("key", f"key_{tenant}", LIMITS),
        )
        return Applicant(
            request_id=f"req_{number:032x}",
            tenant_id=tenant,
            model_id=model,
            accounts=controller.accounts.of(levels, number),
            prompt_tokens=100,
            max_tokens=100,
            default_max_tokens=100,
            context_tokens=None,
            is_stream=False,
            is_exact=True,
            can_be_counted=False,
        )

    for _ in range(waiting + 1):
        controller.accept(applicant("full"), 0)
    (running,) = controller.dispatch("full", 0)
    applicants = [applicant(MODEL) for _ in range(count)]
    began_ns = time.thread_time_ns()
    for now_us, one in enumerate(applicants):
        entry = controller.accept(one, now_us * 10).entry
        assert [*controller.dispatch(MODEL, now_us * 10)] == [entry]
        controller.settle(entry, used=150, now_us=now_us * 10)
    started_ns = time.thread_time_ns()
    later_us = count * 10
    for now_us in range(
        later_us, later_us + min(count, waiting)
    ):  # one ends, the next one of those who wait starts
        controller.settle(running, used=150, now_us=now_us)
        (running,) = controller.dispatch("full", now_us)
    ended_ns = time.thread_time_ns()
    return {
        "waiting": waiting,
        "tenants": tenants,
        "accept_grant_settle_us": round((started_ns - began_ns) / count / 1000, 1),
        "settle_and_grant_next_us": round((ended_ns - started_ns) / min(count, waiting) / 1000, 1),
    }


def clock_ns(calls: int = 10_000) -> int:
    """What asking for the time takes; every measured piece of work has one such call in it."""
    began_ns = time.thread_time_ns()
    for _ in range(calls):
        time.thread_time_ns()
    return (time.thread_time_ns() - began_ns) // calls


def contended_cost(*, waiting: int, tenants: int, count: int) -> dict[str, Any]:
    controller = AdmissionController(lease_us=30_000_000)
    many = 10**12
    queue: FairQueue[Entry] = FairQueue(
        QueueBounds(length=many, tokens=many, tenant_length=many, tenant_tokens=many)
    )
    queue.add("r", capacity=64)
    controller.add_model(MODEL, queue)
    draw = random.Random(7)

    def applicant(number: int) -> Applicant:
        tenant = f"t{draw.randrange(tenants)}"
        levels: tuple[LevelLimits, ...] = (
            ("cluster", "", LIMITS),
            ("tenant", tenant, LIMITS),
            ("key", f"key_{tenant}", LIMITS),
        )
        accounts = controller.accounts.of(levels, number)
        return Applicant(
            request_id=f"req_{number:032x}",
            tenant_id=tenant,
            model_id=MODEL,
            accounts=accounts,
            prompt_tokens=100,
            max_tokens=100,
            default_max_tokens=100,
            context_tokens=None,
            is_stream=False,
            is_exact=True,
            can_be_counted=False,
            demand=Demand(prompt_tokens=100, expected_output_tokens=draw.randint(1, 100), gate=accounts),
        )

    for number in range(waiting + 64):
        controller.accept(applicant(number), 0)
    running = deque(controller.dispatch(MODEL, 0))
    applicants = [applicant(waiting + 64 + number) for number in range(count)]
    gc.collect()
    spent_ns = -2 * count * clock_ns()
    for now_us, one in enumerate(applicants):
        began_ns = time.thread_time_ns()
        controller.accept(one, now_us)
        accepted_ns = time.thread_time_ns()
        controller.settle(running.popleft(), used=150, now_us=now_us)
        settled_ns = time.thread_time_ns()
        running.extend(controller.dispatch(MODEL, now_us))
        spent_ns += time.thread_time_ns() - settled_ns + accepted_ns - began_ns
    return {
        "waiting": waiting,
        "tenants": tenants,
        "accept_and_dispatch_us": round(spent_ns / count / 1000, 1),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    arguments = parser.parse_args()
    count = arguments.operations
    core = [
        await core_cost(
            arguments.directory, group=group, count=count // (4 if group == 1 else 1), is_limited=is_limited
        )
        for is_limited in (False, True)
        for group in GROUPS
    ]
    controller = [
        controller_cost(waiting=waiting, tenants=tenants, count=count)
        for waiting in WAITING
        for tenants in TENANTS
    ]
    quieten_garbage_collection()
    contended = [
        contended_cost(waiting=waiting, tenants=tenants, count=count)
        for waiting, tenants in ((100, 10), (10_000, 1_000), (100_000, 10_000))
    ]
    found = {"benchmark": "admission", "core": core, "controller": controller, "contended": contended}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    uvloop.run(main())
