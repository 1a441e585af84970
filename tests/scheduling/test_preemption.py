"""Who is stopped for whom, rule by rule."""

from typing import Any

import pytest

from headrace.scheduling.counters import TenantCounter
from headrace.scheduling.fair import ASKING_TENANTS_MAX, FairQueue
from headrace.scheduling.jobs import Job
from headrace.scheduling.policy import POLICIES, Demand, QueuePolicy
from headrace.scheduling.preemption import RunningShares
from headrace.scheduling.queue_bounds import QueueBounds
from tests.scheduling import oracle

MANY = 10**9
BOUNDS = QueueBounds(length=MANY, tokens=MANY, tenant_length=MANY, tenant_tokens=MANY)


def queue_of(capacity: int, **policy: Any) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue(BOUNDS, QueuePolicy(**policy))
    queue.add("r", capacity=capacity)
    return queue


def enter(queue: FairQueue[str], *tickets: str, now_us: int = 0, tokens: int = 1, **demand: Any) -> None:
    """A ticket's first letter is its tenant. Each costs 200 unless said."""
    demand.setdefault("expected_output_tokens", 100)
    for ticket in tickets:
        queue.enter(ticket, tenant=ticket[0], tokens=tokens, demand=Demand(**demand), now_us=now_us)


def granted(queue: FairQueue[str]) -> list[str]:
    return [ticket for ticket, _ in queue.dispatch()]


def stop(queue: FairQueue[str], victim: str, favoured: str) -> None:
    queue.preempted(victim, "r", tokens=1, output_tokens=0, in_favour_of=favoured)


def test_a_flood_that_waits_itself_makes_place_for_another() -> None:
    queue = queue_of(4)
    enter(queue, *(f"a{number}" for number in range(100)))
    assert granted(queue) == ["a0", "a1", "a2", "a3"]
    enter(queue, "b0")
    assert next(oracle.expected_order(queue)) == "a4", "equal counters, and it was there first"
    assert queue.preemption() == ("a3", "b0")
    stop(queue, "a3", "b0")
    assert granted(queue) == ["b0"]
    assert queue.preemption() is None
    queue.settle("b0", output_tokens=100)
    queue.release("r")
    assert granted(queue) == ["a3"], "before the rest of its tenant"


def test_the_newest_of_the_tenant_with_most_running_is_stopped() -> None:
    queue = queue_of(4)
    enter(queue, "a0", "a1", "c0", "a2", "a3")
    assert granted(queue) == ["a0", "c0", "a1", "a2"]
    enter(queue, "b0")
    assert queue.preemption() == ("a2", "b0")
    stop(queue, "a2", "b0")
    assert granted(queue) == ["b0"]
    assert queue.preemption() is None, "nobody has more running than it would have"


def test_nobodys_only_request_is_stopped_and_nobody_is_asked() -> None:
    queue = queue_of(2)
    enter(queue, "a0", "b0", "a1", "b1")
    assert granted(queue) == ["a0", "b0"]
    enter(queue, "c0", expected_output_tokens=0)
    asked: list[str] = []
    assert queue.preemption(lambda ticket: not asked.append(ticket)) is None
    assert asked == []


def test_its_tenant_must_have_more_left_than_the_other_would_have() -> None:
    queue = queue_of(2, quantum=10.0)
    enter(queue, "a0", "a1")
    granted(queue)
    enter(queue, "b0", expected_output_tokens=96)
    assert queue.preemption() is None, "200 are left, 192 and the quantum are more"
    enter(queue, "c0", expected_output_tokens=95)
    assert queue.preemption() == ("a1", "c0")


def test_twice_the_weight_may_have_twice_as_much_running() -> None:
    for weight, victim in ((1.0, "a2"), (2.0, None)):
        queue = queue_of(3)
        enter(queue, "a0", "a1", "a2", weight=weight)
        granted(queue)
        enter(queue, "b0", expected_output_tokens=150)
        assert queue.preemption() == (victim and (victim, "b0"))
        enter(queue, "c0", weight=2.0, expected_output_tokens=150)
        assert queue.preemption() == ((victim or "a2"), "b0" if victim else "c0")


def test_a_longer_answer_than_expected_counts() -> None:
    queue = queue_of(2)
    enter(queue, "a0", "a1", expected_output_tokens=10)
    granted(queue)
    enter(queue, "b0", expected_output_tokens=50)
    assert queue.preemption() is None
    queue.progress("a0", 50)
    assert queue.preemption() == ("a1", "b0")


def test_only_interactive_requests_ask_and_those_that_have_aged() -> None:
    queue = queue_of(2, aging_us=1000)
    enter(queue, "a0", "a1")
    granted(queue)
    enter(queue, "b0", service_class="batch", expected_output_tokens=0)
    assert queue.preemption() is None
    queue.advance(1000)
    assert queue.preemption() == ("a1", "b0")


def test_a_long_prompt_does_not_ask() -> None:
    queue = queue_of(3, long_prompt_tokens=100)
    enter(queue, "a0", "a1", "a2")
    granted(queue)
    enter(queue, "b0", prompt_tokens=101, expected_output_tokens=0)
    assert queue.preemption() is None
    enter(queue, "c0", prompt_tokens=100, expected_output_tokens=0)
    assert queue.preemption() == ("a2", "c0")


def test_only_the_fair_policy_stops_anybody() -> None:
    queue = queue_of(2)
    enter(queue, "a0", "a1")
    granted(queue)
    enter(queue, "b0", expected_output_tokens=0)
    for name in POLICIES:
        queue.set_policy(QueuePolicy(name=name))
        assert (queue.preemption() is not None) == (name == "fair")


def test_who_may_not_start_does_not_ask() -> None:
    queue = queue_of(2)
    enter(queue, "a0", "a1")
    granted(queue)
    enter(queue, "b0", "b1", expected_output_tokens=0)
    assert queue.preemption(lambda ticket: ticket != "b0") == ("a1", "b1")
    assert queue.preemption(lambda ticket: ticket[0] != "b") is None


def test_only_the_first_tenants_are_asked() -> None:
    queue = queue_of(2)
    enter(queue, "a0", "a1")
    granted(queue)
    tenants = [chr(ord("b") + number) for number in range(ASKING_TENANTS_MAX + 1)]
    enter(queue, *(f"{tenant}0" for tenant in tenants))
    asked: list[str] = []

    def may_start(ticket: str) -> bool:
        asked.append(ticket)
        return ticket[0] == tenants[-1]

    assert queue.preemption(may_start) is None
    assert asked == [f"{tenant}0" for tenant in tenants[:-1]]
    assert queue.leave("b0")
    assert queue.preemption(may_start) == ("a1", f"{tenants[-1]}0")


def test_a_request_is_stopped_only_where_that_makes_a_place_for_the_other() -> None:
    queue: FairQueue[str] = FairQueue(
        BOUNDS, may_run=lambda ticket, replica: ticket[0] != "b" or replica == "s"
    )
    queue.add("r", capacity=2)
    queue.add("s", capacity=2)
    enter(queue, "a0", "a1", "a2", "a3")
    where = dict(queue.dispatch())
    enter(queue, "b0")
    (newest,) = (ticket for ticket in ("a2", "a3") if where[ticket] == "s")
    assert queue.preemption() == (newest, "b0")
    queue.set_capacity("s", 1)
    assert queue.preemption() is None, "one may run there, and two do"
    queue.set_capacity("s", 2)
    queue.pause("s", is_paused=True)
    assert queue.preemption() is None, "it is granted nothing for now"
    enter(queue, "c0")
    assert queue.preemption() == (next(ticket for ticket in ("a3", "a2") if where[ticket] == "r"), "c0")


def test_while_the_favoured_one_waits_for_memory_only_it_asks() -> None:
    queue: FairQueue[str] = FairQueue(BOUNDS)
    queue.add("r", capacity=9, kv_tokens=60)
    enter(queue, *(f"a{number}" for number in range(6)), tokens=10)
    assert len(granted(queue)) == 6
    enter(queue, "b0", tokens=20)
    enter(queue, "c0", tokens=10)
    assert queue.preemption() == ("a5", "b0")
    queue.preempted("a5", "r", tokens=10, output_tokens=0, in_favour_of="b0")
    assert granted(queue) == [], "ten tokens are free, it needs twenty"
    assert queue.preemption() == ("a4", "b0")
    queue.preempted("a4", "r", tokens=10, output_tokens=0, in_favour_of="b0")
    assert granted(queue) == ["b0"]


@pytest.mark.parametrize(
    ("quantum", "counter", "charge", "expected"),
    [
        (0.0, 10.0, 20.0, "a2"),
        (0.0, 10.0, 21.0, "b2"),  # it would have more running than `a` would have left, but not than `b`
        (0.0, 10.0, 26.0, None),
        (10.0, 10.0, 10.0, "a2"),
        (11.0, 10.0, 10.0, "b2"),
        (0.0, 32.0, 21.0, "b2"),
        (0.0, 32.5, 21.0, None),  # `b` is behind it, by more than the one that would be stopped
        (0.0, 62.0, 10.0, "a2"),
        (0.0, 62.5, 10.0, None),  # it had more than anybody, so it can wait
    ],
)
def test_the_victim(quantum: float, counter: float, charge: float, expected: str | None) -> None:
    values = {"a": 50.0, "b": 30.0, "c": 99.0, "w": counter}
    a, b, c, w = (TenantCounter(name, value, 1.0) for name, value in values.items())

    def job(tenant: TenantCounter, order: int, charged: float, weight: float = 1.0) -> Job[str]:
        """Charged by weight."""
        one = Job(f"{tenant.tenant}{order}", tenant.tenant, tenant, 1, Demand(), order, 0, weight)
        one.charged, one.grant_order = charged * weight, order
        return one

    running = [job(b, 1, 25), job(a, 1, 20, weight=5.0), job(c, 3, 90), job(a, 2, 12), job(b, 2, 2)]
    shares = RunningShares(running)
    waiting = job(w, 9, 0)
    terms: Any = {"charge": charge, "quantum": quantum, "can_replace": lambda victim: True}
    chosen = shares.victim(waiting, **terms)
    assert (chosen and chosen.ticket) == expected
    assert shares.victim(waiting, **{**terms, "can_replace": lambda victim: False}) is None
    own = RunningShares([job(w, 1, 20), job(w, 2, 20)])
    assert own.victim(waiting, **{**terms, "charge": 0.0, "quantum": 0.0}) is None
