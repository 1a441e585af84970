"""Histories of a fair queue over time: tenants come and go, requests are cancelled, replicas crash, refuse and come back.

    python -m tests.scheduling.fair_histories [--seeds 10000] [--start 0] [--bugs]

A seed is a history. `--bugs` then plants bugs in the queue, one at a time (`fair_bugs`), and says after how many seeds each
is found. The exit status is 0 if nothing is found without a bug and every bug is found.

What must be true does not come from the queue: what each tenant was charged is kept here, too.
"""

import argparse
import heapq
import random
import sys
from dataclasses import dataclass

from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import Demand, QueuePolicy
from tests.scheduling.fair_bugs import planted
from tests.scheduling.fair_shares import BOUNDS

BUGS = ("no-lift", "swapped-weights", "charged-at-the-end")
SECOND_US = 1_000_000
HISTORY_US = 60 * SECOND_US
"""Until then everything comes. Then everything ends."""
TOKENS_PER_SECOND = 40
CLOSE = 1e-6


class Violation(AssertionError):
    """Something is not as it must be."""


@dataclass
class Tenant:
    weight: float
    rate_rps: float
    away_s: tuple[float, float]
    """It sends until the first time and again from the second one on."""


@dataclass
class Request:
    tenant: str
    demand: Demand
    output: int
    """So long will its answer be."""
    charged: float = 0.0
    replica: str = ""
    life: int = 0
    """Of its replica, when it was granted."""
    attempt: int = 0
    started_us: int = 0
    is_first: bool = False
    """It was put back: next, whatever the counters say."""


def cost(prompt: int, cached: int, output: int) -> float:
    """The prices once more, so that the queue's own do not vouch for themselves."""
    return prompt - cached + 0.1 * cached + 2 * output


class History:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(f"history {seed}")
        self.now_us = 0
        self.events: list[tuple[int, int, str, object]] = []
        self.order = 0
        self.happened: dict[str, int] = {}
        self.queue: FairQueue[int] = FairQueue(
            BOUNDS, QueuePolicy(idle_tenants_max=draw.choice((0, 1, 1000)))
        )
        self.capacity = {f"r{number}": draw.randint(1, 3) for number in range(draw.randint(1, 3))}
        self.life = dict.fromkeys(self.capacity, 0)
        self.down: set[str] = set()
        self.full: set[str] = set()
        for name, capacity in self.capacity.items():
            self.queue.add(name, capacity=capacity)
            self.later(draw.expovariate(1 / 20), "crash", name)
        places = sum(self.capacity.values())
        self.tenants = {name: self._tenant(places) for name in "abcde"[: draw.randint(2, 5)]}
        for name in self.tenants:
            self.later(draw.uniform(0, 5), "send", name)
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.counter: dict[str, float] = {}
        """What each tenant's has to be. Never forgotten here."""
        self.number = 0

    def _tenant(self, places: int) -> Tenant:
        draw = self.draw
        away_s = draw.uniform(5, 50)
        return Tenant(
            weight=draw.choice((1.0, 1.0, 2.0, 5.0)),
            rate_rps=places * draw.choice((0.05, 0.3, 1.0)),
            away_s=(away_s, away_s + draw.expovariate(1 / 10)),
        )

    def later(self, seconds: float, kind: str, what: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now_us + round(seconds * SECOND_US), self.order, kind, what))

    def run(self) -> None:
        """Raises `Violation`, or whatever the queue's own assertions do."""
        while self.events:
            self.now_us, _, kind, what = heapq.heappop(self.events)
            self.queue.advance(self.now_us)
            getattr(self, kind)(what)
            self.happened[kind] = self.happened.get(kind, 0) + 1
            self.dispatch()
            self.check()
        if self.waiting or self.running or self.queue.num_waiting or self.queue.num_running:
            raise Violation(f"at the end {len(self.waiting)} wait and {len(self.running)} run")

    # --- what happens -------------------------------------------------------------------------------

    def send(self, name: object) -> None:
        assert isinstance(name, str)
        if self.now_us > HISTORY_US:
            return
        tenant, draw = self.tenants[name], self.draw
        self.later(draw.expovariate(tenant.rate_rps), "send", name)
        if tenant.away_s[0] <= self.now_us / SECOND_US < tenant.away_s[1]:
            return
        prompt, output = draw.randint(1, 200), draw.randint(1, 200)
        demand = Demand(
            prompt_tokens=prompt,
            expected_output_tokens=round(output * draw.choice((0.0, 0.5, 1.0, 2.0))),
            cached_tokens=draw.choice((0, prompt // 2)),
            weight=tenant.weight,
        )
        self.number += 1
        had_waiting = {request.tenant for request in self.waiting.values()}
        self.queue.enter(self.number, tenant=name, tokens=prompt + output, demand=demand, now_us=self.now_us)
        self.waiting[self.number] = Request(name, demand, output)
        self.check_lift(name, had_waiting)
        if draw.random() < 0.15:
            self.later(draw.expovariate(1 / 3), "cancel", self.number)

    def end(self, what: object) -> None:
        assert isinstance(what, tuple)
        ticket, attempt = what
        request = self.running.get(ticket)
        if request is not None and request.attempt == attempt:
            self.finish(ticket, request, request.output)

    def cancel(self, ticket: object) -> None:
        assert isinstance(ticket, int)
        if ticket in self.waiting:
            del self.waiting[ticket]
            if not self.queue.leave(ticket):
                raise Violation(f"{ticket} waited, and the queue does not know it")
        elif ticket in self.running:
            request = self.running[ticket]
            self.finish(ticket, request, self.computed(request))

    def crash(self, name: object) -> None:
        """What ran there ends with what it had. It comes back."""
        assert isinstance(name, str)
        if self.now_us > HISTORY_US:
            return
        self.down.add(name)
        self.full.discard(name)
        self.life[name] += 1
        self.queue.expect(name)
        self.queue.give_up(name)
        self.queue.expect(name)
        lost = [ticket for ticket, request in self.running.items() if request.replica == name]
        self.draw.shuffle(lost)
        for ticket in lost:
            self.finish(ticket, self.running[ticket], self.computed(self.running[ticket]))
        self.later(self.draw.uniform(0.1, 5), "come_back", name)

    def come_back(self, name: object) -> None:
        assert isinstance(name, str)
        self.down.discard(name)
        self.queue.add(name, capacity=self.capacity[name])
        self.later(self.draw.expovariate(1 / 20), "crash", name)

    def have_room(self, name: object) -> None:
        assert isinstance(name, str)
        self.full.discard(name)
        self.queue.pause(name, is_paused=False)

    def refuse(self, ticket: int, request: Request) -> None:
        """The replica was full itself."""
        self.happened["refuse"] = self.happened.get("refuse", 0) + 1
        self.full.add(request.replica)
        self.queue.pause(request.replica, is_paused=True)
        self.later(self.draw.uniform(0.1, 2), "have_room", request.replica)
        del self.running[ticket]
        tokens = request.demand.prompt_tokens + request.output
        self.queue.put_back(ticket, request.replica, tenant=request.tenant, tokens=tokens)
        self.charge(request, 0.0)
        request.is_first = True
        self.waiting[ticket] = request

    # --- what the queue decides ---------------------------------------------------------------------

    def dispatch(self) -> None:
        while self.grant():
            pass  # what one replica has refused may go to another

    def grant(self) -> bool:
        """Whether a replica has refused anything."""
        refused: list[int] = []
        for ticket, replica in self.queue.dispatch(now_us=self.now_us):
            request = self.waiting.pop(ticket)
            self.check_grant(request, replica)
            request.replica, request.life = replica, self.life[replica]
            request.is_first = False
            request.attempt += 1
            request.started_us = self.now_us
            demand = request.demand
            self.charge(
                request, cost(demand.prompt_tokens, demand.cached_tokens, demand.expected_output_tokens)
            )
            self.running[ticket] = request
            if self.draw.random() < 0.03:
                refused.append(ticket)
            self.later(request.output / TOKENS_PER_SECOND, "end", (ticket, request.attempt))
        for ticket in refused:
            if self.running[ticket].replica not in self.full:
                self.refuse(ticket, self.running[ticket])
        return bool(refused)

    def computed(self, request: Request) -> int:
        seconds = (self.now_us - request.started_us) / SECOND_US
        return min(int(seconds * TOKENS_PER_SECOND), request.output)

    def finish(self, ticket: int, request: Request, output: int) -> None:
        del self.running[ticket]
        self.queue.settle(ticket, output_tokens=output)
        if self.life[request.replica] == request.life:
            self.queue.release(request.replica)
        self.charge(request, cost(request.demand.prompt_tokens, request.demand.cached_tokens, output))

    def charge(self, request: Request, total: float) -> None:
        weight = self.tenants[request.tenant].weight
        self.counter[request.tenant] += (total - request.charged) / weight
        request.charged = total

    # --- what must be true --------------------------------------------------------------------------

    def check_lift(self, name: str, had_waiting: set[str]) -> None:
        found = self.queue.counters.get(name)
        if found is None:
            raise Violation(f"{name} waits and has no counter")
        owed = self.counter.get(name)
        if name in had_waiting:
            if owed is None or abs(found.value - owed) > CLOSE:
                raise Violation(f"{name}'s counter moved when it sent more: {found.value:g}, not {owed}")
        else:
            if owed is not None and found.value < owed - CLOSE:
                raise Violation(f"{name}'s debt was reset: {found.value:g}, not {owed:g}")
            lowest = min((self.counter[other] for other in had_waiting), default=None)
            if lowest is not None and found.value < lowest - CLOSE:
                raise Violation(f"{name} has credit for having been away: {found.value:g}, lowest {lowest:g}")
            highest = max((*self.counter.values(), self.queue.counters.base))
            if found.value > highest + CLOSE:
                raise Violation(f"{name} is punished: {found.value:g}, highest {highest:g}")
        self.counter[name] = found.value

    def check_grant(self, request: Request, replica: str) -> None:
        on_it = sum(one.replica == replica for one in self.running.values())
        if replica in self.down or replica in self.full or on_it >= self.capacity[replica]:
            raise Violation(f"{replica} was given a request and had no place")
        others = [one for one in self.waiting.values() if one.is_first]
        if request.is_first:
            return
        if others:
            raise Violation("one that was put back was passed")
        for one in self.waiting.values():
            if self.counter[one.tenant] < self.counter[request.tenant] - CLOSE:
                raise Violation(f"{request.tenant} was served before {one.tenant}, whose counter is lower")

    def check(self) -> None:
        free = {
            name: capacity - sum(one.replica == name for one in self.running.values())
            for name, capacity in self.capacity.items()
            if name not in self.down and name not in self.full
        }
        if self.waiting and any(free.values()):
            raise Violation(f"{len(self.waiting)} wait while places are free: {free}")
        if self.queue.num_waiting != len(self.waiting) or self.queue.num_running != len(self.running):
            raise Violation("requests are lost or doubled")
        for name, expected in self.counter.items():
            counter = self.queue.counters.get(name)
            if counter is not None and abs(counter.value - expected) > CLOSE * max(1.0, expected):
                raise Violation(f"{name} is charged {counter.value:g}, not {expected:g}")
            if counter is None and self.queue.counters.base < expected - CLOSE * max(1.0, expected):
                raise Violation(
                    f"{name} was forgotten and would start at {self.queue.counters.base:g}, owing {expected:g}"
                )


def violation(seed: int) -> str | None:
    """What this history finds."""
    try:
        History(seed).run()
    except (AssertionError, KeyError) as error:
        return f"seed {seed}: {str(error) or type(error).__name__}"
    return None


def first_violation(seeds: range) -> tuple[int, str | None]:
    """(seeds that were needed, what was found)"""
    for count, seed in enumerate(seeds, 1):
        found = violation(seed)
        if found is not None:
            return count, found
    return len(seeds), None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--bugs", action="store_true", help="then look for bugs planted on purpose")
    arguments = parser.parse_args()
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    count, found = first_violation(seeds)
    print(f"as it is: {count:,} histories, {found or 'nothing found'}", flush=True)
    is_right = found is None
    for bug in BUGS if arguments.bugs else ():
        with planted(bug):
            count, found = first_violation(seeds)
        print(
            f"{bug}: {f'found after {count:,}, {found}' if found else f'NOT FOUND in {count:,}'}", flush=True
        )
        is_right = is_right and found is not None
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
