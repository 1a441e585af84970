"""The queue of a model under `fifo`: bounded, first in first out, never more on a replica than it holds.

Two queues keep these rules: the server's, and the plain one that its random histories are compared with.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import QueuePolicy
from headrace.scheduling.queue_bounds import NoReplica, QueueBounds, QueueFull
from tests.scheduling import oracle
from tests.scheduling.plain_queue import PlainQueue

AnyQueue = FairQueue[Any] | PlainQueue[Any]
Make = Callable[[QueueBounds], AnyQueue]
MANY = 1_000_000


def bounds(
    *, length: int = MANY, tokens: int = MANY, tenant_length: int = MANY, tenant_tokens: int = MANY
) -> QueueBounds:
    return QueueBounds(length=length, tokens=tokens, tenant_length=tenant_length, tenant_tokens=tenant_tokens)


def fifo(bounds: QueueBounds) -> FairQueue[Any]:
    return FairQueue(bounds, QueuePolicy(name="fifo"))


@pytest.fixture(params=[fifo, PlainQueue], ids=["fair", "plain"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def position(queue: AnyQueue, ticket: Any) -> int:
    """Place in the queue, from 1; 0 if it does not wait."""
    return queue.position(ticket) if isinstance(queue, PlainQueue) else oracle.position(queue, ticket)


def enter(queue: AnyQueue, ticket: Any, *, tenant: str = "demo", tokens: int = 1) -> list[Any]:
    return queue.enter(ticket, tenant=tenant, tokens=tokens)


def test_a_free_replica_is_granted_at_once_even_with_no_queue(make: Make) -> None:
    queue = make(bounds(length=0))
    queue.add("r", capacity=1)
    enter(queue, "a")
    assert list(queue.dispatch()) == [("a", "r")]
    with pytest.raises(QueueFull) as full:
        enter(queue, "b")
    assert (full.value.limit, full.value.used) == (0, 0)


def test_the_order_of_arrival_is_kept_and_a_refusal_changes_nothing(make: Make) -> None:
    queue = make(bounds(length=2))
    queue.add("r", capacity=1)
    for ticket in "abc":
        enter(queue, ticket)
        list(queue.dispatch())
    with pytest.raises(QueueFull):
        enter(queue, "d")
    assert (queue.num_waiting, position(queue, "b"), position(queue, "c"), position(queue, "d")) == (
        2,
        1,
        2,
        0,
    )
    queue.release("r")
    assert list(queue.dispatch()) == [("b", "r")]


def test_of_equally_large_tenants_who_began_to_wait_first_gives_way(make: Make) -> None:
    for tenants in ("abc", "bca", "cab"):
        queue = make(bounds(length=6))
        queue.expect("r")
        for number in range(2):
            for tenant in tenants:
                enter(queue, f"{tenant}{number}", tenant=tenant, tokens=5)
        evicted = [enter(queue, f"new{number}", tenant="new")[0] for number in range(3)]
        assert evicted == [f"{tenant}1" for tenant in tenants]


def test_more_places_are_there_at_once_and_fewer_wait_for_what_runs_to_end(make: Make) -> None:
    queue = make(bounds(length=10))
    queue.add("r", capacity=1)
    queue.set_capacity("gone", 5)
    for ticket in range(6):
        enter(queue, ticket)
    assert list(queue.dispatch()) == [(0, "r")]
    queue.set_capacity("r", 3)
    assert list(queue.dispatch()) == [(1, "r"), (2, "r")]
    queue.set_capacity("r", 1)
    for _ in range(2):
        queue.release("r")
        assert list(queue.dispatch()) == []
    assert list(queue.places()) == [("r", 1, 1)]
    queue.release("r")
    assert list(queue.dispatch()) == [(3, "r")]


def test_what_runs_beyond_a_capacity_takes_no_place_of_another_replica(make: Make) -> None:
    queue = make(bounds(length=10))
    queue.add("r", capacity=4)
    for ticket in range(4):
        enter(queue, ticket)
    assert len(list(queue.dispatch())) == 4
    queue.set_capacity("r", 1)
    queue.add("s", capacity=2)
    for ticket in range(4, 7):
        enter(queue, ticket)
    assert list(queue.dispatch()) == [(4, "s"), (5, "s")]


def test_the_least_loaded_replica_comes_first_in_proportion_to_its_size(make: Make) -> None:
    queue = make(bounds(length=10))
    queue.add("small", capacity=2)
    queue.add("large", capacity=6)
    for ticket in range(8):
        enter(queue, ticket)
    granted = [replica for _, replica in queue.dispatch()]
    assert granted.count("small") == 2
    assert granted.count("large") == 6
    assert granted[:4].count("large") == 3


def test_without_any_replica_nobody_waits_but_for_an_expected_one_they_do(make: Make) -> None:
    queue = make(bounds(length=10))
    with pytest.raises(NoReplica):
        enter(queue, "a")
    queue.expect("r.1")
    enter(queue, "a")
    assert list(queue.dispatch()) == []
    assert queue.drop_hopeless() == []
    queue.expect("r.2")
    queue.give_up("r.1")
    assert queue.drop_hopeless() == []
    queue.give_up("r.2")
    assert queue.drop_hopeless() == ["a"]
    assert queue.num_waiting == 0


def test_a_release_for_a_replica_that_is_gone_does_not_touch_its_successor(make: Make) -> None:
    queue = make(bounds(length=10))
    queue.add("r.1", capacity=1)
    enter(queue, "a")
    list(queue.dispatch())
    queue.give_up("r.1")
    queue.add("r.2", capacity=1)
    enter(queue, "b")
    assert list(queue.dispatch()) == [("b", "r.2")]
    queue.release("r.1")
    assert queue.running_on("r.2") == 1


def test_who_may_not_start_yet_keeps_its_place_and_lets_others_pass(make: Make) -> None:
    queue = make(bounds(length=10))
    queue.add("r", capacity=2)
    for ticket in ("a1", "a2", "b1", "b2"):
        enter(queue, ticket)
    running: list[str] = []
    for ticket, _ in queue.dispatch(lambda ticket: not any(one[0] == ticket[0] for one in running)):
        running.append(ticket)
    assert running == ["a1", "b1"]
    assert (position(queue, "a2"), position(queue, "b2")) == (1, 2)


def test_the_queue_is_bounded_in_tokens_and_for_each_tenant(make: Make) -> None:
    queue = make(bounds(tokens=100, tenant_length=2, tenant_tokens=60))
    queue.expect("r")
    enter(queue, "a1", tenant="a", tokens=40)
    with pytest.raises(QueueFull) as full:
        enter(queue, "a2", tenant="a", tokens=21)
    assert (full.value.level, full.value.bound, full.value.limit, full.value.used) == (
        "tenant",
        "tokens",
        60,
        40,
    )
    enter(queue, "a3", tenant="a", tokens=20)
    with pytest.raises(QueueFull) as full:
        enter(queue, "a4", tenant="a", tokens=0)
    assert (full.value.level, full.value.bound, full.value.limit) == ("tenant", "requests", 2)
    enter(queue, "b1", tenant="b", tokens=40)
    with pytest.raises(QueueFull) as full:
        enter(queue, "c1", tenant="c", tokens=50)
    assert (full.value.level, full.value.bound, full.value.used) == ("model", "tokens", 100)
    assert (queue.num_waiting, queue.waiting_tokens, queue.waiting_of("a")) == (3, 100, (2, 60))


def test_a_full_queue_takes_the_newest_of_the_largest_tenant_for_another_ones_request(make: Make) -> None:
    queue = make(bounds(length=3))
    queue.expect("r")
    for ticket in ("a1", "a2", "a3"):
        assert enter(queue, ticket, tenant="a", tokens=10) == []
    with pytest.raises(QueueFull):
        enter(queue, "a4", tenant="a", tokens=10)  # its own flood pushes nobody out
    assert enter(queue, "b1", tenant="b", tokens=10) == ["a3"]
    with pytest.raises(QueueFull):
        enter(queue, "b2", tenant="b", tokens=10)  # it would have as much as the largest
    assert enter(queue, "c1", tenant="c", tokens=5) == ["a2"]
    queue.add("r", capacity=3)
    assert [ticket for ticket, _ in queue.dispatch()] == ["a1", "b1", "c1"]


def test_a_large_request_may_take_the_places_of_several_small_ones_of_a_larger_tenant(make: Make) -> None:
    queue = make(bounds(tokens=100))
    queue.expect("r")
    for number in range(10):
        enter(queue, f"a{number}", tenant="a", tokens=10)
    assert enter(queue, "b", tenant="b", tokens=25) == ["a9", "a8", "a7"]
    assert (queue.waiting_tokens, queue.waiting_of("a"), queue.waiting_of("b")) == (95, (7, 70), (1, 25))
    with pytest.raises(QueueFull):
        enter(queue, "c", tenant="c", tokens=70)
    assert queue.num_waiting == 8


def test_what_a_full_replica_sends_back_is_next_and_the_replica_rests(make: Make) -> None:
    queue = make(bounds(length=2))
    queue.add("r", capacity=1)
    for ticket in "abc":
        enter(queue, ticket, tokens=3)
        list(queue.dispatch())
    queue.put_back("a", "r", tenant="demo", tokens=3)
    queue.pause("r", is_paused=True)
    assert (position(queue, "a"), queue.num_waiting, queue.running_on("r")) == (1, 3, 0)
    assert list(queue.dispatch()) == []
    queue.pause("r", is_paused=False)
    assert list(queue.dispatch()) == [("a", "r")]
    assert queue.waiting_of("demo") == (2, 6)


class QueueMachine(RuleBasedStateMachine):
    """Random arrivals, departures, deaths of replicas against a plain model of the queue."""

    LENGTH = 4
    MAKE: Make = staticmethod(fifo)

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.MAKE(bounds(length=self.LENGTH))
        self.waiting: list[int] = []
        self.running: dict[int, str] = {}
        self.capacity: dict[str, int] = {}
        self.next_ticket = 0
        self.next_replica = 0

    def dispatch(self) -> None:
        for ticket, replica in self.queue.dispatch():
            assert ticket == self.waiting.pop(0), "first in, first out"
            self.running[ticket] = replica

    @rule(capacity=st.integers(1, 3))
    def add(self, capacity: int) -> None:
        name = f"r{self.next_replica}"
        self.next_replica += 1
        self.capacity[name] = capacity
        self.queue.add(name, capacity=capacity)
        self.dispatch()

    @precondition(lambda self: self.capacity)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.capacity)))
        del self.capacity[name]
        self.queue.give_up(name)

    @rule()
    def enter(self) -> None:
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        try:
            enter(self.queue, ticket)
        except QueueFull:
            assert len(self.waiting) == self.LENGTH
        except NoReplica:
            assert not self.capacity
        else:
            self.waiting.append(ticket)
        self.dispatch()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        assert self.queue.leave(ticket)
        assert not self.queue.leave(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.queue.release(self.running.pop(ticket))
        self.dispatch()

    @invariant()
    def nothing_is_lost_and_no_replica_is_overfull(self) -> None:
        assert self.queue.num_waiting == len(self.waiting)
        for name, capacity in self.capacity.items():
            running = sum(replica == name for replica in self.running.values())
            assert self.queue.running_on(name) == running <= capacity
            assert not (self.waiting and running < capacity), "work-conserving"


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase


class PlainMachine(QueueMachine):
    MAKE = PlainQueue


PlainMachine.TestCase.settings = QueueMachine.TestCase.settings
TestPlainMachine = PlainMachine.TestCase
