"""A run over time, and its waits in order: what can be drawn of it."""

import msgspec
import numpy as np

from headrace.simulate.measure import Timeline, Times, Window
from headrace.simulate.outcome import Outcome

OTHERS = "others"


class TenantCurves(msgspec.Struct, frozen=True):
    """A tenant, or several together."""

    tenant: str
    service_per_s: Times
    """Cost served per second at each time of `Curves`, an average over the window's width around it. Shape (times,)."""
    ttft_s: Times
    """Of all that were served, in order of size. Shape (served,)."""


class Curves(msgspec.Struct, frozen=True):
    """Of one run."""

    name: str
    times_s: Times
    """Shape (times,)."""
    tenants: list[TenantCurves]


def most_served(outcome: Outcome, count: int) -> list[str]:
    """The tenants that asked for most, first the one with most: at most so many."""
    line = Timeline(outcome)
    asked = line.requested(0.0, np.inf)
    order = sorted(range(len(line.names)), key=lambda number: (-asked[number], line.names[number]))
    return [line.names[number] for number in order[:count]]


def curves(outcome: Outcome, window: Window, tenants: list[str]) -> Curves:
    """Of these tenants, and under the name of `others` of all others together, if there are any."""
    line = Timeline(outcome)
    half_s = window.width_s / 2
    times_s = np.arange(half_s, window.duration_s, window.step_s)
    if not len(times_s):
        times_s = np.array([window.duration_s / 2])
    each = np.array(
        [
            line.service(max(at - half_s, 0.0), min(at + half_s, window.duration_s))
            / (min(at + half_s, window.duration_s) - max(at - half_s, 0.0))
            for at in times_s
        ]
    )
    ttft_s = line.first - line.arrival
    found = []
    for tenant in tenants:
        number = line.names.index(tenant)
        is_its = line.is_served & (line.tenant == number)
        found.append(TenantCurves(tenant, each[:, number], np.sort(ttft_s[is_its])))
    rest = [number for number, name in enumerate(line.names) if name not in tenants]
    if rest:
        is_its = line.is_served & np.isin(line.tenant, rest)
        found.append(TenantCurves(OTHERS, each[:, rest].sum(axis=1), np.sort(ttft_s[is_its])))
    return Curves(outcome.setup.name, times_s, found)
