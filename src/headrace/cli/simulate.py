"""`headrace simulate`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import click
import msgspec

from headrace.cli.output import print_json
from headrace.cli.simulation_load import UNREADABLE, load_of, of_ledger, read_trace
from headrace.cli.simulation_print import print_comparison, print_figures, print_lines, summary_of
from headrace.cli.simulation_runs import engine_of, run_variant, variants_of, window_of
from headrace.errors import HeadraceError
from headrace.scheduling.policy import POLICIES
from headrace.simulate.claims import check
from headrace.simulate.compare import compare
from headrace.simulate.decision_log import log_of, write_log
from headrace.simulate.measure import measure
from headrace.simulate.outcome import Outcome, Prediction
from headrace.simulate.published import TABLES
from headrace.simulate.tables import Line, rerun
from headrace.simulate.workload import LOADS

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_DIRECTORY = click.Path(path_type=Path, exists=True, file_okay=False)
Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
def simulate() -> None:
    """Simulate a fleet under the queue and admission that serve real requests."""


def _ledger_filters(command: Command) -> Command:
    for option in reversed(
        (
            click.option("--from", "from_", metavar="TIME", help="Of a ledger: what ended from this date or time on (UTC without a zone)."),
            click.option("--to", metavar="TIME", help="Up to this date or time, itself not included."),
            click.option("--tenant", help="Of a ledger: only this tenant."),
            click.option("--model", help="Of a ledger: only this model. A fleet serves one."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@simulate.command("run")
@click.option("--trace", "traces", type=_FILE, multiple=True, help="Replay a trace. Several are merged, each one a tenant unless it names its own.")  # fmt: skip
@click.option("--load", type=click.Choice(sorted(LOADS)), help="A synthetic load instead.")
@click.option("--from-ledger", type=_DIRECTORY, metavar="DATA_DIR", help="The traffic of a server instead, out of its data directory. It may be running.")  # fmt: skip
@_ledger_filters
@click.option("--duration", type=click.FloatRange(1, 10_000_000), default=600.0, show_default=True, help="Seconds of the synthetic load, and of what is measured.")  # fmt: skip
@click.option("--requests", type=click.IntRange(1), help="Take only so many requests, the first ones.")
@click.option("--speed", type=click.FloatRange(0.001, 1000), default=1.0, show_default=True, help="Requests come so many times faster.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--policy", "policies", multiple=True, default=("fifo", "fair"), show_default=True, metavar="POLICY[,OPTION=VALUE…]", help=f"{', '.join(POLICIES)}; again for each to compare. What follows is for this run alone: any option below by its name, or weight.TENANT=NUMBER.")  # fmt: skip
@click.option("--prediction", type=click.Choice(get_args(Prediction)), help="What is known of an answer's length: exact, give or take a half, nothing. Default: half, or as a decision log says.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--slots", type=click.IntRange(1, 4096), default=32, show_default=True, help="Requests at once in a worker.")  # fmt: skip
@click.option("--kv-tokens", type=click.IntRange(1), default=10_000, show_default=True, help="Memory of a worker.")  # fmt: skip
@click.option("--cache-blocks", type=click.IntRange(0), default=0, show_default=True, help="Prefix cache of a worker, in blocks of 512 tokens.")  # fmt: skip
@click.option("--prefill-us", type=click.FloatRange(0, 1e6), help="Microseconds a prompt token takes. Default: 218, or as in the ledger.")  # fmt: skip
@click.option("--decode-us", type=click.FloatRange(1, 1e7), help="Microseconds a step takes. Default: 33500, or as in the ledger.")  # fmt: skip
@click.option("--weight", "weights", multiple=True, metavar="TENANT=WEIGHT")
@click.option(
    "--batch", "batch", multiple=True, metavar="TENANT", help="This tenant's requests are of class batch."
)
@click.option("--batch-floor", type=click.FloatRange(0, 0.99), default=0.1, show_default=True, help="Share of the class batch.")  # fmt: skip
@click.option("--aging", type=click.FloatRange(0.001, 1e9), default=60.0, show_default=True, help="Seconds after which batch counts as interactive.")  # fmt: skip
@click.option("--reserve", type=click.IntRange(0), default=0, show_default=True, help="Places kept for short interactive requests.")  # fmt: skip
@click.option("--reserve-output-tokens", type=click.IntRange(1), default=256, show_default=True, help="Up to so many expected tokens a request is short.")  # fmt: skip
@click.option("--quantum", type=click.FloatRange(0), default=0.0, show_default=True, help="Cost by which warm prefixes may go first.")  # fmt: skip
@click.option(
    "--long-prompt-tokens", type=click.IntRange(1), help="Longer prompts have a budget of their own."
)
@click.option("--preemption", is_flag=True, help="Stop running requests of the most over-served tenant for interactive ones that find no place (fair only).")  # fmt: skip
@click.option("--decisions", type=click.Path(path_type=Path, dir_okay=False), help="Write the decisions of the last policy, one JSON object a line, without content. --trace replays them.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def run(
    context: click.Context, /, is_json: bool, decisions: Path | None, policies: Sequence[str], **options: Any
) -> None:
    """Serve a trace, a load or a server's own traffic with a simulated fleet, once for each policy, and compare.

    The defaults are one Llama-2-7B on an A10G. Traces: Azure, BurstGPT, Mooncake, token-fairness, or what
    --decisions wrote.
    """
    variants = variants_of(policies, context, options)
    try:
        load = load_of(options)
    except (HeadraceError, *UNREADABLE) as error:
        _fail(error)
    if load.ledger is not None:
        click.echo(summary_of(load.ledger), err=True)
    outcomes: list[Outcome] = [run_variant(variant, load) for variant in variants]
    recorded = load.recorded()
    shown = outcomes if recorded is None else [recorded, *outcomes]
    window = window_of(load, options)
    figures = [measure(outcome, window) for outcome in shown]
    comparison = compare(figures, base=0 if recorded is None else 1)
    if decisions is not None:
        _write(decisions, write_log(*log_of(outcomes[-1])))
    if is_json:
        found = {
            "runs": msgspec.to_builtins(figures),
            "comparison": msgspec.to_builtins(comparison),
            "engine": msgspec.to_builtins(engine_of(options, load)),
        }
        if load.ledger is not None:
            found["ledger"] = msgspec.to_builtins(load.ledger.counts())
        print_json(found)
    else:
        print_figures(figures)
        print_comparison(comparison)


@simulate.command("log")
@click.argument("data", type=_DIRECTORY, metavar="DATA_DIR")
@_ledger_filters
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file to write.")  # fmt: skip
def log(data: Path, output: Path, **filters: str | None) -> None:
    """Write the traffic of a server as a decision log: sizes and times, no content, no users. DATA_DIR is its data
    directory; it may be running. `simulate run --trace` replays the log, also elsewhere."""
    try:
        found = of_ledger(data, filters).ledger
    except (HeadraceError, *UNREADABLE) as error:
        _fail(error)
    assert found is not None
    assert found.log.header is not None
    _write(output, write_log(found.log.header, found.log.lines))
    click.echo(summary_of(found), err=True)


@simulate.command("tables")
@click.option("--trace", type=_FILE, help="The trace of the table of real requests (req_time_s,client,prompt_len,output_len).")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def tables(trace: Path | None, is_json: bool) -> None:
    """Rerun the published tables of token fairness: published, expected and obtained side by side.

    Published are the logs of the virtual token counter (OSDI 2024), expected is what an independent simulator gave.
    Exit status 1 if a bound is not met.
    """
    try:
        real = None if trace is None else read_trace(trace)
    except (HeadraceError, *UNREADABLE) as error:
        _fail(error)
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
        print_lines(lines)
    sys.exit(1 if any(line.is_met is False for line in lines) else 0)


def _write(path: Path, lines: Iterable[bytes]) -> None:
    try:
        with path.open("wb") as out:
            out.writelines(lines)
    except OSError as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    click.echo(f"headrace: {error}", err=True)
    sys.exit(2)
