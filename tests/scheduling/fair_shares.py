"""What tenants get over a whole run of a queue, checked from outside: shares, waits, returns."""

import random
from collections import defaultdict, deque

from headrace.scheduling.dispatch import QueueBounds
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.locality import Warmth
from headrace.scheduling.policy import Demand, QueuePolicy

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
