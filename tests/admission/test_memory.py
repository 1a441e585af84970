"""The memory guard in the state machine (LI-6): taken with the grant, corrected, given back; and who is throttled."""

from typing import Any

import pytest

from headrace.admission.accounts import Accounts
from headrace.admission.controller import Admitted, LimitReached, NeedsCount, NeedsTrim
from headrace.admission.entry import Phase
from headrace.config.limits import Limits
from headrace.limits.book import Excess
from headrace.limits.memory import MemoryRate
from headrace.scheduling.policy import Demand
from tests.admission.test_controller import THROTTLE_US, Desk

RATE = MemoryRate(0, 1)
"""A token is a byte."""


def of_bytes(number: int, **limits: float) -> Limits:
    return Limits(gpu_memory_gb=number / 2**30, **limits)  # type: ignore[arg-type]


class MemoryDesk(Desk):
    def ask(self, prompt: int = 10, answer: int | None = 10, tenant: str = "a", **more: Any) -> Admitted:
        return self.accept(tenant, prompt=prompt, answer=answer, memory_rate=RATE, **more)

    def until_us(self) -> int:
        account = self.controller.accounts.find("tenant", "a")
        assert account is not None
        return account.throttled_until_us

    def throttled(self) -> bool:
        return self.until_us() > self.now_us

    def refused(self, prompt: int = 10, answer: int | None = 10, **more: Any) -> Excess:
        with pytest.raises(LimitReached) as reached:
            self.ask(prompt, answer, **more)
        return reached.value.excess


def desk_of(number: int, *, capacity: int = 4, length: int = 4, **limits: float) -> MemoryDesk:
    return MemoryDesk(tenant=of_bytes(number, **limits), capacity=capacity, length=length)


def test_memory_is_taken_with_the_grant_and_given_back_however_it_ends() -> None:
    desk = desk_of(100)
    entry = desk.ask(10, 20).entry
    assert desk.memory() == 0, "a queued request holds none (LI-3)"
    assert desk.dispatch() == [entry]
    assert desk.memory() == 30
    desk.controller.put_back(entry)
    assert desk.memory() == 0
    desk.check()
    desk.queue.pause("r.1", is_paused=False)
    assert desk.dispatch() == [entry]
    desk.controller.preempt(entry, output_tokens=3, in_favour_of=entry)
    assert desk.memory() == 0
    assert desk.dispatch() == [entry]
    assert desk.memory() == 30
    desk.controller.expire(entry, desk.now_us)
    assert desk.memory() == 0
    desk.check()


def test_the_answer_is_reckoned_with_as_predicted_and_grows_in_steps_beyond_it() -> None:
    desk = desk_of(600)
    entry = desk.ask(100, 400, predicted=20).entry
    desk.dispatch()
    assert desk.memory() == 120
    desk.controller.grow(entry, 20)
    assert desk.memory() == 120
    desk.controller.grow(entry, 21)
    assert desk.memory() == 164
    desk.controller.grow(entry, 64)
    assert desk.memory() == 164
    desk.controller.grow(entry, 399)
    assert desk.memory() == 500, "never more than it may come to"
    desk.settle(entry, used=500)
    assert desk.memory() == 0
    desk.check()


def test_a_jump_is_caught_while_it_happens() -> None:
    """From 128 to 2048 tokens: it goes on, and newcomers are refused."""
    desk = desk_of(1000)
    entry = desk.ask(10, 2048, predicted=128).entry
    desk.dispatch()
    desk.controller.grow(entry, 1500)
    assert desk.memory() == 10 + 1536 > 1000
    excess = desk.refused(10, 2048, predicted=128)
    assert (excess.limit_type, excess.held, excess.requested) == ("memory", 1546, 138)
    desk.check()


def test_the_exact_prompt_corrects_what_is_held() -> None:
    desk = desk_of(1000)
    entry = desk.ask(400, 50, predicted=20).entry
    desk.dispatch()
    assert desk.memory() == 420
    assert desk.controller.trim(entry, 150, prompt_tokens=100) is True
    assert (desk.memory(), entry.held) == (120, 150)
    assert desk.controller.trim(entry, 150, prompt_tokens=100) is False
    waiting = desk.ask(400, 50).entry
    assert desk.controller.trim(waiting, 150, prompt_tokens=100) is False, "it held none"
    assert waiting.memory == 150
    desk.check()


def test_a_bound_is_counted_before_it_refuses() -> None:
    desk = desk_of(100)
    with pytest.raises(NeedsCount):
        desk.ask(200, 10, can_be_counted=True)
    desk.ask(80, 10, can_be_counted=True)
    desk.dispatch()
    with pytest.raises(NeedsTrim):
        desk.ask(20, 10, can_be_counted=True, is_exact=True)
    assert not desk.throttled(), "nobody was refused yet"
    assert desk.refused(20, 10, can_be_counted=True, is_exact=True, is_final=True).limit_type == "memory"
    assert desk.throttled()


def test_without_a_maximum_the_answer_is_clamped_to_what_fits_at_all() -> None:
    desk = desk_of(60)
    with pytest.raises(NeedsCount):
        desk.ask(10, None, can_be_counted=True)
    size = desk.ask(10, None, can_be_counted=True, is_exact=True).size
    assert (size.maximum, size.total, size.is_clamped, size.is_limited) == (50, 60, True, True)
    size = desk.ask(10, None, predicted=20).size
    assert (size.maximum, size.is_clamped) == (100, False), "so long an answer is not expected"
    assert desk.refused(60, None).free_at_us is None, "not even one token"


def test_rather_a_shorter_answer_than_a_refusal() -> None:
    """LI-9 with LI-6: what is left decides how short."""
    desk = desk_of(100)
    desk.ask(20, 20)
    desk.dispatch()
    size = desk.ask(20, 70, may_be_shortened=True).size
    assert (size.maximum, size.is_shortened) == (40, True)
    assert not desk.throttled(), "it was not refused"
    desk.dispatch()
    assert desk.memory() == 100
    assert desk.refused(20, 70, may_be_shortened=True).limit_type == "memory"
    assert desk.throttled()


def test_who_is_throttled_waits_until_memory_is_free_and_is_told_so() -> None:
    desk = desk_of(50)
    running = desk.ask(20, 20).entry
    desk.dispatch()
    excess = desk.refused(20, 20)
    assert excess.free_at_us == 0
    desk.now_us += 1_000
    waiting = desk.ask(20, 20).entry
    assert waiting.is_throttled and waiting.phase is Phase.WAITING
    assert desk.dispatch() == []
    explained = desk.controller.explain(waiting, number_max=10)
    assert explained is not None and explained.reason == "throttled"
    desk.settle(running)
    assert desk.dispatch() == [waiting]
    assert desk.memory() == 40
    desk.check()


def test_what_alone_never_fits_is_refused_and_does_not_prolong() -> None:
    desk = desk_of(50)
    assert desk.refused(50, 1).free_at_us is None
    assert not desk.throttled()
    desk.ask(20, 20)
    desk.dispatch()
    desk.refused(20, 20)
    until_us = desk.until_us()
    desk.now_us += 5
    assert desk.refused(50, 1).free_at_us is None
    assert desk.until_us() == until_us == desk.now_us - 5 + THROTTLE_US


def test_it_ends_by_itself_and_a_refusal_after_it_throttles_again() -> None:
    desk = desk_of(50)
    desk.ask(20, 20)
    desk.dispatch()
    desk.refused(20, 20)
    assert desk.controller.accounts.num_throttled(desk.now_us) == 1
    desk.now_us = desk.until_us() - 1
    assert desk.ask(20, 20).entry.is_throttled
    desk.now_us += 1
    assert desk.controller.accounts.num_throttled(desk.now_us) == 0
    assert desk.refused(20, 20).limit_type == "memory"
    assert desk.throttled()


def test_what_all_share_throttles_nobody() -> None:
    desk = MemoryDesk(cluster=of_bytes(50))
    desk.ask(20, 20)
    desk.dispatch()
    for _ in range(2):
        assert desk.refused(20, 20, tenant="b").level == "cluster"
    assert desk.controller.accounts.num_throttled(desk.now_us) == 0


def test_one_tenant_s_throttle_is_not_another_s() -> None:
    desk = desk_of(50)
    desk.ask(20, 20)
    desk.dispatch()
    desk.refused(20, 20)
    assert not desk.ask(20, 20, tenant="b").entry.is_throttled


def test_a_wait_for_memory_without_a_throttle_has_its_reason_too() -> None:
    desk = desk_of(50, capacity=1)
    first = desk.ask(20, 20).entry
    second = desk.ask(20, 20).entry  # it fits: nothing runs yet
    assert desk.dispatch() == [first]
    explained = desk.controller.explain(second, number_max=10)
    assert explained is not None and explained.reason == "memory_limit"
    (listed,) = desk.controller.first_waiting("m", number_max=10)
    assert listed.explanation.reason == "memory_limit"
    (listed,) = desk.controller.waiting_of("m", "a", number_max=10, looked_at_max=10)
    assert listed.explanation.reason == "memory_limit"


def test_a_large_one_is_not_passed_by_smaller_ones_of_its_caller() -> None:
    """Or it would wait for ever; other tenants pass it."""
    desk = desk_of(100)
    gate = Demand(gate="one caller")
    running = desk.ask(40, 40, demand=gate).entry
    desk.ask(10, 10, tenant="b")
    desk.dispatch()
    desk.refused(50, 40, demand=gate)
    large = desk.ask(50, 40, demand=gate).entry
    small = desk.ask(5, 5, demand=gate).entry
    other = desk.ask(5, 5, tenant="b").entry
    assert desk.dispatch() == [other]
    desk.settle(running)
    assert desk.dispatch() == [large, small]


def test_limits_set_while_requests_run_know_what_those_hold() -> None:
    desk = MemoryDesk(capacity=2)
    entry = desk.ask(20, 20).entry
    desk.dispatch()
    desk.limits["tenant"] = of_bytes(50)
    assert desk.refused(20, 20).held == 40
    desk.settle(entry)
    desk.check()


def test_throttled_accounts_are_not_dropped() -> None:
    accounts = Accounts(accounts_max=2)
    limits = of_bytes(10)
    (first,) = accounts.of((("tenant", "a", limits),), 0)
    accounts.of((("tenant", "b", limits),), 0)
    accounts.throttle(first, now_us=0, until_us=100)
    accounts.of((("tenant", "c", limits),), 50)
    assert accounts.find("tenant", "a") is first
    assert accounts.find("tenant", "b") is None
    assert accounts.num_throttled(99) == 1
    assert accounts.num_throttled(100) == 0


def test_the_invariants_see_memory_that_is_not_given_back_at_a_put_back() -> None:
    desk = desk_of(100)
    entry = desk.ask(10, 20).entry
    desk.dispatch()
    desk.controller.put_back(entry)
    desk.check()
    for account in entry.accounts:
        account.memory += entry.memory
    with pytest.raises(AssertionError, match="bytes of memory"):
        desk.check()
