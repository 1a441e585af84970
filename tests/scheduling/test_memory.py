"""Who begins, who has to stop and how many run when KV cells are short."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.memory import (
    GROWTH_TOKENS,
    QUIET_STEPS,
    RunningMax,
    choose_victim,
    has_room,
    outstanding,
)


class One(msgspec.Struct):
    tenant_id: str
    number: int
    held: int = 0
    outstanding: int = 1
    growth_max: int = 100


def test_a_newcomer_needs_room_for_its_prompt_and_for_the_next_tokens_of_all() -> None:
    newcomer = One("a", 3, outstanding=50)
    running = [One("a", 1, held=80), One("b", 2, held=10, growth_max=3)]
    needed = 50 + GROWTH_TOKENS + 1 + GROWTH_TOKENS + 1 + 3
    assert has_room(newcomer, running, free=needed)
    assert not has_room(newcomer, running, free=needed - 1)
    assert has_room(newcomer, running, free=needed - 40, shared=40)
    assert not has_room(newcomer, running, free=needed - 41, shared=40)


def test_one_alone_needs_what_it_can_come_to() -> None:
    assert has_room(One("a", 0, outstanding=50, growth_max=9), [], free=59)
    assert not has_room(One("a", 0, outstanding=50, growth_max=9), [], free=58)


def test_the_newest_of_the_tenant_that_holds_most_is_preempted() -> None:
    running = [One("a", 0, held=50), One("b", 1, held=60), One("b", 2, held=30), One("a", 3, held=30)]
    assert choose_victim(running) is running[2]
    running[0].held = 70
    assert choose_victim(running) is running[3]


def test_of_tenants_that_hold_the_same_the_newest_is() -> None:
    running = [One("a", 0, held=10), One("b", 1, held=20), One("c", 2, held=20)]
    assert choose_victim(running) is running[2]


def test_the_oldest_is_spared_though_its_tenant_holds_most() -> None:
    running = [One("a", 0, held=900), One("b", 1, held=5)]
    assert choose_victim(running) is running[1]
    assert choose_victim(running[:1]) is None
    assert choose_victim([]) is None


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(1, 200)), min_size=1, max_size=8
    )
)
def test_as_many_leave_as_have_to_and_the_oldest_always_stays(drawn: list[tuple[str, int, int]]) -> None:
    running = [One(tenant, at, held, needed) for at, (tenant, held, needed) in enumerate(drawn)]
    oldest = running[0]
    total = oldest.held + oldest.outstanding
    while sum(one.held for one in running) + outstanding(running) > total:
        victim = choose_victim(running)
        assert victim is not None, "alone it fits"
        rest = [one for one in running if one is not oldest]
        held = {tenant: sum(one.held for one in running if one.tenant_id == tenant) for tenant in "abc"}
        assert held[victim.tenant_id] == max(held[one.tenant_id] for one in rest)
        assert victim.number == max(one.number for one in rest if one.tenant_id == victim.tenant_id)
        running.remove(victim)
    assert oldest in running


def test_fewer_run_after_each_preemption_and_one_more_after_quiet_steps() -> None:
    most = RunningMax(8)
    assert most.value == 8
    most.preempted(4)
    assert most.value == 4
    most.preempted(4)
    assert most.value == 3, "two in one step count twice"
    for _ in range(QUIET_STEPS - 1):
        most.stepped()
    assert most.value == 3
    most.stepped()
    assert most.value == 4
    most.preempted(3)
    for _ in range(QUIET_STEPS - 1):
        most.stepped()
    assert most.value == 3, "quiet is counted from the last preemption"
    for _ in range(QUIET_STEPS * 5):
        most.stepped()
    assert most.value == 8
    for _ in range(QUIET_STEPS):
        most.stepped()
    assert most.value == 8


def test_at_least_one_runs_and_never_more_than_configured() -> None:
    most = RunningMax(2)
    for _ in range(5):
        most.preempted(0)
    assert most.value == 1
    most.configure(1)
    for _ in range(QUIET_STEPS * 3):
        most.stepped()
    assert most.value == 1
    most.configure(16)
    assert most.value == 16
    most.preempted(12)
    most.configure(4)
    assert most.value == 4
    most.configure(16)
    assert most.value == 12
