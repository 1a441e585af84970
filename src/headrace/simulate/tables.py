"""Tables of figures: what was published, what is expected, what is asked, and what a run gives."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from headrace.scheduling.policy import PolicyName, QueuePolicy
from headrace.simulate.engine import EngineModel
from headrace.simulate.fleet import simulate
from headrace.simulate.measure import Figures, Window, measure
from headrace.simulate.outcome import Prediction, Setup
from headrace.simulate.workload import LOADS, Arrival, merged

REAL_TRACE = "real trace"
"""Instead of a load: the trace that comes in as an argument."""
PUBLISHED_ENGINE = EngineModel(slots=1024, prefill="whole", steps_per_round=10, has_lookahead=True)
"""S-LoRA on an A10G with Llama-2-7B, 10 000 tokens of memory, answers' lengths known to its memory planning."""

Bound = tuple[Literal["<=", ">="], float]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, three times."""

    figure: str
    published: float | None = None
    expected: float | None = None
    """Of the independent simulator."""
    bound: Bound | None = None
    """What is asked of headrace."""
    read: Callable[[Figures, Figures], float]
    """From this run, and from the first run of its table (first in, first out)."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    policy: PolicyName
    prediction: Prediction
    rows: Sequence[Row]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    load: str
    """A synthetic load, or `REAL_TRACE`."""
    duration_s: float
    window: Window
    runs: Sequence[Run]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the report."""

    table: str
    run: str
    figure: str
    published: float | None
    expected: float | None
    obtained: float
    bound: str | None
    is_met: bool | None


def difference(name: Literal["max", "mean", "variance"]) -> Callable[[Figures, Figures], float]:
    def read(figures: Figures, _: Figures) -> float:
        return float(getattr(figures, f"difference_{name}"))

    return read


def throughput(figures: Figures, _: Figures) -> float:
    return figures.throughput_tokens_per_s


def throughput_ratio(figures: Figures, first: Figures) -> float:
    return 100 * figures.throughput_tokens_per_s / first.throughput_tokens_per_s


def accumulated(figures: Figures, _: Figures) -> float:
    return figures.accumulated_difference


def ttft_all(figures: Figures, _: Figures) -> float:
    return figures.ttft_s.mean


def ttft_p99(figures: Figures, _: Figures) -> float:
    return figures.ttft_s.p99


def service(tenant: int) -> Callable[[Figures, Figures], float]:
    return lambda figures, _: figures.tenants[tenant].service_per_s


def ttft(tenant: int) -> Callable[[Figures, Figures], float]:
    return lambda figures, _: figures.tenants[tenant].ttft_s.mean


def off_share(figures: Figures, _: Figures) -> float:
    """Percent that the tenant furthest from its weighted share is away from it."""
    total = sum(one.service_per_s for one in figures.tenants)
    weights = sum(one.weight for one in figures.tenants)
    return max(abs(100 * one.service_per_s * weights / (total * one.weight) - 100) for one in figures.tenants)


def rerun(tables: Iterable[Table], real_trace: Sequence[Arrival] | None) -> Iterator[Line]:
    """Run all tables, and read their figures. Without the trace its table is left out."""
    for table in tables:
        if table.load == REAL_TRACE:
            if real_trace is None:
                continue
            arrivals = list(real_trace)
        else:
            arrivals = merged(LOADS[table.load](), table.duration_s)
        first: Figures | None = None
        for run in table.runs:
            setup = Setup(
                name=run.name,
                policy=QueuePolicy(name=run.policy),
                prediction=run.prediction,
                engine=PUBLISHED_ENGINE,
            )
            figures = measure(simulate(setup, arrivals), table.window)
            first = first or figures
            for row in run.rows:
                yield line_of(
                    table.name,
                    run.name,
                    row.figure,
                    row.read(figures, first),
                    published=row.published,
                    expected=row.expected,
                    bound=row.bound,
                )


def line_of(
    table: str,
    run: str,
    figure: str,
    obtained: float,
    *,
    published: float | None = None,
    expected: float | None = None,
    bound: Bound | None = None,
) -> Line:
    """A line, and whether its bound is met."""
    asked, is_met = None, None
    if bound is not None:
        sign, limit = bound
        asked = f"{sign} {limit:g}"
        is_met = obtained <= limit if sign == "<=" else obtained >= limit
    return Line(
        table=table,
        run=run,
        figure=figure,
        published=published,
        expected=expected,
        obtained=obtained,
        bound=asked,
        is_met=is_met,
    )
