"""What a run amounts to: waits, service of each tenant, fairness, use of the fleet."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.scheduling.fairness import (
    accumulated_difference,
    jain_index,
    percentile,
    service_difference,
)
from headrace.scheduling.policy import TokenPrices
from headrace.simulate.outcome import Outcome

Times = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

SERVICE_PRICES = TokenPrices(input=1.0, output=2.0, cached_input=1.0)
"""Service is always counted like this, whatever the policy charges, so that policies can be compared."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """When what is measured, in seconds from the first arrival."""

    duration_s: float
    """Measures over time end here."""
    warm_up_s: float = 60.0
    """Requests that came before, and service before, do not count."""
    width_s: float = 60.0
    """Of the windows in which tenants' service is compared."""
    step_s: float = 30.0


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; all 0 if there is nothing to measure."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    weight: float
    requests: int
    served: int
    refused: int
    service_per_s: float
    """Cost served per second of the window."""
    wait_s: Spread
    """In the queue, also after it was stopped for another."""
    ttft_s: Spread
    """From arrival to the first token."""
    latency_s: Spread
    """From arrival to the last token."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers."""

    name: str
    requests: int
    served: int
    refused: int
    end_s: float
    throughput_tokens_per_s: float
    """Prompt and answer tokens of all that were served, by the time the last one ended."""
    preemptions: int
    lost_tokens: int
    """Computed before a request was stopped, and again after it."""
    wait_s: Spread
    ttft_s: Spread
    latency_s: Spread
    difference_max: float
    difference_mean: float
    difference_variance: float
    """Of the service difference in cost per second over the windows (`headrace.scheduling.fairness`)."""
    accumulated_difference: float
    """Greatest difference of service by weight since the warm-up between any two tenants."""
    jain: float
    """Of service by weight in the window, over tenants that asked for anything."""
    busy_share: float | None
    slot_share: float | None
    hit_share: float
    """Part of all prompt tokens that came out of a prefix cache."""
    worker_hours: float | None
    """Of all workers, from the first arrival until the last one was served. None where nobody knows."""
    cost: float | None
    """Of these hours, in whatever the price was. None without a price."""
    cost_per_million_tokens: float | None
    """Prompt and answer tokens of all that were served."""
    tenants: list[TenantFigures]


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    return Spread(
        count=len(ordered),
        mean=sum(ordered) / len(ordered) if ordered else 0.0,
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        max=ordered[-1] if ordered else 0.0,
    )


class Timeline:
    """When each tenant was served, and asked, how much."""

    def __init__(self, outcome: Outcome) -> None:
        arrivals, served = outcome.arrivals, outcome.served
        self.names = sorted({arrival.tenant for arrival in arrivals})
        index = {name: number for number, name in enumerate(self.names)}
        self.tenant = np.array([index[arrival.tenant] for arrival in arrivals], dtype=np.int64)
        self.arrival = _seconds([arrival.arrival_us for arrival in arrivals])
        self.first = _seconds([one.first_us for one in served])
        self.last = _seconds([one.last_us for one in served])
        self.wait = _seconds([one.waited_us for one in served])
        self.is_served = self.last > 0
        self.cost = np.array(
            [
                SERVICE_PRICES.cost(prompt_tokens=arrival.prompt_tokens, output_tokens=arrival.output_tokens)
                for arrival in arrivals
            ]
        )
        weights = {arrival.tenant: arrival.weight for arrival in arrivals}
        self.weights = np.array([weights[name] for name in self.names])

    def service(self, begin_s: float, end_s: float) -> Times:
        """Cost served to each tenant in this time, that of a request spread evenly from its first to its last token."""
        length = np.maximum(self.last - self.first, 1e-9)
        within = np.minimum(self.last, end_s) - np.maximum(self.first, begin_s)
        part = np.where(self.is_served, np.clip(within / length, 0.0, 1.0), 0.0)
        at_once = self.is_served & (self.last - self.first < 1e-6)
        part = np.where(at_once, (self.first >= begin_s) & (self.first < end_s), part)
        return self._by_tenant(part * self.cost)

    def requested(self, begin_s: float, end_s: float) -> Times:
        is_within = (self.arrival >= begin_s) & (self.arrival < end_s)
        return self._by_tenant(is_within * self.cost)

    def _by_tenant(self, amounts: Times) -> Times:
        return np.bincount(self.tenant, amounts, minlength=len(self.names)).astype(np.float64)


def measure(outcome: Outcome, window: Window, *, price_per_hour: float | None = None) -> Figures:
    """All figures of a run. The price is a worker's."""
    line = Timeline(outcome)
    differences, accumulated = _over_time(line, window)
    counted = line.is_served & (line.arrival >= _warm_up(line, window))
    ttft, latency = line.first - line.arrival, line.last - line.arrival
    served_per_s = line.service(window.warm_up_s, window.duration_s) / max(
        window.duration_s - window.warm_up_s, 1e-9
    )
    is_refused = np.array([one.is_refused for one in outcome.served], dtype=bool)
    prompt_tokens = sum(arrival.prompt_tokens for arrival in outcome.arrivals)
    tokens = sum(
        arrival.prompt_tokens + arrival.output_tokens
        for arrival, one in zip(outcome.arrivals, outcome.served, strict=True)
        if one.last_us
    )
    end_s = outcome.end_us / 1e6
    # Of what a server did, nobody knows with how many workers.
    worker_hours = None if outcome.busy_share is None else outcome.setup.workers * end_s / 3600
    cost = None if worker_hours is None or price_per_hour is None else worker_hours * price_per_hour
    return Figures(
        name=outcome.setup.name,
        requests=len(outcome.arrivals),
        served=int(line.is_served.sum()),
        refused=int(is_refused.sum()),
        end_s=end_s,
        throughput_tokens_per_s=tokens / max(end_s, 1e-9),
        preemptions=sum(one.num_preemptions for one in outcome.served),
        lost_tokens=sum(one.lost_tokens for one in outcome.served),
        wait_s=spread(line.wait[counted].tolist()),
        ttft_s=spread(ttft[counted].tolist()),
        latency_s=spread(latency[counted].tolist()),
        difference_max=max(differences, default=0.0),
        difference_mean=float(np.mean(differences)) if differences else 0.0,
        difference_variance=float(np.var(differences)) if differences else 0.0,
        accumulated_difference=accumulated,
        jain=jain_index((served_per_s / line.weights).tolist()),
        busy_share=outcome.busy_share,
        slot_share=outcome.slot_share,
        hit_share=sum(one.cached_tokens for one in outcome.served) / max(prompt_tokens, 1),
        worker_hours=worker_hours,
        cost=cost,
        cost_per_million_tokens=None if cost is None or not tokens else 1e6 * cost / tokens,
        tenants=[
            _tenant(line, number, counted, is_refused, float(served_per_s[number]))
            for number in range(len(line.names))
        ],
    )


def _tenant(
    line: Timeline, number: int, counted: Flags, is_refused: Flags, service_per_s: float
) -> TenantFigures:
    is_its = line.tenant == number
    shown = counted & is_its
    return TenantFigures(
        tenant=line.names[number],
        weight=float(line.weights[number]),
        requests=int(is_its.sum()),
        served=int((line.is_served & is_its).sum()),
        refused=int((is_refused & is_its).sum()),
        service_per_s=service_per_s,
        wait_s=spread(line.wait[shown].tolist()),
        ttft_s=spread((line.first - line.arrival)[shown].tolist()),
        latency_s=spread((line.last - line.arrival)[shown].tolist()),
    )


def _warm_up(line: Timeline, window: Window) -> float:
    """None for a trace that is shorter than its warm-up."""
    return window.warm_up_s if len(line.arrival) and line.arrival[-1] > window.warm_up_s else 0.0


def _over_time(line: Timeline, window: Window) -> tuple[list[float], float]:
    """(service difference at each tick, greatest accumulated difference). The first window begins a step after
    the beginning; the last one is half outside, as in the published measure. Service accumulates from the beginning
    of the first window to that of each."""
    half = window.width_s / 2
    differences, accumulated = [], 0.0
    tick = window.step_s + half
    while tick <= window.duration_s + 1e-9:
        begin, end = tick - half, min(tick + half, window.duration_s)
        served = line.service(begin, end) / window.width_s
        asked = line.requested(begin, end) / window.width_s
        differences.append(service_difference(served.tolist(), asked.tolist()))
        since = line.service(window.step_s, begin) / line.weights
        accumulated = max(accumulated, accumulated_difference(since.tolist()))
        tick += window.step_s
    return differences, accumulated


def _seconds(times_us: list[int]) -> Times:
    return np.array(times_us, dtype=np.float64) / 1e6
