"""What those who wait are told: the order without looking at everybody, positions, shares, reasons."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling import expected_order
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.lazy_heap import LazyHeap
from headrace.scheduling.policy import POLICIES, Demand, PolicyName, QueuePolicy
from tests.scheduling.test_fair import BOUNDS, enter, queue_of
from tests.scheduling.test_fair_parts import Item


def order(queue: FairQueue[str], number: int) -> list[str]:
    return [one.ticket for one in queue.in_expected_order(None, number_max=number)]


def mixed(queue: FairQueue[str], number: int) -> None:
    """So many requests of four tenants, of all classes, sizes, priorities and gates."""
    for one in range(number):
        enter(
            queue,
            f"{'abcd'[one * 7 % 4]}{one}",
            now_us=one // 3,
            prompt_tokens=one * 13 % 50,
            expected_output_tokens=one * 5 % 30,
            weight=float(1 + one * 7 % 4),
            service_class="batch" if one % 3 == 0 else "interactive",
            priority=one % 2,
            gate=one % 5 or None,
        )


def served(queue: FairQueue[str]) -> Iterator[str]:
    """One after the other as they are granted; they stand as they were charged."""
    while queue.num_waiting:
        for ticket, replica in list(queue.dispatch()):
            yield ticket
            queue.release(replica)


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_in_order_are_those_who_come_at_any_time(name: PolicyName) -> None:
    queue = queue_of(name=name, batch_floor=0.3, long_prompt_tokens=40, long_prompts_max=99)
    mixed(queue, 60)
    expected = order(queue, 60)
    assert len(expected) == 60
    for place, ticket in enumerate(served(queue)):
        assert ticket == expected[place]
        # Also in the middle, where batch is owed something or is ahead of its floor.
        assert order(queue, 7) == expected[place + 1 : place + 8]


def test_what_was_put_back_is_first_and_its_tenant_is_charged_for_it() -> None:
    queue = queue_of()
    for ticket in ("a0", "a1", "b0"):
        enter(queue, ticket)
    (granted,) = queue.dispatch()
    queue.put_back(granted[0], "r", tenant="a", tokens=1)
    assert order(queue, 9) == ["a0", "b0", "a1"]
    front = queue.why("a0", None, number_max=1)
    assert front is not None
    assert (front.position, front.is_exact) == (1, True)


def test_behind_the_first_ones_a_position_is_a_lower_bound() -> None:
    queue = queue_of()
    for number in range(50):
        enter(queue, f"a{number}")
    enter(queue, "b0", weight=3.0)
    newcomer, last, early = (queue.why(one, None, number_max=8) for one in ("b0", "a49", "a2"))
    assert newcomer is not None and last is not None and early is not None
    assert (newcomer.position, newcomer.is_exact, newcomer.tenant_share) == (2, True, 0.75)
    assert (last.position, last.is_exact) == (9, False)
    assert (early.position, early.is_exact) == (4, True)


def test_the_newest_of_a_flood_is_told_without_a_look_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_of()
    for number in range(50):
        enter(queue, f"a{number}")
    monkeypatch.setattr(expected_order, "_fair", None)  # nothing can be sought any more
    told = queue.why("a49", None, number_max=8)
    assert told is not None
    assert (told.position, told.is_exact) == (9, False)
    with pytest.raises(TypeError):
        queue.why("a3", None, number_max=8)


@pytest.mark.parametrize("fields", [{"priority": 1}, {"service_class": "interactive"}])
def test_a_newcomer_that_passes_its_own_is_not_told_that_it_is_behind_them(fields: dict[str, object]) -> None:
    queue = queue_of()
    for number in range(20):
        enter(queue, f"a{number}", service_class="batch" if "service_class" in fields else "interactive")
    enter(queue, "a_", **fields)
    told = queue.why("a_", None, number_max=4)
    assert told is not None
    assert (told.position, told.is_exact) == (1, True)


def test_the_newest_that_somebody_was_stopped_for_is_first() -> None:
    queue = queue_of()
    for number in range(9):
        enter(queue, f"a{number}")
    assert [ticket for ticket, _ in queue.dispatch()] == ["a0"]
    enter(queue, "a_")
    queue.preempted("a0", "r", tokens=1, output_tokens=1, in_favour_of="a_")
    told = queue.why("a_", None, number_max=4)
    assert told is not None
    assert (told.position, told.is_exact) == (1, True)


def test_looking_stays_bounded_where_most_have_given_up() -> None:
    queue = queue_of()
    for number in range(2_000):
        enter(queue, f"a{number}")
    for number in range(1, 900):
        queue.leave(f"a{number}")
    found = order(queue, 4)
    assert found == ["a0", "a900", "a901", "a902"][: len(found)]
    told = queue.why("a1999", None, number_max=4)
    assert told is not None
    assert not told.is_exact


def test_a_tenants_own_are_listed_with_those_that_have_exact_positions_first() -> None:
    queue = queue_of()
    for number in range(12):
        enter(queue, f"a{number}")
    for number in range(3):
        enter(queue, f"b{number}")
    own = queue.waiting_requests_of("a", None, number_max=6, looked_at_max=5)
    assert [(one.ticket, one.explanation.position, one.explanation.is_exact) for one in own] == [
        ("a0", 1, True), ("a1", 3, True), ("a2", 5, True), ("a3", 6, False), ("a4", 6, False), ("a5", 6, False),
    ]  # fmt: skip
    assert not queue.waiting_requests_of("z", None, number_max=6, looked_at_max=5)


def test_reasons_that_only_replicas_know() -> None:
    homes: dict[str, str] = {}
    queue: FairQueue[str] = FairQueue(BOUNDS, fits=lambda ticket, name: homes.get(ticket, name) == name)
    for name in "rs":
        queue.add(name, capacity=1)

    def reason(ticket: str) -> str:
        told = queue.why(ticket, None, number_max=4)
        assert told is not None
        return told.reason

    enter(queue, "a0")
    enter(queue, "a1")
    assert len(list(queue.dispatch())) == 2
    enter(queue, "b0")
    assert reason("b0") == "replicas_full"
    queue.preempted("a0", "r", tokens=1, output_tokens=3, in_favour_of="b0")
    homes["a0"] = "r"
    assert [ticket for ticket, _ in queue.dispatch()] == ["b0"]
    assert reason("a0") == "preempted"
    queue.settle("a1", output_tokens=1)
    queue.release("s")
    assert reason("a0") == "preempted", "a place is free, but not where it was"
    homes["c0"] = "r"
    enter(queue, "c0")
    assert reason("c0") == "set_aside"
    queue.pause("s", is_paused=True)
    assert reason("c0") == "replica_paused"


def test_parts_say_who_has_what() -> None:
    queue = queue_of()
    for ticket in ("a0", "a1"):
        enter(queue, ticket, weight=2.0)
    for number in range(3):
        enter(queue, f"b{number}")
    list(queue.dispatch())
    first, second = queue.parts(9)
    assert (first.flow, first.num_waiting, first.num_granted, first.weight, first.lead) == (
        "b",
        3,
        0,
        1.0,
        0.0,
    )
    assert (second.flow, second.num_waiting, second.num_granted, second.lead) == ("a", 1, 1, 5.0)
    assert (first.share, second.share) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert [one.flow for one in queue.parts(1)] == ["b"]
    assert queue.share_of("new", 3.0) == 0.5, "what it would have if it waited"
    away = queue.part_of("new", 3.0)
    assert (away.num_waiting, away.share, away.weight) == (0, 0.0, 3.0)
    assert (
        queue.num_tenants_waiting,
        queue.num_waiting_of("interactive"),
        queue.num_waiting_of("batch"),
    ) == (2, 4, 0)


def test_with_many_tenants_the_weights_are_not_counted_for_every_request() -> None:
    queue = queue_of()
    for number in range(200):
        queue.enter(number, tenant=f"t{number}", tokens=1, demand=Demand(weight=1.0), now_us=0)  # type: ignore[arg-type]
    assert queue.share_of("t0", 1.0) == 1 / 200
    queue.enter("again", tenant="t0", tokens=1, demand=Demand(weight=9.0), now_us=10)
    assert queue.share_of("t0", 9.0) == 9 / 200, "the sum is a little old"
    queue.advance(200_000)
    assert queue.share_of("t0", 9.0) == 9 / 208


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["set", "discard", "take"]), st.integers(0, 12), st.integers(0, 5)))
)
def test_a_heap_is_read_in_order(steps: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[Item] = LazyHeap()
    items = [Item(name) for name in range(13)]
    for step, name, rank in steps:
        item = items[name]
        if step == "set":
            heap.set(item, rank)
        elif step == "discard":
            heap.discard(item)
        else:
            heap.take()
    seen = [entry[3] for entry in heap.in_order() if entry is not None]
    taken = []
    while (entry := heap.take()) is not None:
        taken.append(entry[3])
    assert seen == taken


def test_costs_of_what_runs_are_as_far_as_it_is() -> None:
    queue = queue_of(capacity=3)
    for ticket in ("a0", "a1", "b0"):
        enter(queue, ticket, prompt_tokens=10, expected_output_tokens=100)
    list(queue.dispatch())
    assert queue.costs_running() == {"a": 0.0, "b": 0.0}, "no prompt has been read in"
    queue.progress("a0", 4)
    queue.progress("b0", 0)
    assert queue.costs_running() == {"a": 18.0, "b": 10.0}


def test_a_policys_name_is_not_needed_for_a_lower_bound() -> None:
    queue = FairQueue[str](BOUNDS, QueuePolicy(name="shortest-remaining"))
    queue.add("r", capacity=1)
    for number in range(20):
        enter(queue, f"a{number}", expected_output_tokens=500)
    enter(queue, "a_", expected_output_tokens=1)
    told = queue.why("a_", None, number_max=4)
    assert told is not None
    assert (told.position, told.is_exact) == (1, True)
