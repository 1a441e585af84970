"""Random histories of a fair queue, beside a small model of what must be true of it."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import POLICIES, Demand, QueuePolicy
from headrace.scheduling.queue_bounds import NoReplica, QueueBounds, QueueFull
from tests.scheduling import oracle

TENANTS = "abcde"
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0, "e": 0.5}
BASE = QueuePolicy(
    batch_floor=0.2,
    aging_us=500,
    priority_aging_us=100,
    long_prompt_tokens=60,
    long_prompts_max=1,
    idle_tenants_max=2,
)
CLOSE = 1e-6


class Known:
    """What the model knows of a request."""

    def __init__(self, tenant: str, demand: Demand, tokens: int) -> None:
        self.tenant = tenant
        self.demand = demand
        self.tokens = tokens
        self.charged = 0.0
        self.paid = 0.0
        self.replica = ""
        self.is_lost = False
        self.output = 0
        self.has_answered = False


def cost(demand: Demand, output: int) -> float:
    """Written out again, so that the queue's own prices do not vouch for themselves."""
    fresh = demand.prompt_tokens - demand.cached_tokens
    return fresh + 0.1 * demand.cached_tokens + 2 * output


class FairMachine(RuleBasedStateMachine):
    """Everything an owner may do, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(
            QueueBounds(length=25, tokens=3000, tenant_length=15, tenant_tokens=2500), BASE
        )
        self.capacity = {"r": 2, "s": 3}
        self.queue.add("r", capacity=2)
        self.queue.add("s", capacity=3, kv_tokens=400)
        self.waiting: dict[int, Known] = {}
        self.granted: dict[int, Known] = {}
        self.counter: dict[str, float] = {}
        """What each tenant's counter has to be; never forgotten here."""
        self.number = 0
        self.now_us = 0
        self.policy = BASE
        self.is_paused = False

    # --- what the owner does ------------------------------------------------------------------------

    @rule(us=st.sampled_from([1, 50, 600]))
    def time_passes(self, us: int) -> None:
        self.now_us += us
        self.queue.advance(self.now_us)

    @rule(
        tenant=st.sampled_from(TENANTS),
        prompt=st.sampled_from([0, 1, 30, 100]),
        expected=st.sampled_from([0, 5, 50]),
        cached=st.sampled_from([0, 20]),
        is_batch=st.booleans(),
        priority=st.integers(-1, 2),
        is_gated=st.booleans(),
        may_start=st.booleans(),
    )
    def enter(
        self,
        tenant: str,
        prompt: int,
        expected: int,
        cached: int,
        is_batch: bool,
        priority: int,
        is_gated: bool,
        may_start: bool,
    ) -> None:
        self.number += 1
        demand = Demand(
            prompt_tokens=prompt,
            expected_output_tokens=expected,
            cached_tokens=min(cached, prompt),
            weight=WEIGHTS[tenant],
            service_class="batch" if is_batch else "interactive",
            priority=priority,
            gate="gate" if is_gated else None,
        )
        before = self.active()
        try:
            evicted = self.queue.enter(
                self.number,
                tenant=tenant,
                tokens=prompt + expected,
                may_start=lambda ticket: may_start,
                demand=demand,
                now_us=self.now_us,
            )
        except (QueueFull, NoReplica):
            return
        for ticket in evicted:
            assert self.waiting.pop(ticket).tenant != tenant
        self.waiting[self.number] = Known(tenant, demand, prompt + expected)
        self.check_lift(tenant, before, self.active() if evicted else before)

    @rule(tenant=st.sampled_from(TENANTS), prompt=st.sampled_from([1, 30, 100]), is_batch=st.booleans())
    def enter_and_dispatch(self, tenant: str, prompt: int, is_batch: bool) -> None:
        """Nobody looks in between, as in a server."""
        self.enter(tenant, prompt, 5, 0, is_batch, 0, is_gated=True, may_start=True)
        self.dispatch("", 99)

    def active(self) -> set[str]:
        return {known.tenant for known in self.waiting.values()}

    def check_lift(self, tenant: str, before: set[str], after: set[str]) -> None:
        now = self.value(tenant)
        owed = self.counter.get(tenant)
        if tenant in before:
            assert owed is not None
            assert abs(now - owed) < CLOSE, "an active tenant's counter moved by entering"
        others = (before & after) - {tenant}
        if owed is not None:
            assert now >= owed - CLOSE, "a debt was reset"
        if others and tenant not in before:
            lowest = min(self.counter[other] for other in others)
            assert now >= lowest - CLOSE, "idle time earned credit"
        if self.counter:
            highest = max(self.counter.values())
            assert now <= max(highest, owed or 0.0, self.queue.counters.base) + CLOSE, "past use was punished"
        self.counter[tenant] = now

    def value(self, tenant: str) -> float:
        counter = self.queue.counters.get(tenant)
        assert counter is not None
        return counter.value

    @rule(blocked=st.sampled_from(["", "", "a", "bd"]), limit=st.sampled_from([1, 99]))
    def dispatch(self, blocked: str, limit: int) -> None:
        def may_start(ticket: int) -> bool:
            return self.waiting[ticket].tenant not in blocked

        for count, (ticket, replica) in enumerate(self.queue.dispatch(may_start, now_us=self.now_us), 1):
            known = self.waiting.pop(ticket)
            assert known.tenant not in blocked
            assert self.queue.running_on(replica) <= self.capacity[replica], "granted beyond the capacity"
            charge = max(0.0, cost(known.demand, known.demand.expected_output_tokens) - known.charged)
            known.charged += charge
            known.replica, known.is_lost = replica, False
            self.counter[known.tenant] += charge / WEIGHTS[known.tenant]
            self.granted[ticket] = known
            if count == limit:
                return
        self.check_work_conserving(blocked)

    def check_work_conserving(self, blocked: str) -> None:
        """After a full round nobody waits who has a place and no reason to wait."""
        places = [name for name, capacity, running in self.queue.places() if running < capacity]
        if not places or "s" in places or self.is_paused:
            return  # `s` may be short of memory
        reading = sum(
            known.demand.prompt_tokens > 60 and not known.has_answered and not known.is_lost
            for known in self.granted.values()
        )
        for known in self.waiting.values():
            is_long = self.policy.name != "fifo" and known.demand.prompt_tokens > 60
            assert known.tenant in blocked or (is_long and reading >= 1), "a place is free and somebody waits"

    @rule(data=st.data(), output=st.sampled_from([0, 3, 80]))
    def progress(self, data: st.DataObject, output: int) -> None:
        if not self.granted:
            return
        ticket = data.draw(st.sampled_from(sorted(self.granted)))
        known = self.granted[ticket]
        if output < known.output:
            return
        self.queue.progress(ticket, output)
        known.output, known.has_answered = output, True
        if output > known.demand.expected_output_tokens:
            self.charge(known, max(known.charged, cost(known.demand, output)))

    def charge(self, known: Known, total: float) -> None:
        self.counter[known.tenant] += (total - known.charged) / WEIGHTS[known.tenant]
        known.charged = total

    @rule(data=st.data(), more=st.sampled_from([0, 1, 40]))
    def end(self, data: st.DataObject, more: int) -> None:
        if not self.granted:
            return
        ticket = data.draw(st.sampled_from(sorted(self.granted)))
        known = self.granted.pop(ticket)
        self.queue.settle(ticket, output_tokens=known.output + more)
        self.charge(known, cost(known.demand, known.output + more))
        if not known.is_lost:
            self.queue.release(known.replica)

    @rule(data=st.data(), is_preempted=st.booleans())
    def put_back(self, data: st.DataObject, is_preempted: bool) -> None:
        if not self.granted:
            return
        ticket = data.draw(st.sampled_from(sorted(self.granted)))
        if is_preempted:
            self.stop(ticket, data.draw(st.sampled_from(sorted(self.waiting) or [0])))
            return
        known = self.granted.pop(ticket)
        self.queue.put_back(ticket, known.replica, tenant=known.tenant, tokens=known.tokens)
        known.output = 0
        self.waits_again(ticket, known)
        assert oracle.position(self.queue, ticket) == 1

    def stop(self, ticket: int, favoured: int) -> None:
        known = self.granted.pop(ticket)
        self.queue.preempted(
            ticket, known.replica, tokens=known.tokens, output_tokens=known.output, in_favour_of=favoured
        )
        known.paid = max(known.paid, cost(known.demand, known.output))
        self.waits_again(ticket, known)
        if favoured in self.waiting:
            assert oracle.position(self.queue, favoured) == 1

    def waits_again(self, ticket: int, known: Known) -> None:
        self.charge(known, known.paid)
        known.has_answered = False
        self.waiting[ticket] = known

    @rule(tenant=st.sampled_from(TENANTS), other=st.sampled_from(TENANTS))
    def flood(self, tenant: str, other: str) -> None:
        """More of one tenant's than there is place for, then a small one of another's."""
        for number in range(4):
            self.enter(tenant, 30, 5 * number, 0, False, 0, is_gated=True, may_start=True)
            self.dispatch("", 99)
        self.enter(other, 1, 0, 0, False, 0, is_gated=True, may_start=True)
        self.preempt("")

    @rule(blocked=st.sampled_from(["", "", "a", "bd"]))
    def preempt(self, blocked: str) -> None:
        """Stop somebody for another, as often as the queue says so: which it must not do for ever."""
        for _ in range(40):
            found = self.queue.preemption(lambda ticket: self.waiting[ticket].tenant not in blocked)
            if found is None:
                return
            victim, favoured = found
            most = max(self.running().values())
            self.check_preemption(self.granted[victim], self.waiting[favoured], blocked)
            self.stop(victim, favoured)
            self.dispatch(blocked, 1)
            assert max(self.running().values()) <= most + CLOSE, "the largest share grew"
        raise AssertionError("they stop each other in turn")

    def running(self) -> dict[str, float]:
        """What each tenant has running, by weight."""
        running = dict.fromkeys(TENANTS, 0.0)
        for known in self.granted.values():
            if not known.is_lost:
                running[known.tenant] += known.charged / WEIGHTS[known.tenant]
        return running

    def check_preemption(self, victim: Known, favoured: Known, blocked: str) -> None:
        assert self.policy.name == "fair"
        assert not victim.is_lost and favoured.tenant not in blocked and victim.tenant != favoured.tenant
        one = victim.charged / WEIGHTS[victim.tenant]
        assert self.counter[victim.tenant] + one >= self.counter[favoured.tenant] - CLOSE, "it was behind"
        running = self.running()
        left = running[victim.tenant] - one
        charge = max(favoured.charged, cost(favoured.demand, favoured.demand.expected_output_tokens))
        assert left >= running[favoured.tenant] + charge / WEIGHTS[favoured.tenant] - CLOSE, "it has less now"

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            ticket = data.draw(st.sampled_from(sorted(self.waiting)))
            assert self.queue.leave(ticket)
            del self.waiting[ticket]
            assert not self.queue.leave(ticket)

    @rule(data=st.data(), tokens=st.sampled_from([0, 500]))
    def resize(self, data: st.DataObject, tokens: int) -> None:
        everybody = {**self.waiting, **self.granted}
        if everybody:
            ticket = data.draw(st.sampled_from(sorted(everybody)))
            if not everybody[ticket].is_lost:
                self.queue.resize(ticket, tokens)
                everybody[ticket].tokens = tokens

    @rule(name=st.sampled_from(POLICIES), is_other=st.booleans())
    def switch(self, name: str, is_other: bool) -> None:
        self.policy = QueuePolicy(
            name=name,  # type: ignore[arg-type]
            batch_floor=0.5 if is_other else 0.2,
            aging_us=500,
            priority_aging_us=0 if is_other else 100,
            long_prompt_tokens=60,
            idle_tenants_max=2,
        )
        self.queue.set_policy(self.policy)

    @rule(is_paused=st.booleans())
    def pause(self, is_paused: bool) -> None:
        self.queue.pause("r", is_paused=is_paused)
        self.is_paused = is_paused

    @rule(name=st.sampled_from("rst"), capacity=st.integers(1, 4))
    def set_capacity(self, name: str, capacity: int) -> None:
        self.queue.set_capacity(name, capacity)
        if name in self.capacity:
            self.capacity[name] = capacity

    @rule(name=st.sampled_from("rs"), has_successor=st.booleans())
    def replace(self, name: str, has_successor: bool) -> None:
        if has_successor:
            self.queue.expect(name)
        self.queue.give_up(name)
        if not has_successor:
            for ticket in self.queue.drop_hopeless():
                del self.waiting[ticket]
        self.queue.add(name, capacity=2 if name == "r" else 3, kv_tokens=None if name == "r" else 400)
        self.capacity[name] = 2 if name == "r" else 3
        self.is_paused = self.is_paused and name != "r"
        for known in self.granted.values():
            if known.replica == name:
                known.is_lost = True

    # --- what must be true ----------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        queue = self.queue
        assert queue.num_waiting == len(self.waiting)
        assert queue.waiting_tokens == sum(known.tokens for known in self.waiting.values())
        assert sorted(oracle.expected_order(queue)) == sorted(self.waiting)
        assert queue.num_running == sum(not known.is_lost for known in self.granted.values())
        for tenant in TENANTS:
            mine = [known.tokens for known in self.waiting.values() if known.tenant == tenant]
            assert queue.waiting_of(tenant) == (len(mine), sum(mine))
        for name, capacity, running in queue.places():
            owned = [k for k in self.granted.values() if k.replica == name and not k.is_lost]
            assert (running, capacity) == (len(owned), self.capacity[name])

    @invariant()
    def everybody_is_charged_exactly(self) -> None:
        for tenant, expected in self.counter.items():
            counter = self.queue.counters.get(tenant)
            if counter is not None:
                assert abs(counter.value - expected) < CLOSE, f"{tenant}: {counter.value}, not {expected}"

    @invariant()
    def idle_state_is_bounded(self) -> None:
        counters = self.queue.counters
        busy = {known.tenant for known in (*self.waiting.values(), *self.granted.values())}
        assert counters.num_idle <= 2
        assert len(counters) == len(busy) + counters.num_idle

    @invariant()
    def whoever_is_forgotten_owes_no_less(self) -> None:
        for tenant, expected in self.counter.items():
            if self.queue.counters.get(tenant) is None:
                assert self.queue.counters.base >= expected - CLOSE, f"{tenant} would be forgiven"

    @invariant()
    def the_first_are_found_without_looking_at_all(self) -> None:
        expected = list(oracle.expected_order(self.queue))
        for number in (1, 3, len(expected) + 1):
            found = self.queue.in_expected_order(None, number_max=number)
            # Those who gave up may stand in the way, but nobody is ever named out of turn.
            assert [one.ticket for one in found] == expected[: len(found)]
            assert [one.explanation.position for one in found] == list(range(1, len(found) + 1))
            if len(expected) <= 16:
                assert len(found) == min(number, len(expected))

    @invariant()
    def a_bounded_look_agrees_with_a_full_one(self) -> None:
        for ticket in self.waiting:
            full, bounded = oracle.explain(self.queue, ticket), self.queue.why(ticket, None, number_max=3)
            assert full is not None and bounded is not None
            if bounded.is_exact:
                assert bounded.position == full.position
            else:
                assert bounded.position <= full.position
            assert abs(bounded.tenant_share - full.tenant_share) < CLOSE
        for tenant in TENANTS:
            own = self.queue.waiting_requests_of(tenant, None, number_max=100, looked_at_max=2)
            assert sorted(one.ticket for one in own) == sorted(
                ticket for ticket, known in self.waiting.items() if known.tenant == tenant
            )

    @invariant()
    def everybody_can_be_told_why(self) -> None:
        for ticket in list(self.waiting)[:3]:
            explanation = oracle.explain(self.queue, ticket)
            assert explanation is not None
            assert 1 <= explanation.position <= len(self.waiting)
            assert 0 < explanation.tenant_share <= 1
