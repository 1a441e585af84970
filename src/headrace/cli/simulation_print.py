"""What `headrace simulate` prints."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from headrace.simulate.compare import CHANGED, Comparison, Row
from headrace.simulate.measure import Figures, Spread
from headrace.simulate.recorded import Recorded
from headrace.simulate.replay import Replay
from headrace.simulate.tables import Line

TENANTS_SHOWN = 20


def print_figures(runs: Sequence[Figures]) -> None:
    """Every run's figures, a column for each."""
    rows = [
        ("", *(one.name for one in runs)),
        *(
            (name, *(show(getattr(one, name.partition(" ")[0])) for one in runs))
            for names, show in _SHOWN
            for name in names
            if name not in _ONLY_IF_KNOWN or any(getattr(one, name) is not None for one in runs)
        ),
    ]
    _print_columns(rows)


def print_comparison(comparison: Comparison) -> None:
    """Every tenant's waits and service in every run."""
    click.echo(f"\nby tenant (in brackets: compared with {comparison.base})")
    rows: list[tuple[str, ...]] = [
        ("tenant", "run", "served", "wait_s p50", "p95", "ttft_s p50", "p95", "service/s", "jain")
    ]
    shown = comparison.tenants[: TENANTS_SHOWN + 1]
    for row in shown:
        rows += _tenant(row, comparison.base)
    _print_columns(rows)
    if len(comparison.tenants) > len(shown):
        click.echo(f"and {len(comparison.tenants) - len(shown)} more; --json has them all")


def print_lines(lines: Sequence[Line]) -> None:
    """A table for each group of lines."""
    is_compared = any(line.published is not None for line in lines)
    columns = ("published", "expected", "obtained") if is_compared else ("obtained",)
    for table in dict.fromkeys(line.table for line in lines):
        click.echo(f"\n{table}")
        rows = [("run", "figure", *columns, "asked", "")]
        rows += [
            (
                line.run,
                line.figure,
                *(_number(getattr(line, column)) for column in columns),
                line.bound or "",
                "" if line.is_met is None else ("met" if line.is_met else "NOT MET"),
            )
            for line in lines
            if line.table == table
        ]
        _print_columns(rows)


def print_replay(found: Replay) -> None:
    """Whether a log was decided the same again."""
    first = found.first
    if first is None:
        click.echo(f"{found.policy}: all {found.requests:,} requests are decided as in the log")
        return
    click.echo(
        f"{found.policy}: {found.differing:,} of {found.requests:,} requests are decided differently\n"
        f"first, {first.at_us / 1e6:.6f} s after the first arrival: request {first.request:,}, of tenant {first.tenant},"
        f" which came at {first.arrival_us / 1e6:.6f} s:\n"
        f"  {first.field} is {_plain(first.logged)} in the log and {_plain(first.decided)} now"
    )


def summary_of(found: Recorded) -> str:
    """What of a ledger is replayed, in a line."""
    replayed = len(found.log.lines)
    parts = [f"{replayed:,} of {found.operations:,} requests in the ledger are replayed"]
    if found.aborted:
        parts.append(f"{found.aborted:,} of these ended early and come with what they used")
    if found.refused:
        parts.append(f"left out are {found.refused:,} that were refused")
    if found.uncounted:
        parts.append(
            f"{'and' if found.refused else 'left out are'} {found.uncounted:,} of which nothing was counted"
        )
    return "; ".join(parts)


def _tenant(row: Row, base: str) -> list[tuple[str, ...]]:
    changes = {one.run: one for one in row.changes}
    based = next(one for one in row.runs if one.run == base)
    lines = []
    for place, one in enumerate(row.runs):
        is_base = one.run not in changes
        cells = [
            _number(getattr(one, name))
            + ("" if is_base else _percent(getattr(one, name), getattr(based, name)))
            for name in CHANGED
        ]
        title = "all" if row.tenant is None else row.tenant
        jain = "" if one.jain is None else f"{one.jain:.3f}"
        lines.append(("" if place else title, one.run, f"{one.served:,}", *cells, jain))
    return lines


def _percent(value: float | None, base: float | None) -> str:
    if value is None or base is None:
        return ""
    if abs(value - base) < 0.005:
        return ""
    if base == 0 or abs(value / base) >= 10:
        return f" ({value - base:+,.1f})"
    percent = round(100 * (value / base - 1))
    return f" ({percent:+d} %)" if percent else ""


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def _plain(value: object) -> str:
    return "nothing" if value is None else str(value)


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spread(value: Spread) -> str:
    if not value.count:
        return "-"
    return " / ".join(_number(one) for one in (value.mean, value.p50, value.p95, value.p99, value.max))


_SHOWN: tuple[tuple[tuple[str, ...], Callable[[Any], str]], ...] = (
    (("requests", "served", "refused", "end_s", "throughput_tokens_per_s"), _number),
    (
        (
            "wait_s mean/p50/p95/p99/max",
            "ttft_s mean/p50/p95/p99/max",
            "latency_s mean/p50/p95/p99/max",
        ),
        _spread,
    ),
    (("difference_max", "difference_mean", "difference_variance", "accumulated_difference"), _number),
    (("preemptions", "lost_tokens"), _number),
    (("jain", "busy_share", "slot_share", "hit_share"), _share),
    (("worker_hours", "cost", "cost_per_million_tokens"), _money),
)
"""Figures of a run, and how each is printed."""
_ONLY_IF_KNOWN = ("cost", "cost_per_million_tokens")
