"""Measures of fairness: the Jain index, percentiles of waits, differences of service. Pure."""

from collections.abc import Iterable, Mapping, Sequence


def jain_index(shares: Iterable[float]) -> float:
    """1 if all are equal, 1/n if one has everything (Jain, Chiu, Hawe 1984). 1 for nobody, or nothing at all.

    For tenants with weights, give what each got divided by its weight.
    """
    values = list(shares)
    squares = sum(value * value for value in values)
    if squares == 0:
        return 1.0
    return sum(values) ** 2 / (len(values) * squares)


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Of values in ascending order, the smallest that at least this fraction does not exceed. 0 for none."""
    assert 0 <= fraction <= 1
    if not ordered:
        return 0.0
    # Counted in millionths, so that 0.99 of 100 values is the 99th and not, by rounding, the 100th.
    place = -(-len(ordered) * round(fraction * 1_000_000) // 1_000_000)
    return ordered[max(place - 1, 0)]


def wait_percentiles(
    waits_us: Mapping[str, Iterable[int]], fractions: Sequence[float] = (0.5, 0.9, 0.99)
) -> dict[str, list[float]]:
    """Microseconds that so large a part of each tenant's requests did not wait longer than; by tenant, in the order of
    the fractions. A tenant without waits is left out."""
    ordered = {tenant: sorted(waits) for tenant, waits in waits_us.items()}
    return {
        tenant: [percentile(waits, fraction) for fraction in fractions]
        for tenant, waits in ordered.items()
        if waits
    }


def service_difference(served: Sequence[float], requested: Sequence[float]) -> float:
    """How far the tenants are behind the best served of them, as far as they asked for more.

    Both are rates of cost over the same window, by tenant. `sum_j min(max_i s_i - s_j, |r_j - s_j|)`, the
    measure of the artifact of "Fairness in Serving Large Language Models" (OSDI 2024).
    """
    best = max(served, default=0.0)
    return sum(min(best - mine, abs(asked - mine)) for mine, asked in zip(served, requested, strict=True))


def accumulated_difference(served: Iterable[float]) -> float:
    """Between the best and the least served, of service accumulated so far."""
    values = list(served)
    return max(values) - min(values) if values else 0.0
