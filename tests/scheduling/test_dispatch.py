"""The queue of a model: bounded, first in first out, never more on a replica than it holds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.scheduling.dispatch import ModelQueue, NoReplica, QueueFull


def test_a_free_replica_is_granted_at_once_even_with_no_queue() -> None:
    queue: ModelQueue[str] = ModelQueue(length_max=0)
    queue.add("r", capacity=1)
    queue.enter("a")
    assert list(queue.dispatch()) == [("a", "r")]
    with pytest.raises(QueueFull) as full:
        queue.enter("b")
    assert (full.value.limit, full.value.used) == (0, 0)


def test_the_order_of_arrival_is_kept_and_a_refusal_changes_nothing() -> None:
    queue: ModelQueue[str] = ModelQueue(length_max=2)
    queue.add("r", capacity=1)
    for ticket in "abc":
        queue.enter(ticket)
        list(queue.dispatch())
    with pytest.raises(QueueFull):
        queue.enter("d")
    assert (queue.num_waiting, queue.position("b"), queue.position("c"), queue.position("d")) == (2, 1, 2, 0)
    queue.release("r")
    assert list(queue.dispatch()) == [("b", "r")]


def test_the_least_loaded_replica_comes_first_in_proportion_to_its_size() -> None:
    queue: ModelQueue[int] = ModelQueue(length_max=10)
    queue.add("small", capacity=2)
    queue.add("large", capacity=6)
    for ticket in range(8):
        queue.enter(ticket)
    granted = [replica for _, replica in queue.dispatch()]
    assert granted.count("small") == 2
    assert granted.count("large") == 6
    assert granted[:4].count("large") == 3


def test_without_any_replica_nobody_waits_but_for_an_expected_one_they_do() -> None:
    queue: ModelQueue[str] = ModelQueue(length_max=10)
    with pytest.raises(NoReplica):
        queue.enter("a")
    queue.expect("r.1")
    queue.enter("a")
    assert list(queue.dispatch()) == []
    assert queue.drop_hopeless() == []
    queue.expect("r.2")
    queue.give_up("r.1")
    assert queue.drop_hopeless() == []
    queue.give_up("r.2")
    assert queue.drop_hopeless() == ["a"]
    assert queue.num_waiting == 0


def test_a_release_for_a_replica_that_is_gone_does_not_touch_its_successor() -> None:
    queue: ModelQueue[str] = ModelQueue(length_max=10)
    queue.add("r.1", capacity=1)
    queue.enter("a")
    list(queue.dispatch())
    queue.remove("r.1")
    queue.add("r.2", capacity=1)
    queue.enter("b")
    assert list(queue.dispatch()) == [("b", "r.2")]
    queue.release("r.1")
    assert queue.running_on("r.2") == 1


def test_who_may_not_start_yet_keeps_its_place_and_lets_others_pass() -> None:
    queue: ModelQueue[str] = ModelQueue(length_max=10)
    queue.add("r", capacity=2)
    for ticket in ("a1", "a2", "b1", "b2"):
        queue.enter(ticket)
    running: list[str] = []
    for ticket, _ in queue.dispatch(lambda ticket: not any(one[0] == ticket[0] for one in running)):
        running.append(ticket)
    assert running == ["a1", "b1"]
    assert (queue.position("a2"), queue.position("b2")) == (1, 2)


class QueueMachine(RuleBasedStateMachine):
    """Random arrivals, departures, deaths of replicas against a plain model of the queue."""

    LENGTH = 4

    def __init__(self) -> None:
        super().__init__()
        self.queue: ModelQueue[int] = ModelQueue(length_max=self.LENGTH)
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
        self.queue.remove(name)

    @rule()
    def enter(self) -> None:
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        try:
            self.queue.enter(ticket)
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
