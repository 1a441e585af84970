"""The memory guard around the state machine (LI-6): what a request needs, what a throttle does to its share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.admission.entry import Phase
from headrace.bounds import MIB
from headrace.config.settings import MemorySettings, ModelSettings
from headrace.core.operation import Operation
from headrace.core.replica import ReplicaBusy
from headrace.errors import Refusal
from headrace.ledger.closing import COMPLETED, Counts
from headrace.limits.memory import MemoryRate
from tests.core.test_core import SilentReplica
from tests.core.test_scheduling import Hall

pytestmark = pytest.mark.asyncio

DEFAULT = MemoryRate.of_settings(MemorySettings())


@pytest_asyncio.fixture
async def hall(tmp_path: Path) -> AsyncIterator[Hall]:
    hall = Hall(tmp_path)
    yield hall
    await hall.core.stop()
    await hall.journal.close()
    hall.directory.close()


def limit(hall: Hall, tenant: str, size: int) -> None:
    hall.directory.update_tenant(tenant, limits={"gpu_memory_gb": size / 2**30}, actor="test")


def throttle(hall: Hall, tenant: str) -> None:
    """Have the tenant refused memory beside what it has running."""
    with pytest.raises(Refusal) as refused:
        hall.ask(tenant)
    assert refused.value.details["limit_type"] == "memory"


async def end(hall: Hall, operation: Operation, tokens: int = 1) -> None:
    await hall.core.settle(operation, COMPLETED, Counts(source="engine", completion_tokens=tokens))


async def test_the_default_formula_until_a_worker_has_said_better_and_for_good_then(tmp_path: Path) -> None:
    hall = Hall(tmp_path)
    hall.core.add_model(ModelSettings(id="k", path="x"))
    hall.core.models["k"].queue.expect("later")
    hall.tenant("one")
    assert hall.ask("one", model="k", answer=20).entry.memory == DEFAULT.bytes_of(30)
    replica = SilentReplica()
    replica.kv_bytes_per_token = 1000
    hall.core.add_replica("k", replica, capacity=1)
    assert hall.ask("one", model="k", answer=20).entry.memory == 30_000
    hall.core.remove_replica("k", "silent", successor_id="later")
    assert hall.core.models["k"].memory_rate == MemoryRate(0, 1000)
    await hall.core.stop()
    await hall.journal.close()
    hall.directory.close()


async def test_settings_go_before_what_a_worker_says(hall: Hall) -> None:
    settings = ModelSettings(id="s", path="x", memory=MemorySettings(base_mb=2, mb_per_token=0.5))
    hall.core.add_model(settings)
    replica = SilentReplica()
    replica.kv_bytes_per_token = 1000
    hall.core.add_replica("s", replica, capacity=1)
    assert hall.core.models["s"].memory_rate == MemoryRate(2 * MIB, MIB // 2)


async def test_the_longest_of_the_last_answers_is_reckoned_with(hall: Hall) -> None:
    hall.tenant("one")
    for tokens in (3, 12, 5):
        await end(hall, hall.ask("one", answer=20), tokens)
    assert hall.ask("one", answer=20).entry.memory == DEFAULT.bytes_of(10 + 12)
    assert hall.ask("one", answer=7).entry.memory == DEFAULT.bytes_of(10 + 7)


async def test_a_request_that_is_sent_back_holds_no_memory_until_it_is_granted_again(hall: Hall) -> None:
    limit(hall, "acme", DEFAULT.bytes_of(30))
    running = hall.ask("acme")
    account = hall.core.controller.accounts.find("tenant", "acme")
    assert account is not None and account.memory == DEFAULT.bytes_of(30)
    hall.core.put_back(running, ReplicaBusy())
    assert account.memory == 0
    hall.core.models["m"].queue.pause("silent", is_paused=False)
    hall.core.note_progress(is_full_round=True)
    assert running.entry.phase is Phase.GRANTED
    assert account.memory == DEFAULT.bytes_of(30)
    await end(hall, running)
    assert account.memory == 0


async def test_half_the_share_while_throttled(hall: Hall) -> None:
    """Of equal tenants the one that was refused memory is served half as often, and waits where it was refused."""
    hall.tenant("slow")
    hall.tenant("other")
    limit(hall, "slow", DEFAULT.bytes_of(30))
    first = hall.ask("slow")
    throttle(hall, "slow")
    waiting = [hall.ask("slow") for _ in range(10)] + [hall.ask("other") for _ in range(10)]
    assert all(one.entry.is_throttled == (one.entry.tenant_id == "slow") for one in waiting)
    assert {one.entry.weight for one in waiting[:10]} == {0.5}
    order = await hall.serve([first, *waiting])
    assert order[1:13].count("other") == pytest.approx(8, abs=1)


async def test_who_shares_a_queue_leaves_it_while_throttled(hall: Hall) -> None:
    for name in ("a", "b"):
        hall.tenant(name, isolation="shared")
    limit(hall, "a", DEFAULT.bytes_of(30))
    first = hall.ask("a")
    assert first.entry.flow == "@shared"
    throttle(hall, "a")
    slow, other = hall.ask("a"), hall.ask("b")
    assert (slow.entry.flow, slow.entry.weight) == ("a", 0.5)
    assert (other.entry.flow, other.entry.weight) == ("@shared", 1.0)
    view = hall.core.queues.of_tenant(hall.core.models["m"], "a")["tenant"]
    assert (view["is_shared"], view["is_throttled"], view["weight"]) == (False, True, 0.5)
    await hall.serve([first, slow, other])


async def test_a_tenant_that_is_throttled_in_vain_is_told_why(hall: Hall) -> None:
    limit(hall, "acme", DEFAULT.bytes_of(30))
    first = hall.ask("acme")
    throttle(hall, "acme")
    waiting = hall.ask("acme")
    facts = hall.core.queues.facts_of(waiting)
    assert facts.reason == "throttled"
    await hall.serve([first, waiting])
