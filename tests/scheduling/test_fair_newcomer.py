"""A request that finds nobody waiting takes a short way through the queue. It must not be told from the long one."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.fair import FairQueue
from headrace.scheduling.locality import Warmth
from headrace.scheduling.policy import POLICIES, Demand, QueuePolicy
from headrace.scheduling.queue_bounds import QueueBounds, QueueFull
from tests.scheduling import oracle

TENANTS = "abcd"
BOUNDS = QueueBounds(length=3, tokens=100, tenant_length=2, tenant_tokens=80)


def random_policy(draw: random.Random) -> QueuePolicy:
    return QueuePolicy(
        name=draw.choice((*POLICIES, "fair", "fair")),
        batch_floor=0.3,
        aging_us=draw.choice((5, 1000)),
        quantum=draw.choice((0.0, 100.0)),
        long_prompt_tokens=draw.choice((None, 50)),
        interactive_reserve=draw.choice((0, 0, 1)),
        idle_tenants_max=draw.choice((0, 2, 100)),
    )


class TwoWays:
    """Two queues that get the same calls. In one of them every newcomer is put among those who wait."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        policy = random_policy(self.draw)
        self.tenant: dict[int, str] = {}
        warm_on = (
            (lambda ticket: Warmth({"s": 5}) if ticket % 3 == 0 else None)
            if self.draw.random() < 0.3
            else None
        )
        self.short: FairQueue[int] = FairQueue(BOUNDS, policy, warm_on=warm_on)
        self.long: FairQueue[int] = FairQueue(BOUNDS, policy, warm_on=warm_on)
        for queue in (self.short, self.long):
            queue.add("r", capacity=2)
            queue.add("s", capacity=1, kv_tokens=60)
        self.granted: dict[int, str] = {}
        self.now_us = 0
        self.blocked = ""

    def both(self, name: str, *arguments: Any, **named: Any) -> Any:
        answers: list[Any] = []
        for queue in (self.short, self.long):
            try:
                answer = getattr(queue, name)(*arguments, **named)
                answers.append(list(answer) if name == "dispatch" else answer)
            except QueueFull as full:
                answers.append((full.level, full.bound, full.used))
        assert answers[0] == answers[1], (name, arguments, answers)
        return answers[0]

    def may_start(self, ticket: int) -> bool:
        return self.tenant[ticket] not in self.blocked

    def enter(self) -> None:
        draw, ticket = self.draw, len(self.tenant)
        self.tenant[ticket] = draw.choice(TENANTS)
        tokens = draw.randint(1, 60)
        demand = Demand(
            prompt_tokens=tokens,
            expected_output_tokens=draw.choice((0, 5, 300)),
            weight=1.0 + TENANTS.index(self.tenant[ticket]),
            service_class=draw.choice(("interactive", "batch")),
        )
        self.both(
            "enter",
            ticket,
            tenant=self.tenant[ticket],
            tokens=tokens,
            may_start=self.may_start,
            demand=demand,
            now_us=self.now_us,
        )
        job = self.long._jobs.get(ticket)
        if job is not None:
            self.long.resize(ticket, tokens)  # where to, it has to be put where it can be counted
            assert self.long._newcomer is None
            assert job.flow is not None

    def dispatch(self) -> None:
        self.blocked = self.draw.choice(("", "", "a", "bcd"))
        self.granted.update(self.both("dispatch", self.may_start, now_us=self.now_us))

    def end(self) -> None:
        if not self.granted:
            return
        ticket = self.draw.choice(sorted(self.granted))
        replica = self.granted.pop(ticket)
        if self.draw.random() < 0.2:
            self.both("put_back", ticket, replica, tenant=self.tenant[ticket], tokens=7)
            return
        self.both("settle", ticket, output_tokens=self.draw.choice((0, 5, 80)))
        self.both("release", replica)

    def others(self) -> None:
        draw = self.draw
        what = draw.randrange(4)
        if what == 0:
            self.both("set_policy", random_policy(draw))
        elif what == 1:
            self.both("leave", draw.choice([*oracle.expected_order(self.short), -1]))
        elif what == 2:
            self.both("set_capacity", "r", draw.randint(1, 3))
        else:
            self.now_us += draw.choice((1, 10, 2000))

    def look(self) -> None:
        assert self.picture(self.short) == self.picture(self.long)

    def picture(self, queue: FairQueue[int]) -> Any:
        """All that can be seen from outside, what everybody owes, and what later decisions go by."""
        counters = [(one, queue.counters.get(one)) for one in TENANTS]
        return (
            (queue.num_waiting, queue.waiting_tokens, queue.num_running, list(queue.places())),
            list(oracle.expected_order(queue)),
            [oracle.explain(queue, ticket, self.may_start) for ticket in self.tenant],
            [queue.waiting_of(tenant) for tenant in TENANTS],
            [(one, c and (c.value, c.weight, c.num_waiting, c.num_granted)) for one, c in counters],
            (queue.counters.base, len(queue.counters), queue.counters.num_idle, queue._waiting_room.owed),
            [(ticket, job.place, job.service_class, job.charged) for ticket, job in queue._jobs.items()],
        )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_the_short_way_decides_as_the_long_one(seed: int) -> None:
    ways = TwoWays(seed)
    for _ in range(100):
        step = ways.draw.random()
        ways.now_us += ways.draw.choice((0, 1, 4))
        if step < 0.4:
            ways.enter()
        if 0.2 < step < 0.6:
            ways.dispatch()
        elif 0.6 <= step < 0.85:
            ways.end()
        elif step >= 0.85:
            ways.others()
        ways.look()
