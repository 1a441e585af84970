"""What tenants get over a whole run of a queue, checked from outside: shares, waits, returns, who is stopped for whom."""

import random
from collections import defaultdict, deque

from headrace.scheduling.fair import FairQueue
from headrace.scheduling.locality import Warmth
from headrace.scheduling.policy import Demand, QueuePolicy
from headrace.scheduling.queue_bounds import QueueBounds

ANY = 10**12
BOUNDS = QueueBounds(length=ANY, tokens=ANY, tenant_length=ANY, tenant_tokens=ANY)


def cost(demand: Demand) -> float:
    return demand.prompt_tokens + 2 * demand.expected_output_tokens


def check_backlogged(seed: int) -> None:
    """Tenants that always wait get cost by weight; never further apart than one request and the quantum."""
    draw = random.Random(seed)
    weights = {f"t{number}": draw.choice((1.0, 2.0, 3.0, 5.0)) for number in range(draw.randint(2, 6))}
    quantum = draw.choice((0.0, 500.0))
    warm = {ticket for ticket in range(2000) if draw.random() < 0.3}
    queue: FairQueue[int] = FairQueue(
        BOUNDS,
        QueuePolicy(quantum=quantum),
        warm_on=lambda ticket: Warmth({"r": 0}, home="r") if ticket in warm else None,
    )
    queue.add("r", capacity=draw.choice((1, 4, 16)))
    demands: dict[int, tuple[str, Demand]] = {}
    sizes = {name: draw.choice((10, 100, 400)) for name in weights}

    def enter(tenant: str) -> None:
        demand = Demand(
            prompt_tokens=draw.randint(1, sizes[tenant]),
            expected_output_tokens=draw.randint(1, sizes[tenant]),
            weight=weights[tenant],
        )
        ticket = len(demands)
        demands[ticket] = (tenant, demand)
        queue.enter(ticket, tenant=tenant, tokens=1, demand=demand)

    for tenant in weights:
        for _ in range(3):
            enter(tenant)
    service = dict.fromkeys(weights, 0.0)
    largest = max(3 * sizes[name] / weights[name] for name in weights)
    running: deque[int] = deque()
    for _ in range(300):
        for ticket, _replica in queue.dispatch():
            tenant, demand = demands[ticket]
            service[tenant] += cost(demand) / weights[tenant]
            enter(tenant)
            running.append(ticket)
            spread = max(service.values()) - min(service.values())
            assert spread <= largest + quantum + 1e-6, f"seed {seed}: {spread:.0f} apart, not {largest:.0f}"
        done = running.popleft()
        queue.settle(done, output_tokens=demands[done][1].expected_output_tokens)
        queue.release("r")


def check_return(seed: int) -> None:
    """A tenant that was away while others worked gets its share when it is back, and no more."""
    draw = random.Random(seed)
    queue: FairQueue[tuple[str, int]] = FairQueue(BOUNDS, QueuePolicy())
    queue.add("r", capacity=4)
    size = draw.choice((1, 50))
    demand = Demand(prompt_tokens=size, expected_output_tokens=size)
    number = 0
    running: deque[tuple[str, int]] = deque()

    def enter(tenant: str) -> None:
        nonlocal number
        number += 1
        queue.enter((tenant, number), tenant=tenant, tokens=1, demand=demand)

    def turn(seen: dict[str, int]) -> None:
        for ticket, _ in queue.dispatch():
            running.append(ticket)
            seen[ticket[0]] += 1
        queue.settle(running.popleft(), output_tokens=size)
        queue.release("r")

    before: dict[str, int] = defaultdict(int)
    enter("back")
    for _ in range(draw.randint(100, 300)):
        enter("here")
        enter("here")
        turn(before)
    for _ in range(200):
        enter("back")
    seen: dict[str, int] = defaultdict(int)
    for _ in range(100):
        enter("here")
        turn(seen)
    assert abs(seen["back"] - seen["here"]) <= 2, f"seed {seed}: {dict(seen)}"


class Stopping:
    """Requests that come, and run until they are stopped for others; none of them ever ends."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.queue: FairQueue[int] = FairQueue(BOUNDS, QueuePolicy(quantum=draw.choice((0.0, 50.0))))
        self.queue.add("r", capacity=draw.randint(2, 8))
        self.weights = {name: draw.choice((0.5, 1.0, 4.0)) for name in "abcd"}
        self.asked: list[tuple[str, float]] = []
        """By ticket: its tenant and its cost by weight."""
        self.running: set[int] = set()
        self.waiting: set[int] = set()

    def enter(self) -> None:
        tenant = self.draw.choice("aaabcd")
        weight = self.weights[tenant]
        demand = Demand(
            prompt_tokens=self.draw.choice((1, 10, 300)),
            expected_output_tokens=self.draw.choice((0, 5, 200)),
            weight=weight,
            gate=self.draw.choice((None, "gate")),
        )
        ticket = len(self.asked)
        self.asked.append((tenant, cost(demand) / weight))
        self.waiting.add(ticket)
        self.queue.enter(ticket, tenant=tenant, tokens=1, demand=demand)

    def dispatch(self) -> list[int]:
        granted = [ticket for ticket, _ in self.queue.dispatch()]
        self.running |= set(granted)
        self.waiting -= set(granted)
        return granted

    def share(self, tenant: str) -> float:
        return sum(self.asked[ticket][1] for ticket in self.running if self.asked[ticket][0] == tenant)

    def stop(self, victim: int, favoured: int) -> None:
        (over, gone), (under, more) = self.asked[victim], self.asked[favoured]
        assert over != under
        assert self.share(over) - gone >= self.share(under) + more - 1e-6, "it has less than the other now"
        assert victim == max(ticket for ticket in self.running if self.asked[ticket][0] == over)
        self.queue.preempted(victim, "r", tokens=1, output_tokens=0, in_favour_of=favoured)
        self.running.remove(victim)
        self.waiting.add(victim)
        assert self.dispatch() == [favoured], "another had the place"

    def check_nobody_is_missed(self) -> None:
        """A tenant without anything running, whose every request is smaller than what another would be left with."""
        quantum = self.queue.policy.quantum
        for under in "bcd":
            costs = [self.asked[ticket][1] for ticket in self.waiting if self.asked[ticket][0] == under]
            counter = self.queue.counters.get(under)
            if not costs or self.share(under) or counter is None:
                continue
            mine = [ticket for ticket in self.running if self.asked[ticket][0] == "a"]
            over = self.queue.counters.get("a")
            newest = self.asked[max(mine)][1] if mine else 0.0
            if len(mine) > 1 and over is not None and over.value + newest >= counter.value + 1e-6:
                left = self.share("a") - newest
                assert left < max(costs) + quantum + 1e-6, f"{under} waits beside a flood"


def check_stopping(seed: int) -> None:
    """Whoever is stopped leaves its tenant with no less than the other has then; so nobody is stopped for ever."""
    world = Stopping(seed)
    for _ in range(40):
        world.enter()
        world.dispatch()
        stopped: set[tuple[str, str]] = set()
        for _ in range(len(world.asked) + 1):
            found = world.queue.preemption()
            if found is None:
                break
            over, under = (world.asked[ticket][0] for ticket in found)
            assert (under, over) not in stopped, f"seed {seed}: {over} and {under} stop each other in turn"
            stopped.add((over, under))
            world.stop(*found)
        else:
            raise AssertionError(f"seed {seed}: they are stopped for ever")
        world.check_nobody_is_missed()
