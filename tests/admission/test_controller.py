"""The state machine of admission: all or nothing, nothing twice, nothing left over."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.admission.accounts import LevelLimits
from headrace.admission.applicant import Applicant
from headrace.admission.controller import (
    AdmissionController,
    Admitted,
    LimitReached,
    NeedsCount,
    NeedsTrim,
    Took,
)
from headrace.admission.entry import Entry, IllegalTransition, Phase
from headrace.admission.invariants import check
from headrace.config.limits import UNLIMITED, Limits
from headrace.limits.memory import NO_MEMORY, MemoryRate
from headrace.limits.memory_book import is_throttled
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import Demand, QueuePolicy
from headrace.scheduling.queue_bounds import NoReplica, QueueBounds, QueueFull
from tests.scheduling import oracle

LEASE_US = 30_000_000
THROTTLE_US = 10_000_000
MODEL = "m"


class Desk:
    """A controller with its own clock and a way to ask it in one line."""

    def __init__(
        self,
        *,
        cluster: Limits = UNLIMITED,
        tenant: Limits = UNLIMITED,
        capacity: int = 2,
        length: int = 4,
        tokens: int = 10_000,
        policy: QueuePolicy | None = None,
    ) -> None:
        self.now_us = 1_000_000
        self.limits = {"cluster": cluster, "tenant": tenant}
        self.controller = AdmissionController(lease_us=LEASE_US, memory_throttle_us=THROTTLE_US)
        self.queue: FairQueue[Entry] = FairQueue(
            QueueBounds(length=length, tokens=tokens, tenant_length=length, tenant_tokens=tokens), policy
        )
        self.controller.add_model(MODEL, self.queue)
        if capacity:
            self.queue.add("r.1", capacity=capacity)
        self.number = 0

    def accept(
        self, tenant: str = "a", *, prompt: int = 10, answer: int | None = 10, **more: Any
    ) -> Admitted:
        self.number += 1
        levels: tuple[LevelLimits, ...] = (
            ("cluster", "", self.limits["cluster"]),
            ("tenant", tenant, self.limits["tenant"]),
        )
        accounts = self.controller.accounts.of(levels, self.now_us)
        applicant = Applicant(
            request_id=f"req_{self.number}",
            tenant_id=tenant,
            model_id=MODEL,
            accounts=accounts,
            prompt_tokens=prompt,
            max_tokens=answer,
            default_max_tokens=100,
            context_tokens=more.get("context"),
            is_stream=more.get("is_stream", False),
            is_exact=more.get("is_exact", False),
            can_be_counted=more.get("can_be_counted", False),
            is_final=more.get("is_final", False),
            may_be_shortened=more.get("may_be_shortened", False),
            demand=more.get("demand"),
            memory_rate=more.get("memory_rate", NO_MEMORY),
            output_tokens=more.get("predicted"),
            is_throttled=is_throttled(accounts, self.now_us),
        )
        return self.controller.accept(applicant, self.now_us)

    def dispatch(self) -> list[Entry]:
        return list(self.controller.dispatch(MODEL, self.now_us))

    def settle(self, entry: Entry, *, used: int = 0) -> None:
        self.controller.settle(entry, used=used, now_us=self.now_us, took=Took(output_tokens=used))

    def used(self, tenant: str = "a") -> tuple[int, int]:
        (account,) = self.controller.accounts.of((("tenant", tenant, self.limits["tenant"]),), self.now_us)
        return account.window.used(self.now_us), account.window.held

    def memory(self, tenant: str = "a") -> int:
        """Bytes that its requests on workers hold."""
        account = self.controller.accounts.find("tenant", tenant)
        return 0 if account is None else account.memory

    def check(self) -> None:
        check(self.controller, self.now_us)


def test_a_request_holds_prompt_and_longest_answer_until_it_is_settled() -> None:
    desk = Desk(tenant=Limits(tpm=1000))
    entry = desk.accept(prompt=10, answer=20).entry
    assert desk.used() == (0, 30)
    assert desk.dispatch() == [entry]
    desk.controller.trim(entry, 25)
    assert desk.used() == (0, 25)
    desk.settle(entry, used=12)
    assert desk.used() == (12, 0)
    assert desk.controller.entries == {}
    desk.check()


def test_nothing_can_be_ended_twice() -> None:
    desk = Desk()
    entry = desk.accept().entry
    desk.dispatch()
    desk.settle(entry)
    for again in (
        desk.settle,
        lambda one: desk.controller.expire(one, desk.now_us),
        desk.controller.put_back,
    ):
        with pytest.raises(IllegalTransition):
            again(entry)
    desk.check()


def test_a_refusal_changes_nothing() -> None:
    desk = Desk(cluster=Limits(rps=1), tenant=Limits(tpm=25))
    with pytest.raises(LimitReached) as reached:
        desk.accept(prompt=10, answer=20)
    assert (reached.value.excess.limit_type, reached.value.excess.level) == ("tpm", "tenant")
    desk.accept(prompt=10, answer=10)  # the rate of the cluster was not touched by the one that was refused
    with pytest.raises(LimitReached):
        desk.accept(prompt=1, answer=1)
    assert desk.used() == (0, 20)
    desk.check()


def test_an_acceptance_that_could_not_be_journalled_is_as_if_it_had_never_been() -> None:
    desk = Desk(tenant=Limits(rps=1, tpm=100))
    desk.controller.take_back(desk.accept(answer=50).entry, desk.now_us)
    assert desk.used() == (0, 0)
    desk.accept()
    desk.check()


def test_a_bound_that_does_not_fit_asks_for_the_exact_count_and_an_exact_one_does_not() -> None:
    desk = Desk(tenant=Limits(tpm=25))
    with pytest.raises(NeedsCount):
        desk.accept(prompt=20, answer=10, can_be_counted=True)
    assert desk.accept(prompt=15, answer=10).entry.held == 25
    full = Desk(tenant=Limits(concurrency=0))
    with pytest.raises(LimitReached):
        full.accept(can_be_counted=True)  # a count cannot help here


def test_what_only_the_bounds_of_others_refuse_asks_for_their_counts() -> None:
    desk = Desk(tenant=Limits(tpm=100))
    bound = desk.accept(prompt=50, answer=10, can_be_counted=True).entry
    exact = desk.accept(prompt=10, answer=10, can_be_counted=True, is_exact=True).entry
    with pytest.raises(NeedsTrim) as needs:
        desk.accept(prompt=20, answer=10, can_be_counted=True, is_exact=True)
    assert needs.value.entries == [bound]
    desk.accept("b", prompt=100, answer=0, is_exact=True)  # others' bounds are not in its way
    with pytest.raises(LimitReached):
        desk.accept(prompt=20, answer=10, can_be_counted=True, is_exact=True, is_final=True)
    desk.controller.trim(bound, 20)
    assert (bound.is_exact, exact.is_exact, desk.used()) == (True, True, (0, 40))
    desk.accept(prompt=20, answer=10, can_be_counted=True, is_exact=True)
    with pytest.raises(LimitReached):  # nobody holds a bound any more
        desk.accept(prompt=30, answer=10, can_be_counted=True, is_exact=True)
    desk.check()


def test_a_missing_maximum_is_made_to_fit_and_said() -> None:
    desk = Desk(tenant=Limits(tpm=50))
    size = desk.accept(prompt=10, answer=None).size
    assert (size.maximum, size.total, size.is_clamped, size.is_limited) == (40, 50, True, True)
    assert desk.used() == (0, 50)
    free = Desk().accept(prompt=10, answer=None, context=60).size
    assert (free.maximum, free.total, free.is_clamped, free.is_limited) == (60, 60, False, False)


def test_rather_a_shorter_answer_than_a_refusal_but_not_for_a_bound() -> None:
    desk = Desk(tenant=Limits(tpm=100))
    size = desk.accept(prompt=10, answer=50, may_be_shortened=True).size
    assert (size.maximum, size.is_shortened) == (50, False), "it fits"
    with pytest.raises(NeedsCount):
        desk.accept(prompt=20, answer=50, may_be_shortened=True, can_be_counted=True)
    size = desk.accept(prompt=10, answer=50, may_be_shortened=True).size
    assert (size.maximum, size.total, size.is_shortened, size.is_limited) == (30, 40, True, True)
    assert desk.used() == (0, 100)
    desk.check()
    for more in ({}, {"may_be_shortened": True}):
        with pytest.raises(LimitReached):
            desk.accept(prompt=1, answer=1, **more)
    narrow = Desk(tenant=Limits(tpm=100, max_prompt_tokens=5))
    with pytest.raises(LimitReached):  # a shorter answer makes no prompt shorter
        narrow.accept(prompt=10, answer=10, may_be_shortened=True)
    with pytest.raises(LimitReached):  # of no use any more
        narrow.accept(prompt=85 + 4, answer=50, may_be_shortened=True)


def test_waiting_takes_neither_concurrency_nor_streams_and_putting_back_returns_them() -> None:
    desk = Desk(tenant=Limits(concurrency=1, streams=1), capacity=2)
    first = desk.accept(is_stream=True).entry
    assert desk.dispatch() == [first]
    with pytest.raises(LimitReached) as reached:
        desk.accept()
    assert reached.value.excess.limit_type == "concurrency"
    desk.controller.put_back(first)
    assert (first.phase, first.replica_id) == (Phase.WAITING, None)
    second = desk.accept(is_stream=True).entry
    assert desk.dispatch() == []
    desk.queue.pause("r.1", is_paused=False)
    assert desk.dispatch() == [first]
    desk.settle(first)
    assert desk.dispatch() == [second]
    desk.check()


def test_a_lease_ends_unless_it_is_renewed_and_a_late_record_still_counts() -> None:
    desk = Desk(tenant=Limits(tpm=100))
    entry = desk.accept(prompt=10, answer=20).entry
    desk.dispatch()
    desk.now_us += LEASE_US - 1
    assert desk.controller.due(desk.now_us) == []
    desk.controller.renew(entry, desk.now_us)
    desk.now_us += LEASE_US - 1
    assert desk.controller.due(desk.now_us) == []
    desk.now_us += 1
    assert desk.controller.due(desk.now_us) == [entry]
    desk.controller.expire(entry, desk.now_us)
    assert desk.used() == (0, 0)
    assert desk.queue.running_on("r.1") == 0
    desk.check()
    desk.controller.settle_late(entry, used=17, now_us=desk.now_us)
    assert desk.used() == (17, 0)
    with pytest.raises(IllegalTransition):
        desk.controller.settle_late(entry, used=17, now_us=desk.now_us)
    desk.check()


def test_one_tenants_full_queue_does_not_refuse_another() -> None:
    desk = Desk(capacity=1, length=3)
    running = desk.accept("a").entry
    assert desk.dispatch() == [running]
    waiting = [desk.accept("a").entry for _ in range(3)]
    with pytest.raises(QueueFull):
        desk.accept("a")
    admitted = desk.accept("b")
    assert admitted.evicted == waiting[-1:]
    assert waiting[-1].phase is Phase.DROPPED
    desk.check()
    desk.settle(waiting[-1])
    desk.settle(running)
    assert desk.dispatch() == [waiting[0]]
    desk.check()


def test_the_queue_charges_what_was_really_taken_late_records_too() -> None:
    desk = Desk(capacity=1)
    entry = desk.accept("a", demand=Demand(prompt_tokens=10, expected_output_tokens=50, weight=2.0)).entry
    waiting = [desk.accept(tenant).entry for tenant in "aba"]
    counter = desk.queue.counters.get("a")
    assert counter is not None
    desk.dispatch()
    assert counter.value == 55.0  # (10 + 2 x 50) / 2
    desk.controller.settle(entry, used=0, now_us=desk.now_us, took=Took(prompt_tokens=12, output_tokens=4))
    assert counter.value == 10.0
    assert desk.dispatch() == [waiting[1]]  # b has had nothing yet
    desk.controller.settle(waiting[1], used=0, now_us=desk.now_us)
    desk.dispatch()
    desk.controller.expire(waiting[0], desk.now_us)
    before = counter.value
    took = Took(prompt_tokens=100, cached_tokens=50, output_tokens=1)
    desk.controller.settle_late(waiting[0], used=0, now_us=desk.now_us, took=took)
    assert counter.value == pytest.approx(before + 57.0)
    desk.check()


def test_without_a_replica_nobody_is_accepted_and_those_who_waited_for_one_are_let_go() -> None:
    desk = Desk(capacity=0, tenant=Limits(rps=1))
    with pytest.raises(NoReplica):
        desk.accept()
    desk.queue.expect("r.1")
    entry = desk.accept().entry
    assert desk.controller.remove_replica(MODEL, "r.1", successor_id="r.2") == []
    assert desk.controller.remove_replica(MODEL, "r.2", successor_id=None) == [entry]
    desk.check()
    desk.settle(entry)
    desk.check()


class ControllerMachine(RuleBasedStateMachine):
    """Everything that can happen, in any order, against a plain model of what is held and used, memory too (LI-6)."""

    policy = QueuePolicy()
    rate = MemoryRate(5, 3)

    def demand(self, tenant: str, prompt: int, is_stream: bool) -> Demand | None:
        return None

    @initialize(
        tpm=st.integers(20, 200),
        concurrency=st.none() | st.integers(0, 3),
        length=st.integers(0, 4),
        capacity=st.integers(1, 3),
        memory=st.none() | st.integers(0, 500),
    )
    def begin(
        self, tpm: int, concurrency: int | None, length: int, capacity: int, memory: int | None
    ) -> None:
        self.tpm = tpm
        self.memory_max = memory
        gb = None if memory is None else memory / 2**30
        self.desk = Desk(
            tenant=Limits(tpm=tpm, concurrency=concurrency, rps=3, gpu_memory_gb=gb),
            cluster=Limits(tpm=2 * tpm, gpu_memory_gb=None if gb is None else 2 * gb),
            length=length,
            tokens=tpm,
            capacity=capacity,
            policy=self.policy,
        )
        self.open: list[Entry] = []
        self.expired: list[Entry] = []
        self.used: list[tuple[int, str, int]] = []
        self.reckoned: dict[Entry, tuple[int, int]] = {}
        """Prompt and answer that are reckoned with."""
        self.refused_us: dict[str, int] = {}
        """When a tenant was refused memory by its own limit."""
        self.begun: set[Entry] = set()

    def memory(self, entry: Entry) -> int:
        return 5 + 3 * min(sum(self.reckoned[entry]), entry.held)

    def memory_held(self, tenant: str) -> int:
        return sum(self.memory(entry) for entry in self.granted() if entry.tenant_id == tenant)

    def dispatch(self) -> None:
        """Nobody is granted memory that is not there, but who goes on beside nobody."""
        for entry in self.desk.controller.dispatch(MODEL, self.desk.now_us):
            held = self.memory_held(entry.tenant_id)
            if self.memory_max is not None and held > self.memory_max:
                assert held == self.memory(entry) and self.reckoned[entry][1] > 0
                assert entry in self.begun

    def held(self, tenant: str) -> int:
        return sum(entry.held for entry in self.open if entry.tenant_id == tenant)

    def recent(self, tenant: str) -> int:
        since = self.desk.now_us - 60_000_000
        return sum(tokens for at_us, name, tokens in self.used if name == tenant and at_us > since)

    def granted(self) -> list[Entry]:
        return [entry for entry in self.open if entry.phase is Phase.GRANTED]

    @rule(
        tenant=st.sampled_from("abc"),
        prompt=st.integers(1, 40),
        answer=st.none() | st.integers(0, 60),
        is_stream=st.booleans(),
        predicted=st.none() | st.integers(1, 40),
    )
    def accept(
        self, tenant: str, prompt: int, answer: int | None, is_stream: bool, predicted: int | None
    ) -> None:
        before = self.desk.used(tenant), self.desk.queue.num_waiting
        is_slow = self.desk.now_us < self.refused_us.get(tenant, -THROTTLE_US) + THROTTLE_US
        try:
            demand = self.demand(tenant, prompt, is_stream)
            admitted = self.desk.accept(
                tenant,
                prompt=prompt,
                answer=answer,
                is_stream=is_stream,
                demand=demand,
                memory_rate=self.rate,
                predicted=predicted,
            )
        except LimitReached as reached:
            assert (self.desk.used(tenant), self.desk.queue.num_waiting) == before
            excess = reached.excess
            if excess.limit_type == "memory":
                assert self.memory_max is not None
                if excess.level == "tenant":
                    assert excess.held == self.memory_held(tenant)
                    assert excess.held + excess.requested > self.memory_max
                assert (excess.free_at_us is None) == (excess.requested > excess.limit)
                if excess.free_at_us is not None:
                    assert not is_slow, "who is throttled waits"
                    if excess.level == "tenant":
                        self.refused_us[tenant] = self.desk.now_us
            return
        except (QueueFull, NoReplica):
            assert (self.desk.used(tenant), self.desk.queue.num_waiting) == before
            return
        assert prompt + admitted.size.maximum <= self.tpm
        maximum = admitted.size.maximum
        self.reckoned[admitted.entry] = (prompt, maximum if predicted is None else min(maximum, predicted))
        assert self.memory_max is None or self.memory(admitted.entry) <= self.memory_max
        assert admitted.entry.is_throttled == is_slow or self.memory_max is None
        self.open.append(admitted.entry)
        assert all(evicted.tenant_id != tenant for evicted in admitted.evicted)
        self.dispatch()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), share=st.floats(0, 1))
    def settle(self, data: st.DataObject, share: float) -> None:
        entry = data.draw(st.sampled_from(self.open))
        used = int(entry.held * share) if entry.phase is Phase.GRANTED else 0
        self.open.remove(entry)
        self.desk.settle(entry, used=used)
        self.used.append((self.desk.now_us, entry.tenant_id, used))
        self.dispatch()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.open))
        prompt, answer = self.reckoned[entry]
        exact = data.draw(st.none() | st.integers(0, prompt))
        self.desk.controller.trim(entry, data.draw(st.integers(0, entry.held + 5)), prompt_tokens=exact)
        if exact is not None and entry.phase in (Phase.WAITING, Phase.GRANTED):
            self.reckoned[entry] = (exact, answer)
        self.dispatch()

    @precondition(lambda self: self.granted())
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.granted()))
        prompt, answer = self.reckoned[entry]
        written = data.draw(st.integers(0, 100))
        self.begun.add(entry)
        self.desk.controller.grow(entry, written)
        if written > answer:
            self.reckoned[entry] = (prompt, 64 if written <= 64 else 128)

    @precondition(lambda self: self.granted())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.granted()))
        self.begun.add(entry)
        self.desk.controller.preempt(entry, output_tokens=1, in_favour_of=entry)
        self.dispatch()

    @precondition(lambda self: self.granted())
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.granted()))
        replica_id = entry.replica_id
        assert replica_id is not None
        self.desk.controller.put_back(entry)
        assert oracle.position(self.desk.queue, entry) == 1
        self.desk.queue.pause(replica_id, is_paused=False)
        self.dispatch()

    @precondition(lambda self: self.granted())
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.granted()))
        self.desk.controller.renew(entry, self.desk.now_us)
        assert entry.lease_until_us > self.desk.now_us

    @rule()
    def expire(self) -> None:
        for entry in self.desk.controller.due(self.desk.now_us):
            self.desk.controller.expire(entry, self.desk.now_us)
            self.open.remove(entry)
            self.expired.append(entry)
        assert all(entry.lease_until_us > self.desk.now_us for entry in self.granted())
        self.dispatch()

    @precondition(lambda self: self.expired)
    @rule(data=st.data(), is_known=st.booleans())
    def late(self, data: st.DataObject, is_known: bool) -> None:
        entry = data.draw(st.sampled_from(self.expired))
        self.expired.remove(entry)
        if is_known:
            self.desk.controller.settle_late(entry, used=entry.held, now_us=self.desk.now_us)
            self.used.append((self.desk.now_us, entry.tenant_id, entry.held))
        else:
            self.desk.controller.forget(entry)

    @rule(seconds=st.sampled_from((0.0005, 0.3, 7.0, 31.0, 61.0)))
    def wait(self, seconds: float) -> None:
        self.desk.now_us += int(seconds * 1e6)

    @invariant()
    def everything_adds_up(self) -> None:
        self.desk.check()
        for tenant in "abc":
            used, held = self.desk.used(tenant)
            assert held == self.held(tenant)
            assert self.desk.memory(tenant) == self.memory_held(tenant)
            # Settlements of one millisecond leave the window together, never too early.
            assert used >= self.recent(tenant)

    def teardown(self) -> None:
        for entry in list(getattr(self, "open", [])):
            self.desk.settle(entry)
        if hasattr(self, "desk"):
            self.desk.check()
            assert self.desk.queue.num_running == self.desk.queue.num_waiting == 0


ControllerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestControllerMachine = ControllerMachine.TestCase
