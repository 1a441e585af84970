"""What the fair queue costs: microseconds for one accept and one dispatch, by tenants and queued requests.

    .venv/bin/python -m benchmarks.fair_queue [--rounds 20000]

A round enters a request of a random tenant, settles and releases one that runs, and grants one place. The
queue keeps its length. `alone`: the same where nobody waits, so that each request is granted at once. Processor time
of one thread, the least of five runs, collector of garbage as a server sets it. Prints one JSON object.
"""

import argparse
import json
import platform
import random
import time
from collections import deque

from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import POLICIES, Demand, PolicyName, QueuePolicy
from headrace.scheduling.queue_bounds import QueueBounds
from headrace.telemetry.process import quieten_garbage_collection

SIZES = ((10, 100), (100, 1_000), (1_000, 10_000), (10_000, 100_000), (20_000, 400_000))
"""(tenants, queued requests)"""
PLACES = 64
ANY = 10**12


def measure(policy: PolicyName, tenants: int, queued: int, rounds: int) -> float:
    """Microseconds a round."""
    draw = random.Random(7)
    bounds = QueueBounds(length=ANY, tokens=ANY, tenant_length=ANY, tenant_tokens=ANY)
    queue: FairQueue[int] = FairQueue(bounds, QueuePolicy(name=policy, batch_floor=0.1))
    queue.add("r", capacity=PLACES)
    demands = [
        Demand(
            prompt_tokens=draw.randint(10, 2000),
            expected_output_tokens=draw.randint(1, 500),
            weight=draw.choice((1.0, 1.0, 3.0)),
            service_class=draw.choice(("interactive", "interactive", "batch")),
            gate="stream",
        )
        for _ in range(1000)
    ]
    names = [f"tenant-{number}" for number in range(tenants)]
    running: deque[int] = deque()

    def enter(ticket: int) -> None:
        demand = demands[ticket % 1000]
        queue.enter(
            ticket, tenant=draw.choice(names), tokens=demand.prompt_tokens, demand=demand, now_us=ticket * 100
        )

    for ticket in range(queued + PLACES):
        enter(ticket)
    running.extend(ticket for ticket, _ in queue.dispatch())
    began = time.thread_time()
    for ticket in range(queued + PLACES, queued + PLACES + rounds):
        enter(ticket)
        queue.settle(running.popleft(), output_tokens=ticket % 400)
        queue.release("r")
        running.extend(granted for granted, _ in queue.dispatch(lambda ticket: True))
    return (time.thread_time() - began) / rounds * 1e6


def alone_us(tenants: int, rounds: int) -> float:
    """Microseconds from entering to release, where nobody waits."""
    queue: FairQueue[int] = FairQueue(
        QueueBounds(length=ANY, tokens=ANY, tenant_length=ANY, tenant_tokens=ANY)
    )
    queue.add("r", capacity=PLACES)
    demand = Demand(prompt_tokens=100, expected_output_tokens=50)
    names = [f"tenant-{number}" for number in range(tenants)]
    began = time.thread_time()
    for ticket in range(rounds):
        queue.enter(ticket, tenant=names[ticket % tenants], tokens=150, demand=demand, now_us=ticket * 100)
        assert list(queue.dispatch(lambda ticket: True)) == [(ticket, "r")]
        queue.settle(ticket, output_tokens=40)
        queue.release("r")
    return (time.thread_time() - began) / rounds * 1e6


def main() -> None:
    quieten_garbage_collection()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    arguments = parser.parse_args()
    results = [
        {
            "policy": policy,
            "tenants": tenants,
            "queued": queued,
            "us": round(min(measure(policy, tenants, queued, arguments.rounds) for _ in range(5)), 2),
        }
        for policy in POLICIES
        for tenants, queued in SIZES
    ]
    alone = [
        {"tenants": tenants, "us": round(min(alone_us(tenants, arguments.rounds) for _ in range(5)), 2)}
        for tenants in (1, 1_000)
    ]
    print(json.dumps({"python": platform.python_version(), "alone": alone, "results": results}, indent=2))


if __name__ == "__main__":
    main()
