"""Runs side by side, tenant by tenant, and what changes from the first simulated one to each other."""

from collections.abc import Sequence

import msgspec

from headrace.simulate.measure import Figures, Spread, TenantFigures


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant, or all of them, in one run. Waits in seconds, None if nothing was served; service in cost
    per second."""

    run: str
    served: int
    wait_s_p50: float | None
    wait_s_p95: float | None
    ttft_s_p50: float | None
    ttft_s_p95: float | None
    service_per_s: float
    jain: float | None = None
    """Of all tenants only."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """This run less the base."""

    run: str
    wait_s_p50: float | None
    wait_s_p95: float | None
    ttft_s_p50: float | None
    ttft_s_p95: float | None
    service_per_s: float
    jain: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant in all runs."""

    tenant: str | None
    """None: all tenants."""
    requests: int
    runs: list[Compared]
    changes: list[Change]
    """Of every run but the base, in their order."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    base: str
    tenants: list[Row]
    """First all together, then each, who was served most in the base first."""


CHANGED = ("wait_s_p50", "wait_s_p95", "ttft_s_p50", "ttft_s_p95", "service_per_s")
"""Fields that every line has."""


def compare(runs: Sequence[Figures], *, base: int = 0) -> Comparison:
    """`base` is the run that the others are measured against. All must be of the same requests."""
    by_tenant = [{one.tenant: one for one in figures.tenants} for figures in runs]
    order = sorted(runs[base].tenants, key=lambda one: (-one.service_per_s, one.tenant))
    return Comparison(
        base=runs[base].name,
        tenants=[
            _row(None, runs[base].requests, [_all(figures) for figures in runs], base),
            *(
                _row(
                    one.tenant,
                    one.requests,
                    [
                        _one(figures.name, tenants[one.tenant])
                        for figures, tenants in zip(runs, by_tenant, strict=True)
                    ],
                    base,
                )
                for one in order
            ),
        ],
    )


def _row(tenant: str | None, requests: int, runs: list[Compared], base: int) -> Row:
    return Row(
        tenant=tenant,
        requests=requests,
        runs=runs,
        changes=[_change(one, runs[base]) for place, one in enumerate(runs) if place != base],
    )


def _change(one: Compared, base: Compared) -> Change:
    return Change(
        run=one.run,
        **{name: _less(getattr(one, name), getattr(base, name)) for name in CHANGED},  # type: ignore[arg-type]
        jain=_less(one.jain, base.jain),
    )


def _one(run: str, figures: TenantFigures) -> Compared:
    return Compared(
        run=run,
        served=figures.served,
        wait_s_p50=_known(figures.wait_s, figures.wait_s.p50),
        wait_s_p95=_known(figures.wait_s, figures.wait_s.p95),
        ttft_s_p50=_known(figures.ttft_s, figures.ttft_s.p50),
        ttft_s_p95=_known(figures.ttft_s, figures.ttft_s.p95),
        service_per_s=figures.service_per_s,
    )


def _all(figures: Figures) -> Compared:
    return Compared(
        run=figures.name,
        served=figures.served,
        wait_s_p50=_known(figures.wait_s, figures.wait_s.p50),
        wait_s_p95=_known(figures.wait_s, figures.wait_s.p95),
        ttft_s_p50=_known(figures.ttft_s, figures.ttft_s.p50),
        ttft_s_p95=_known(figures.ttft_s, figures.ttft_s.p95),
        service_per_s=sum(one.service_per_s for one in figures.tenants),
        jain=figures.jain,
    )


def _less(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _known(spread: Spread, value: float) -> float | None:
    return value if spread.count else None
