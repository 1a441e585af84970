"""The fair queue under `fifo` does what the plain queue does, in any history."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import Demand
from headrace.scheduling.queue_bounds import NoReplica, QueueBounds, QueueFull
from tests.scheduling.plain_queue import PlainQueue
from tests.scheduling.test_queue_rules import fifo, position


class SideBySide(RuleBasedStateMachine):
    """Both queues get the same calls: same answers, same grants, same evictions."""

    def __init__(self) -> None:
        super().__init__()
        bounds = QueueBounds(length=8, tokens=300, tenant_length=5, tenant_tokens=200)
        self.plain: PlainQueue[int] = PlainQueue(bounds)
        self.fair: FairQueue[int] = fifo(bounds)
        self.number = 0
        self.granted: dict[int, tuple[str, str, int]] = {}
        self.waiting: dict[int, tuple[str, int]] = {}

    def both(self, call: Callable[[Any], Any]) -> Any:
        answers = []
        for queue in (self.plain, self.fair):
            try:
                answers.append(call(queue))
            except QueueFull as full:
                answers.append((full.level, full.bound, full.limit, full.used))
            except NoReplica:
                answers.append("no replica")
        assert answers[0] == answers[1]
        return answers[0]

    @rule(name=st.sampled_from("rs"), capacity=st.integers(1, 3))
    def add(self, name: str, capacity: int) -> None:
        self.forget(name)
        self.both(lambda queue: (queue.give_up(name), queue.add(name, capacity=capacity)))

    @rule(name=st.sampled_from("rs"))
    def give_up(self, name: str) -> None:
        self.forget(name)
        self.both(lambda queue: queue.give_up(name))

    def forget(self, name: str) -> None:
        for number, (replica, _, _) in list(self.granted.items()):
            if replica == name:
                del self.granted[number]

    @rule(name=st.sampled_from("rs"), is_paused=st.booleans())
    def pause(self, name: str, is_paused: bool) -> None:
        self.both(lambda queue: queue.pause(name, is_paused=is_paused))

    @rule(name=st.sampled_from("rs"), capacity=st.integers(1, 3))
    def set_capacity(self, name: str, capacity: int) -> None:
        self.both(lambda queue: queue.set_capacity(name, capacity))

    @rule(tenant=st.sampled_from("abc"), tokens=st.sampled_from([0, 1, 40, 90]), may_start=st.booleans())
    def enter(self, tenant: str, tokens: int, may_start: bool) -> None:
        self.number += 1
        evicted = self.both(
            lambda queue: queue.enter(
                self.number, tenant=tenant, tokens=tokens, may_start=lambda ticket: may_start
            )
        )
        if isinstance(evicted, list):
            self.waiting[self.number] = (tenant, tokens)
            for ticket in evicted:
                del self.waiting[ticket]

    @rule(tenant=st.sampled_from("abc"), tokens=st.sampled_from([1, 40]), blocked=st.sampled_from(["", "a"]))
    def enter_and_dispatch(self, tenant: str, tokens: int, blocked: str) -> None:
        self.enter(tenant, tokens, may_start=tenant not in blocked)
        self.dispatch(blocked)

    @rule(blocked=st.sampled_from(["", "a", "b", "ab"]))
    def dispatch(self, blocked: str) -> None:
        def may_start(ticket: int) -> bool:
            return self.waiting[ticket][0] not in blocked

        for ticket, replica in self.both(lambda queue: list(queue.dispatch(may_start))):
            self.granted[ticket] = (replica, *self.waiting.pop(ticket))

    @rule(data=st.data(), tokens=st.sampled_from([0, 20]))
    def resize_or_leave(self, data: st.DataObject, tokens: int) -> None:
        if not self.waiting:
            return
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        if tokens:
            self.both(lambda queue: queue.resize(ticket, tokens))
            self.waiting[ticket] = (self.waiting[ticket][0], tokens)
        else:
            self.both(lambda queue: queue.leave(ticket))
            del self.waiting[ticket]

    @rule(data=st.data(), is_put_back=st.booleans(), is_settled=st.booleans())
    def release(self, data: st.DataObject, is_put_back: bool, is_settled: bool) -> None:
        if not self.granted:
            return
        ticket = data.draw(st.sampled_from(sorted(self.granted)))
        # What is never settled stands in the order of its grants, so the oldest of its replica goes first.
        replica, tenant, tokens = self.granted[ticket]
        if is_put_back:
            del self.granted[ticket]
            self.both(lambda queue: queue.put_back(ticket, replica, tenant=tenant, tokens=tokens))
            self.waiting[ticket] = (tenant, tokens)
            return
        if not is_settled:
            ticket = next(number for number, (name, _, _) in self.granted.items() if name == replica)
        else:
            self.fair.settle(ticket, output_tokens=3)
        del self.granted[ticket]
        self.both(lambda queue: queue.release(replica))

    @rule()
    def drop_hopeless(self) -> None:
        for ticket in self.both(lambda queue: queue.drop_hopeless()):
            del self.waiting[ticket]

    @invariant()
    def look_the_same(self) -> None:
        self.both(lambda queue: (queue.num_waiting, queue.waiting_tokens, queue.num_running))
        self.both(lambda queue: list(queue.places()))
        self.both(lambda queue: [queue.waiting_of(tenant) for tenant in "abc"])
        self.both(lambda queue: [position(queue, ticket) for ticket in self.waiting])


SideBySide.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSideBySide = SideBySide.TestCase


def test_a_grant_that_nobody_settles_stands_as_it_was_charged() -> None:
    queue: FairQueue[str] = FairQueue(QueueBounds(length=9, tokens=999, tenant_length=9, tenant_tokens=999))
    queue.add("r", capacity=1)
    queue.enter("a", tenant="t", tokens=1, demand=Demand(prompt_tokens=10, expected_output_tokens=5))
    queue.enter("b", tenant="t", tokens=1)
    assert list(queue.dispatch()) == [("a", "r")]
    queue.release("r")
    counter = queue.counters.get("t")
    assert counter is not None
    assert (counter.value, counter.num_granted) == (20.0, 0)
    assert list(queue.dispatch()) == [("b", "r")]
