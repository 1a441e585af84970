"""The core's queue: what tenants and clients say of themselves reaches it, what comes of it reaches them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.admission.entry import Phase
from headrace.admission.invariants import check
from headrace.config.scheduling import SchedulingSettings
from headrace.config.settings import ModelSettings
from headrace.core.core import TurnedAway
from headrace.core.operation import Operation
from headrace.core.replica import ReplicaBusy
from headrace.errors import Refusal
from headrace.ledger.closing import CLIENT_CLOSED, COMPLETED, Counts
from headrace.ledger.records import Reservation
from tests.core.test_core import SilentReplica, World

pytestmark = pytest.mark.asyncio


class Hall(World):
    """A model with one place and several tenants."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.core.remove_replica("m", self.replica.replica_id, successor_id="later")
        self.core.add_replica("m", self.replica, capacity=1)
        self.jtis = {"acme": self.jti}

    def tenant(self, name: str, **sharing: Any) -> None:
        self.directory.create_tenant(name, None, sharing=sharing, actor="test")
        self.jtis[name] = self.directory.create_key(tenant=name, actor="test").view.jti

    def ask(
        self, tenant: str, *, prompt: int = 10, answer: int = 20, model: str = "m", **more: Any
    ) -> Operation:
        self.number += 1
        reservation = Reservation(
            request_id=f"req_{self.number}",
            tenant_id=tenant,
            api_key_id=self.jtis[tenant],
            model=model,
            mode="complete",
            prompt_tokens_estimated=prompt,
            reserved_tokens=0,
            priority=self.core.service_class(tenant, more.pop("latency_sla", "normal")),
            queue_enter_ts=self.clock.wall_us(),
            trace_id="",
        )
        return self.core.accept(reservation, [], max_tokens=answer, is_exact=True, **more)

    async def serve(self, waiting: list[Operation], *, answer: int = 20) -> list[str]:
        """Serve all, one after the other; the tenants in the order in which they were served."""
        order: list[str] = []
        left = list(waiting)
        while left:
            (running,) = (one for one in left if one.entry.phase is Phase.GRANTED)
            left.remove(running)
            order.append(running.reservation.tenant_id)
            counts = Counts(source="engine", prompt_tokens=10, completion_tokens=answer)
            await self.core.settle(running, COMPLETED, counts)
        return order


@pytest_asyncio.fixture
async def hall(tmp_path: Path) -> AsyncIterator[Hall]:
    hall = Hall(tmp_path)
    yield hall
    await hall.core.stop()
    check(hall.core.controller, hall.clock.monotonic_us())
    await hall.journal.close()
    hall.directory.close()


async def test_twice_the_weight_is_twice_the_service(hall: Hall) -> None:
    hall.tenant("light")
    hall.tenant("heavy", weight=2.0)
    waiting = [hall.ask("light") for _ in range(10)] + [hall.ask("heavy") for _ in range(10)]
    order = await hall.serve(waiting)
    assert order[0] == "light", "it was there before anybody else"
    assert order[1:10].count("heavy") == 6
    assert order[:16].count("heavy") == 10


async def test_what_a_tenant_really_took_decides_and_is_expected_of_its_next(hall: Hall) -> None:
    hall.tenant("long")
    hall.tenant("short")
    for tenant, answer in (("long", 200), ("short", 2)) * 6:
        await hall.serve([hall.ask(tenant, answer=200)], answer=answer)
    expectations = hall.core.models["m"].expectations
    assert expectations.output_tokens("long", 200) > 190
    assert expectations.output_tokens("short", 200) < 10
    assert expectations.output_tokens("short", 3) <= 3


async def test_batch_waits_behind_interactive_and_the_record_says_so(hall: Hall) -> None:
    hall.tenant("night", service_class="batch")
    hall.tenant("day")
    running = hall.ask("day")
    waiting = [
        hall.ask("night"),
        hall.ask("day", latency_sla="throughput"),
        hall.ask("day"),
        hall.ask("night", latency_sla="low"),
    ]
    order = await hall.serve([running, *waiting])
    assert order[1] == "day"
    records = [operation.record for operation in waiting]
    assert [record and record.priority for record in records] == ["batch", "batch", "interactive", "batch"]


async def test_a_priority_counts_as_far_as_its_tenant_may(hall: Hall) -> None:
    hall.tenant("vip", priority_max=5)
    hall.tenant("plain")
    for tenant, is_sooner in (("vip", True), ("plain", False)):
        first = hall.ask(tenant)
        late = hall.ask(tenant)
        urgent = hall.ask(tenant, priority=100)
        await hall.core.settle(first, COMPLETED, Counts(source="engine", completion_tokens=1))
        assert (urgent.entry.phase is Phase.GRANTED) == is_sooner
        await hall.serve([late, urgent])


async def test_tenants_that_share_a_queue_have_the_weight_of_one(hall: Hall) -> None:
    for name in ("a", "b", "c"):
        hall.tenant(name, isolation="shared", weight=5.0)
    hall.tenant("own")
    waiting = [hall.ask(name) for name in "aabbcc"] + [hall.ask("own") for _ in range(6)]
    order = await hall.serve(waiting)
    assert order[1:9].count("own") == 4
    assert [name for name in order if name != "own"] == list("aabbcc")


async def test_a_dedicated_tenant_has_its_workers_to_itself_and_moves_by_configuration(hall: Hall) -> None:
    settings = ModelSettings(id="d", path="x", workers=3, dedicated_workers={"vip": 1})
    hall.core.add_model(settings)
    for worker_id in settings.worker_ids:
        replica = SilentReplica()
        replica.replica_id = replica.worker_id = worker_id  # type: ignore[misc]
        hall.core.add_replica("d", replica, capacity=1)
    hall.tenant("vip", isolation="dedicated")
    hall.tenant("crowd")
    crowd = [hall.ask("crowd", model="d") for _ in range(4)]
    assert [one.entry.replica_id for one in crowd] == ["d-0", "d-1", None, None]
    vip = [hall.ask("vip", model="d") for _ in range(2)]
    assert [one.entry.replica_id for one in vip] == ["d-2", None]
    await hall.core.settle(crowd[0], COMPLETED, Counts(source="engine"))
    assert [one.entry.replica_id for one in (crowd[2], vip[1])] == ["d-0", None]
    await hall.core.settle(vip[0], COMPLETED, Counts(source="engine"))
    assert [one.entry.replica_id for one in (crowd[3], vip[1])] == [None, "d-2"]
    hall.directory.update_tenant("vip", sharing={"isolation": "weighted"}, actor="test")
    moved = hall.ask("vip", model="d")
    await hall.core.settle(vip[1], COMPLETED, Counts(source="engine"))
    assert moved.entry.replica_id is None, "the place set aside is not for it any more"
    await hall.core.settle(crowd[1], COMPLETED, Counts(source="engine"))
    await hall.core.settle(crowd[2], COMPLETED, Counts(source="engine"))
    assert {moved.entry.replica_id, crowd[3].entry.replica_id} == {"d-0", "d-1"}
    for one in (moved, crowd[3]):
        await hall.core.settle(one, COMPLETED, Counts(source="engine"))


async def test_the_policy_changes_while_requests_wait(hall: Hall) -> None:
    hall.tenant("many")
    hall.tenant("few")
    first = hall.ask("many")
    waiting = [hall.ask("many"), hall.ask("many"), hall.ask("few")]
    model = hall.core.models["m"]
    hall.core.reschedule(model, SchedulingSettings(scheduler_policy="fifo"))
    assert await hall.serve([first, *waiting]) == ["many", "many", "many", "few"]


async def test_a_waiting_requests_limits_are_asked_anew_for_each_caller(hall: Hall) -> None:
    hall.tenant("bound")
    hall.tenant("free")
    hall.core.remove_replica("m", "silent", successor_id="later")
    hall.core.add_replica("m", hall.replica, capacity=3)
    hall.directory.update_tenant("bound", limits={"concurrency": 1}, actor="test")
    waiting = [hall.ask("bound")]
    waiting += [hall.ask("free") for _ in range(2)]
    assert all(one.entry.phase is Phase.GRANTED for one in waiting)
    for one in waiting:
        await hall.core.settle(one, COMPLETED, Counts(source="engine"))


async def test_a_flooding_tenants_newest_request_makes_place_and_goes_on_where_it_was(hall: Hall) -> None:
    hall.tenant("flood")
    hall.tenant("few")
    model = hall.core.models["m"]
    hall.core.remove_replica("m", "silent", successor_id="later")
    hall.core.add_replica("m", hall.replica, capacity=2)
    hall.core.reschedule(model, SchedulingSettings(preemption=True))
    running = [hall.ask("flood", answer=200) for _ in range(2)]
    waiting = hall.ask("flood", answer=200)
    for one in running:
        await one.granted()
        one.start(None)  # type: ignore[arg-type]
    short = hall.ask("few", answer=1)
    older, newest = hall.replica.answers
    assert (older.stopped, newest.stopped is not None, short.entry.phase) == (None, True, Phase.WAITING)
    assert newest.stopped is not None
    newest.stopped(7)
    assert (short.entry.phase, running[1].entry.phase) == (Phase.GRANTED, Phase.WAITING)
    check(hall.core.controller, hall.clock.monotonic_us())
    await hall.core.settle(short, COMPLETED, Counts(source="engine", prompt_tokens=10, completion_tokens=1))
    assert (running[1].entry.phase, newest.num_resumed) == (Phase.GRANTED, 1), "before the rest of its tenant"
    assert waiting.entry.phase is Phase.WAITING
    await hall.serve([running[0]])
    await hall.serve([running[1]])
    await hall.serve([waiting])


async def test_a_request_that_ends_while_it_is_to_be_stopped_makes_place_all_the_same(hall: Hall) -> None:
    hall.tenant("flood")
    hall.tenant("few")
    model = hall.core.models["m"]
    hall.core.remove_replica("m", "silent", successor_id="later")
    hall.core.add_replica("m", hall.replica, capacity=2)
    hall.core.reschedule(model, SchedulingSettings(preemption=True))
    running = [hall.ask("flood", answer=200) for _ in range(2)]
    for one in running:
        await one.granted()
        one.start(None)  # type: ignore[arg-type]
    short = hall.ask("few", answer=1)
    stopped = hall.replica.answers[1].stopped
    assert stopped is not None
    await hall.core.settle(running[1], COMPLETED, Counts(source="engine", completion_tokens=3))
    assert short.entry.phase is Phase.GRANTED
    late = hall.ask("few", answer=1)
    stopped(3)  # nobody is stopped twice, and nobody in its place
    assert (running[0].entry.phase, late.entry.phase) == (Phase.GRANTED, Phase.WAITING)
    for one in (running[0], short, late):
        await hall.core.settle(one, COMPLETED, Counts(source="engine"))


async def test_a_stopped_request_that_loses_its_place_is_told(hall: Hall) -> None:
    hall.tenant("flood")
    hall.tenant("few")
    model = hall.core.models["m"]
    hall.core.remove_replica("m", "silent", successor_id="later")
    hall.core.add_replica("m", hall.replica, capacity=2)
    hall.core.reschedule(model, SchedulingSettings(preemption=True))
    running = [hall.ask("flood", answer=200) for _ in range(2)]
    for one in running:
        await one.granted()
        one.start(None)  # type: ignore[arg-type]
    short = hall.ask("few", answer=1)
    stopped = hall.replica.answers[1].stopped
    assert stopped is not None
    stopped(7)
    assert hall.core.metrics.registry.get_sample_value("headrace_preempted_total", {"model": "m"}) == 1
    # Its client leaves while it waits: what it holds is given back, its place in the queue too.
    await hall.core.settle(running[1], CLIENT_CLOSED, Counts(source="engine", completion_tokens=7))
    check(hall.core.controller, hall.clock.monotonic_us())
    assert model.queue.num_waiting == 0
    for one in (running[0], short):
        await hall.core.settle(one, COMPLETED, Counts(source="engine"))


async def test_where_a_request_stood_is_noted_when_it_begins_to_wait(hall: Hall) -> None:
    hall.tenant("flood")
    hall.tenant("few", weight=3.0)
    running = hall.ask("flood")
    assert running.wait is None, "it did not"
    flood = [hall.ask("flood") for _ in range(40)]
    few = hall.ask("few")
    assert few.wait is not None and flood[-1].wait is not None
    assert (few.wait.position, few.wait.is_exact, few.wait.tenant_share) == (2, True, 0.75)
    last = flood[-1].wait
    assert (last.position, last.is_exact, last.reason) == (40, False, "replicas_full"), (
        "behind its own, at least"
    )
    await running.granted()
    hall.core.put_back(running, ReplicaBusy())
    assert running.wait is not None
    assert (running.wait.position, running.wait.reason) == (1, "replica_paused")
    for one in (running, few, *flood):
        await hall.core.settle(one, CLIENT_CLOSED, Counts(source="none"))
        assert one.record is not None


async def test_what_a_tenant_got_lately_is_told_to_it(hall: Hall) -> None:
    for name in ("one", "two"):
        hall.tenant(name, isolation="shared", weight=9.0)
    model = hall.core.models["m"]
    assert hall.core.queues.of_tenant(model, "one")["tenant"]["weight"] == 1.0, "of all who share it together"
    await hall.serve([hall.ask("one"), hall.ask("two"), hall.ask("acme")])
    hall.core.note_progress(is_full_round=True)
    told = {name: hall.core.queues.of_tenant(model, name)["tenant"] for name in ("one", "acme")}
    assert (told["one"]["is_shared"], told["one"]["received_60s"]) == (True, 100.0), "10 + 2 * 20, of both"
    assert (told["acme"]["is_shared"], told["acme"]["received_60s"]) == (False, 50.0)


async def test_what_grows_longer_than_expected_is_charged_while_it_grows(hall: Hall) -> None:
    hall.tenant("liar")
    hall.tenant("honest")
    for _ in range(8):
        await hall.serve([hall.ask("liar", answer=200)], answer=1)
    running = hall.ask("liar", answer=200)
    await running.granted()
    answer = running.start(None)  # type: ignore[arg-type]
    waiting = [hall.ask("liar"), hall.ask("honest")]
    counter = hall.core.models["m"].queue.counters.get("liar")
    assert counter is not None
    before = counter.value
    answer.tokens_generated = 150  # type: ignore[misc]
    hall.core.note_progress(is_full_round=True)
    assert counter.value >= before + 2 * 140
    for one in (running, *reversed(waiting)):
        await hall.core.settle(one, COMPLETED, Counts(source="engine"))


async def test_who_may_be_served_with_less_is_turned_away_unrecorded_but_only_for_want_of_room(
    hall: Hall,
) -> None:
    for replica_id in ("silent", "later"):
        hall.core.remove_replica("m", replica_id, successor_id=None)
    with pytest.raises(TurnedAway) as turned_away:
        hall.ask("acme", may_degrade=True)
    assert turned_away.value.refusal.code == "no_healthy_worker"
    await hall.journal.flush()
    request_id = turned_away.value.reservation.request_id
    assert hall.core.usage(request_id, "acme") is None
    hall.core.turn_away(turned_away.value.reservation, turned_away.value.refusal)
    await hall.journal.flush()
    assert hall.core.usage(request_id, "acme") is not None
    hall.core.begin_stop(drain_s=1)
    with pytest.raises(Refusal) as refused:
        hall.ask("acme", may_degrade=True)
    assert refused.value.code == "shutting_down"
