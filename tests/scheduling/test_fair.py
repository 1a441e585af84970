"""The fair queue, rule by rule."""

from typing import Any

import pytest

from headrace.scheduling.explain import REASONS
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.locality import Warmth
from headrace.scheduling.policy import POLICIES, Demand, QueuePolicy
from headrace.scheduling.queue_bounds import QueueBounds
from tests.scheduling import oracle

MANY = 10**9
BOUNDS = QueueBounds(length=MANY, tokens=MANY, tenant_length=MANY, tenant_tokens=MANY)


def queue_of(capacity: int = 1, **policy: Any) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue(BOUNDS, QueuePolicy(**policy))
    queue.add("r", capacity=capacity)
    return queue


def enter(queue: FairQueue[str], ticket: str, *, now_us: int = 0, **demand: Any) -> None:
    """The ticket's first letter is its tenant."""
    demand.setdefault("prompt_tokens", 10)
    queue.enter(ticket, tenant=ticket[0], tokens=1, demand=Demand(**demand), now_us=now_us)


def serve(queue: FairQueue[str], count: int, *, now_us: int = 0) -> list[str]:
    """Grant one after the other, each ended as it was expected to."""
    order = []
    for _ in range(count):
        for ticket, replica in list(queue.dispatch(now_us=now_us)):
            order.append(ticket)
            queue.settle(ticket, output_tokens=0)
            queue.release(replica)
    return order


def value(queue: FairQueue[str], tenant: str) -> float:
    counter = queue.counters.get(tenant)
    assert counter is not None
    return counter.value


def test_a_flood_does_not_go_before_one_request_of_another() -> None:
    queue = queue_of()
    for number in range(5):
        enter(queue, f"a{number}")
    enter(queue, "b0")
    assert serve(queue, 6) == ["a0", "b0", "a1", "a2", "a3", "a4"]


def test_weights_count() -> None:
    queue = queue_of()
    for number in range(8):
        enter(queue, f"a{number}", weight=3.0)
        enter(queue, f"b{number}")
    served = "".join(ticket[0] for ticket in serve(queue, 8))
    assert (served.count("a"), served.count("b")) == (6, 2)


def test_output_costs_more_than_input_and_a_cached_prompt_less() -> None:
    queue = queue_of(capacity=3)
    enter(queue, "a", prompt_tokens=10, expected_output_tokens=5)
    enter(queue, "b", prompt_tokens=10, cached_tokens=10)
    list(queue.dispatch())
    assert (value(queue, "a"), value(queue, "b")) == (20.0, 1.0)


def test_the_real_answer_corrects_the_charge_and_more_than_expected_counts_at_once() -> None:
    queue = queue_of(capacity=3)
    enter(queue, "a", prompt_tokens=10, expected_output_tokens=100)
    list(queue.dispatch())
    queue.progress("a", 50)
    assert value(queue, "a") == 210.0
    queue.progress("a", 120)
    assert value(queue, "a") == 250.0
    enter(queue, "a2")
    queue.settle("a", output_tokens=3, prompt_tokens=8)
    assert value(queue, "a") == 14.0
    queue.settle("a", output_tokens=50)  # it has ended already
    assert value(queue, "a") == 14.0


def test_a_late_record_is_charged_even_to_a_tenant_that_was_forgotten() -> None:
    queue = queue_of(capacity=3)
    queue.settle_late("a", cost=30.0, weight=2.0)
    assert value(queue, "a") == 15.0
    assert queue.counters.num_idle == 1


def test_put_back_takes_the_charge_back_and_is_next() -> None:
    queue = queue_of(capacity=2)
    enter(queue, "a0", expected_output_tokens=100)
    enter(queue, "a1")
    enter(queue, "b0")
    assert [ticket for ticket, _ in queue.dispatch()] == ["a0", "b0"]
    queue.put_back("a0", "r", tenant="a", tokens=1)
    assert value(queue, "a") == 0.0
    assert (oracle.position(queue, "a0"), oracle.position(queue, "a1")) == (1, 2)


def test_a_preempted_request_pays_for_what_it_had_and_not_twice() -> None:
    queue = queue_of()
    enter(queue, "a0", expected_output_tokens=100)
    list(queue.dispatch())
    enter(queue, "b0")
    enter(queue, "a1")
    queue.preempted("a0", "r", tokens=1, output_tokens=30, in_favour_of="b0")
    assert value(queue, "a") == 70.0
    assert [ticket for ticket, _ in queue.dispatch()] == ["b0"]
    queue.settle("b0", output_tokens=0)
    queue.release("r")
    assert [ticket for ticket, _ in queue.dispatch()] == ["a0"]
    assert value(queue, "a") == 210.0


def test_batch_waits_but_keeps_its_floor() -> None:
    queue = queue_of(batch_floor=0.25)
    for number in range(12):
        enter(queue, f"a{number}")
    for number in range(3):
        enter(queue, f"b{number}", service_class="batch")
    served = "".join(ticket[0] for ticket in serve(queue, 12))
    assert served[0] == "a"
    assert served.count("b") == 3


def test_without_a_floor_batch_still_ages() -> None:
    queue = queue_of(batch_floor=0.0, aging_us=1000)
    enter(queue, "b0", service_class="batch", now_us=1)
    for number in range(4):
        enter(queue, f"a{number}")
    assert serve(queue, 2, now_us=1000) == ["a0", "a1"]
    assert serve(queue, 1, now_us=1001) == ["b0"]


def test_batch_runs_when_nobody_else_wants_the_place() -> None:
    queue = queue_of(batch_floor=0.0)
    enter(queue, "b0", service_class="batch")
    assert serve(queue, 1) == ["b0"]


def test_priority_orders_all_but_waiting_counts_too() -> None:
    queue = queue_of(name="priority", priority_aging_us=100)
    enter(queue, "a0", priority=0, now_us=0)
    enter(queue, "b0", priority=1, now_us=50)
    enter(queue, "c0", priority=2, now_us=201)
    assert serve(queue, 3) == ["b0", "a0", "c0"]


def test_under_fair_priority_orders_a_tenants_own_requests_only() -> None:
    queue = queue_of()
    enter(queue, "a0")
    enter(queue, "a1", priority=5)
    enter(queue, "b0")
    assert serve(queue, 3) == ["a1", "b0", "a0"]


def test_shortest_remaining_but_waiting_counts_too() -> None:
    queue = queue_of(name="shortest-remaining", token_aging_us=10)
    enter(queue, "a0", expected_output_tokens=100, now_us=0)
    enter(queue, "b0", expected_output_tokens=10, now_us=100)
    enter(queue, "c0", expected_output_tokens=1, now_us=1000)
    assert serve(queue, 3) == ["b0", "a0", "c0"]


def test_own_requests_keep_their_order_whatever_their_size() -> None:
    queue = queue_of(reserve_output_tokens_max=10)
    for number in range(6):
        enter(queue, f"a{number}", expected_output_tokens=0 if number % 2 else 100)
    assert serve(queue, 6) == [f"a{number}" for number in range(6)]


def test_one_long_prompt_at_a_time_is_read_in() -> None:
    queue = queue_of(capacity=4, long_prompt_tokens=100)
    enter(queue, "a0", prompt_tokens=500)
    enter(queue, "a1", prompt_tokens=500)
    enter(queue, "b0")
    assert [ticket for ticket, _ in queue.dispatch()] == ["a0", "b0"]
    explanation = queue.why("a1", None, number_max=9)
    assert explanation is not None
    assert explanation.reason == "long_prompts"
    queue.progress("a0", 0)
    assert [ticket for ticket, _ in queue.dispatch()] == ["a1"]


def test_the_reserve_is_for_short_interactive_requests() -> None:
    queue = queue_of(capacity=3, batch_floor=0.0, interactive_reserve=1, reserve_output_tokens_max=50)
    for number in range(3):
        enter(queue, f"a{number}", expected_output_tokens=500)
    enter(queue, "c0", service_class="batch")
    assert [ticket for ticket, _ in queue.dispatch()] == ["a0", "a1"]
    explanation = queue.why("c0", None, number_max=9)
    assert explanation is not None
    assert explanation.reason == "kept_for_short"
    enter(queue, "b0", expected_output_tokens=20)
    assert [ticket for ticket, _ in queue.dispatch()] == ["b0"]


def test_a_reserve_of_everything_leaves_one_place_for_all() -> None:
    queue = queue_of(capacity=2, interactive_reserve=9)
    enter(queue, "a0", expected_output_tokens=5000)
    enter(queue, "a1", expected_output_tokens=5000)
    assert [ticket for ticket, _ in queue.dispatch()] == ["a0"]


def test_a_changed_capacity_changes_what_the_reserve_leaves() -> None:
    queue = queue_of(capacity=1, interactive_reserve=1)
    for number in range(3):
        enter(queue, f"b{number}", service_class="batch")
    assert [ticket for ticket, _ in queue.dispatch()] == ["b0"]
    queue.set_capacity("r", 3)
    assert [ticket for ticket, _ in queue.dispatch()] == ["b1"]
    enter(queue, "a", expected_output_tokens=10)
    assert [ticket for ticket, _ in queue.dispatch()] == ["a"]
    queue.set_capacity("r", 2)
    explanation = queue.why("b2", None, number_max=9)
    assert explanation is not None
    assert explanation.reason == "replicas_full"


def test_a_warm_prefix_goes_first_within_the_quantum_and_to_its_replica() -> None:
    warm = {"b0": Warmth({"s": 8})}
    queue: FairQueue[str] = FairQueue(BOUNDS, QueuePolicy(quantum=50.0), warm_on=warm.get)
    queue.add("r", capacity=2)
    queue.add("s", capacity=1)
    enter(queue, "a0")
    enter(queue, "b0")
    assert next(queue.dispatch()) == ("b0", "s")
    assert value(queue, "b") == pytest.approx(2.8)
    enter(queue, "c0")
    enter(queue, "d0", prompt_tokens=0)
    queue.set_policy(QueuePolicy(quantum=0.0))
    warm["d0"] = Warmth({"s": 8})
    assert list(queue.dispatch()) == [("a0", "r"), ("c0", "r")]  # cold, but first


def test_what_does_not_fit_into_memory_yet_is_not_passed() -> None:
    queue: FairQueue[str] = FairQueue(BOUNDS)
    queue.add("r", capacity=4, kv_tokens=100)
    for ticket, tokens in (("a", 60), ("b", 60), ("c", 10)):
        queue.enter(ticket, tenant=ticket, tokens=tokens)
    assert list(queue.dispatch()) == [("a", "r")]
    explanation = queue.why("b", None, number_max=9)
    assert explanation is not None
    assert explanation.reason == "memory"
    queue.resize("a", 30)
    assert [ticket for ticket, _ in queue.dispatch()] == ["b", "c"]


def test_equal_gates_are_asked_once() -> None:
    queue = queue_of()
    for number in range(100):
        enter(queue, f"a{number}", gate="key")
    enter(queue, "b0", gate="key")
    asked = []

    def may_start(ticket: str) -> bool:
        asked.append(ticket)
        return ticket[0] != "a"

    assert [ticket for ticket, _ in queue.dispatch(may_start)] == ["b0"]
    assert len(asked) <= 3


def test_the_policy_changes_on_a_live_queue() -> None:
    queue = queue_of(name="fifo")
    for number in range(3):
        enter(queue, f"a{number}", expected_output_tokens=10 - number)
    enter(queue, "b0", priority=7)
    for name in POLICIES:
        queue.set_policy(QueuePolicy(name=name))
        assert sorted(oracle.expected_order(queue)) == ["a0", "a1", "a2", "b0"]
    queue.set_policy(QueuePolicy(name="priority"))
    assert oracle.position(queue, "b0") == 1
    queue.set_policy(QueuePolicy(name="fair"))
    assert serve(queue, 4) == ["b0", "a0", "a1", "a2"]


def test_everybody_is_told_position_share_and_reason() -> None:
    queue = queue_of()
    enter(queue, "a0", weight=3.0, now_us=5)
    enter(queue, "a1", weight=3.0, now_us=5)
    enter(queue, "b0", now_us=5)
    queue.advance(105)
    explanation = queue.why("a1", None, number_max=9)
    assert explanation is not None
    assert (explanation.position, explanation.tenant_share, explanation.waited_us) == (3, 0.75, 100)
    reasons = [one.reason for ticket in ("a0", "a1") if (one := queue.why(ticket, None, number_max=9))]
    assert reasons == ["next", "behind_others"]
    blocked = queue.why("a0", lambda ticket: False, number_max=9)
    assert blocked is not None
    assert blocked.reason == "own_limit"
    list(queue.dispatch())
    full = queue.why("b0", None, number_max=9)
    assert full is not None
    assert full.reason == "replicas_full"
    assert queue.why("a0", None, number_max=9) is None
    queue.give_up("r")
    alone = queue.why("b0", None, number_max=9)
    assert alone is not None
    assert alone.reason == "no_replica"
    assert {"no_replica", "replicas_full", "own_limit", "next"} <= set(REASONS)


def test_the_expected_order_is_the_order_that_comes() -> None:
    queue = queue_of(batch_floor=0.3)
    for number in range(40):
        enter(
            queue,
            f"{'abcd'[number * 7 % 4]}{number}",
            prompt_tokens=number * 13 % 50,
            expected_output_tokens=number * 5 % 30,
            weight=float(1 + number * 7 % 4),
            service_class="batch" if number % 3 == 0 else "interactive",
            priority=number % 2,
        )
    expected = list(oracle.expected_order(queue))
    order = []
    for _ in range(40):
        for ticket, replica in list(queue.dispatch()):
            order.append(ticket)
            queue.release(replica)  # never settled: it stands as charged
    assert order == expected


def test_forgetting_idle_tenants_forgives_nobody() -> None:
    queue = queue_of(capacity=100, idle_tenants_max=3)
    for number, tenant in enumerate("abcdefgh", 1):
        enter(queue, tenant, prompt_tokens=number * 10)
    granted = list(queue.dispatch())
    for ticket, replica in granted:
        queue.settle(ticket, output_tokens=0)
        queue.release(replica)
    assert queue.counters.num_idle == 3
    assert queue.counters.base == 50.0
    enter(queue, "a2")
    assert value(queue, "a") == 50.0
    assert value(queue, "h") == 80.0
