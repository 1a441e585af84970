"""`headrace simulate`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import click
import msgspec

from headrace.cli.output import print_json
from headrace.errors import SetupError
from headrace.scheduling.policy import POLICIES, QueuePolicy
from headrace.simulate.claims import check
from headrace.simulate.engine import EngineModel
from headrace.simulate.fleet import simulate as run_fleet
from headrace.simulate.measure import Figures, Spread, Window, measure
from headrace.simulate.outcome import Outcome, Prediction, Setup, decisions
from headrace.simulate.published import TABLES
from headrace.simulate.tables import Line, rerun
from headrace.simulate.traces import decision_line, read
from headrace.simulate.workload import LOADS, SECOND_US, Arrival, merged

TENANTS_SHOWN = 20
TICKS_MAX = 200
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group()
def simulate() -> None:
    """Simulate a fleet under the queue and admission that serve real requests."""


@simulate.command("run")
@click.option("--trace", "traces", type=_FILE, multiple=True, help="Replay a trace. Several are merged, each one a tenant unless it names its own.")  # fmt: skip
@click.option("--load", type=click.Choice(sorted(LOADS)), help="A synthetic load instead.")
@click.option("--duration", type=click.FloatRange(1, 10_000_000), default=600.0, show_default=True, help="Seconds of the synthetic load, and of what is measured.")  # fmt: skip
@click.option("--requests", type=click.IntRange(1), help="Take only so many requests, the first ones.")
@click.option("--speed", type=click.FloatRange(0.001, 1000), default=1.0, show_default=True, help="Requests come so many times faster.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--policy", "policies", type=click.Choice(POLICIES), multiple=True, default=("fifo", "fair"), show_default=True, help="Again for each to compare.")  # fmt: skip
@click.option("--prediction", type=click.Choice(get_args(Prediction)), default="half", show_default=True, help="What is known of an answer's length: exact, give or take a half, nothing.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--slots", type=click.IntRange(1, 4096), default=32, show_default=True, help="Requests at once in a worker.")  # fmt: skip
@click.option("--kv-tokens", type=click.IntRange(1), default=10_000, show_default=True, help="Memory of a worker.")  # fmt: skip
@click.option("--cache-blocks", type=click.IntRange(0), default=0, show_default=True, help="Prefix cache of a worker, in blocks of 512 tokens.")  # fmt: skip
@click.option("--prefill-us", type=click.FloatRange(0, 1e6), default=218.0, show_default=True, help="Microseconds a prompt token takes.")  # fmt: skip
@click.option("--decode-us", type=click.FloatRange(1, 1e7), default=33_500.0, show_default=True, help="Microseconds a step takes.")  # fmt: skip
@click.option("--weight", "weights", multiple=True, metavar="TENANT=WEIGHT")
@click.option(
    "--batch", "batch", multiple=True, metavar="TENANT", help="This tenant's requests are of class batch."
)
@click.option("--batch-floor", type=click.FloatRange(0, 0.99), default=0.1, show_default=True, help="Share of the class batch.")  # fmt: skip
@click.option("--aging", type=click.FloatRange(0.001), default=60.0, show_default=True, help="Seconds after which batch counts as interactive.")  # fmt: skip
@click.option("--reserve", type=click.IntRange(0), default=0, show_default=True, help="Places kept for short interactive requests.")  # fmt: skip
@click.option("--reserve-output-tokens", type=click.IntRange(1), default=256, show_default=True, help="Up to so many expected tokens a request is short.")  # fmt: skip
@click.option("--quantum", type=click.FloatRange(0), default=0.0, show_default=True, help="Cost by which warm prefixes may go first.")  # fmt: skip
@click.option(
    "--long-prompt-tokens", type=click.IntRange(1), help="Longer prompts have a budget of their own."
)
@click.option("--decisions", type=click.Path(path_type=Path, dir_okay=False), help="Write the decisions of the last policy, one JSON object a line, without content. --trace replays them.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def run(is_json: bool, decisions: Path | None, policies: Sequence[str], **options: Any) -> None:
    """Serve a trace or a load with a simulated fleet, once for each policy, and compare.

    The defaults are one Llama-2-7B on an A10G. Traces: Azure, BurstGPT, Mooncake, token-fairness, or what
    --decisions wrote.
    """
    try:
        arrivals = _arrivals(options)
    except (SetupError, OSError, UnicodeDecodeError) as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(2)
    window = _window(arrivals, options)
    found: list[Figures] = []
    outcome: Outcome | None = None
    for name in policies:
        outcome = run_fleet(_setup(name, options), arrivals)
        found.append(measure(outcome, window))
    if decisions is not None and outcome is not None:
        _write_decisions(decisions, outcome)
    if is_json:
        print_json({"runs": msgspec.to_builtins(found)})
    else:
        _print_runs(found)


@simulate.command("tables")
@click.option("--trace", type=_FILE, help="The trace of the table of real requests (req_time_s,client,prompt_len,output_len).")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def tables(trace: Path | None, is_json: bool) -> None:
    """Rerun the published tables of token fairness: published, expected and obtained side by side.

    Published are the logs of the virtual token counter (OSDI 2024), expected is what an independent simulator gave.
    Exit status 1 if a bound is not met.
    """
    try:
        real = None if trace is None else _read(trace)
    except (SetupError, OSError, UnicodeDecodeError) as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(2)
    _report(list(rerun(TABLES, real)), is_json=is_json)


@simulate.command("claims")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def claims(is_json: bool) -> None:
    """Show what the fair queue promises: classes, long prompts, full slots, returning tenants.

    Each on a synthetic load, with its bound and what came out, and beside it the same load without the means.
    Exit status 1 if a bound is not met.
    """
    _report(list(check()), is_json=is_json)


def _report(lines: Sequence[Line], *, is_json: bool) -> NoReturn:
    if is_json:
        print_json({"lines": msgspec.to_builtins(lines)})
    else:
        _print_lines(lines)
    sys.exit(1 if any(line.is_met is False for line in lines) else 0)


def _arrivals(options: dict[str, Any]) -> list[Arrival]:
    if bool(options["traces"]) == (options["load"] is not None):
        raise click.UsageError("say what to serve: either --trace FILE or --load NAME")
    if options["load"] is not None:
        arrivals = merged(
            LOADS[options["load"]](), options["duration"] * options["speed"], seed=options["seed"]
        )
    else:
        arrivals = [arrival for path in options["traces"] for arrival in _read(path)]
        arrivals.sort(key=lambda arrival: arrival.arrival_us)
    weights = _weights(options["weights"])
    unknown = {*weights, *options["batch"]} - {arrival.tenant for arrival in arrivals}
    if unknown:
        raise click.UsageError(f"no requests of tenant {', '.join(sorted(unknown))}")
    return [
        msgspec.structs.replace(
            arrival,
            arrival_us=round(arrival.arrival_us / options["speed"]),
            weight=weights.get(arrival.tenant, arrival.weight),
            service_class="batch" if arrival.tenant in options["batch"] else arrival.service_class,
        )
        for arrival in arrivals[: options["requests"]]
    ]


def _read(path: Path) -> list[Arrival]:
    with path.open(encoding="utf-8") as lines:
        return read(lines, name=str(path), tenant=path.name)


def _weights(pairs: Iterable[str]) -> dict[str, float]:
    weights = {}
    for pair in pairs:
        tenant, sign, value = pair.rpartition("=")
        try:
            weights[tenant] = float(value)
        except ValueError:
            sign = ""
        if not sign or not 0 < weights[tenant] < 1e9:
            raise click.BadParameter(
                f"{pair!r}; allowed is TENANT=WEIGHT, a number above 0", param_hint="--weight"
            )
    return weights


def _window(arrivals: Sequence[Arrival], options: dict[str, Any]) -> Window:
    duration_s = options["duration"]
    if options["load"] is None and arrivals:
        duration_s = max(arrivals[-1].arrival_us / SECOND_US, 1.0)
    # Long traces are compared at as many points of time as short ones.
    step_s = max(30.0, duration_s / TICKS_MAX)
    return Window(
        duration_s=duration_s,
        warm_up_s=60.0 if duration_s > 120 else 0.0,
        width_s=2 * step_s,
        step_s=step_s,
    )


def _setup(policy: str, options: dict[str, Any]) -> Setup:
    long_prompt_tokens = options["long_prompt_tokens"]
    return Setup(
        name=policy,
        policy=QueuePolicy(
            name=policy,  # type: ignore[arg-type]
            batch_floor=options["batch_floor"],
            aging_us=round(options["aging"] * SECOND_US),
            quantum=options["quantum"],
            long_prompt_tokens=long_prompt_tokens,
            interactive_reserve=options["reserve"],
            reserve_output_tokens_max=options["reserve_output_tokens"],
        ),
        prediction=options["prediction"],
        engine=EngineModel(
            prefill_us_per_token=options["prefill_us"],
            decode_us=options["decode_us"],
            slots=options["slots"],
            kv_tokens=options["kv_tokens"],
            cache_blocks=options["cache_blocks"],
            long_prompt_tokens=None if policy == "fifo" else long_prompt_tokens,
        ),
        workers=options["workers"],
        seed=options["seed"],
    )


def _write_decisions(path: Path, outcome: Outcome) -> None:
    with path.open("wb") as out:
        for arrival, served in decisions(outcome):
            granted_us = served.granted_us if served.replica else None
            out.write(decision_line(arrival, granted_us=granted_us, replica=served.replica) + b"\n")


def _print_runs(runs: Sequence[Figures]) -> None:
    rows = [
        ("", *(one.name for one in runs)),
        *(
            (name, *(show(getattr(one, name.partition(" ")[0])) for one in runs))
            for names, show in _SHOWN
            for name in names
        ),
    ]
    _print_columns(rows)
    for one in runs:
        click.echo(f"\n{one.name}, by tenant")
        shown = sorted(one.tenants, key=lambda tenant: -tenant.service_per_s)[:TENANTS_SHOWN]
        table = [("tenant", "weight", "requests", "service/s", "ttft_s mean/p50/p90/p99/max")]
        table += [
            (t.tenant, f"{t.weight:g}", str(t.requests), _number(t.service_per_s), _spread(t.ttft_s))
            for t in shown
        ]
        _print_columns(table)
        if len(one.tenants) > len(shown):
            click.echo(f"and {len(one.tenants) - len(shown)} more")


def _print_lines(lines: Sequence[Line]) -> None:
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


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def _spread(value: Spread) -> str:
    return " / ".join(_number(one) for one in (value.mean, value.p50, value.p90, value.p99, value.max))


_SHOWN: tuple[tuple[tuple[str, ...], Callable[[Any], str]], ...] = (
    (("requests", "served", "refused", "end_s", "throughput_tokens_per_s"), _number),
    (("ttft_s mean/p50/p90/p99/max", "latency_s mean/p50/p90/p99/max"), _spread),
    (("difference_max", "difference_mean", "difference_variance", "accumulated_difference"), _number),
    (("jain", "busy_share", "slot_share", "hit_share"), "{:.3f}".format),
)
"""Figures of a run, and how each is printed."""
