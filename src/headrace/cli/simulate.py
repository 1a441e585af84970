"""`headrace simulate`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from headrace.cli.output import print_json
from headrace.cli.simulation_files import check_folder, write_lines
from headrace.cli.simulation_load import Load, load_of, of_ledger, read_decisions, read_trace
from headrace.cli.simulation_options import (
    FILE,
    LEDGER,
    NEW_FILE,
    fleet_options,
    ledger_filters,
    load_options,
    output_options,
)
from headrace.cli.simulation_plot import check_plot, draw
from headrace.cli.simulation_print import (
    print_comparison,
    print_figures,
    print_lines,
    print_replay,
    summary_of,
)
from headrace.cli.simulation_runs import check_alone, engine_of, notes_of, run_variant, variants_of, window_of
from headrace.errors import HeadraceError
from headrace.simulate.claims import check
from headrace.simulate.compare import compare
from headrace.simulate.decision_log import log_of, write_log
from headrace.simulate.measure import Figures, measure
from headrace.simulate.outcome import Outcome
from headrace.simulate.published import TABLES
from headrace.simulate.replay import replay as decide_again
from headrace.simulate.tables import Line, rerun


@click.group()
def simulate() -> None:
    """Simulate a fleet under the queue and admission that serve real requests."""


@simulate.command("run")
@load_options
@fleet_options
@output_options
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Serve a trace, a load or a server's own traffic with a simulated fleet, once for each policy, and compare.

    The defaults are one Llama-2-7B on an A10G. Traces: Azure, BurstGPT, Mooncake, token-fairness, or what
    --decisions wrote.
    """
    try:
        if options["replay"] is not None:
            check_alone("replay", context, besides=("is_json",))
            _replay(options["replay"], is_json=options["is_json"])
        _compare(context, options)
    except HeadraceError as error:
        _fail(error)


def _compare(context: click.Context, options: dict[str, Any]) -> None:
    variants = variants_of(options["policies"], context, options)
    decisions: Path | None = options["decisions"]
    plot: Path | None = options["plot"]
    # Before minutes of work, not after.
    if plot is not None:
        check_plot(plot, len(variants))
    for path in (plot, decisions):
        check_folder(path)
    load = load_of(options)
    for note in ([] if load.ledger is None else [summary_of(load.ledger)]) + notes_of(load, variants):
        click.echo(note, err=True)
    outcomes: list[Outcome] = [run_variant(variant, load) for variant in variants]
    recorded = load.recorded()
    shown = outcomes if recorded is None else [recorded, *outcomes]
    window = window_of(load, options)
    figures = [measure(outcome, window, price_per_hour=options["price"]) for outcome in shown]
    if decisions is not None:
        write_lines(decisions, write_log(*log_of(outcomes[-1])))
    if plot is not None:
        draw(shown, window, plot)
    _show(figures, load, options, base=0 if recorded is None else 1)


def _show(figures: list[Figures], load: Load, options: dict[str, Any], *, base: int) -> None:
    comparison = compare(figures, base=base)
    if not options["is_json"]:
        print_figures(figures)
        print_comparison(comparison)
        return
    found = {
        "runs": msgspec.to_builtins(figures),
        "comparison": msgspec.to_builtins(comparison),
        "engine": msgspec.to_builtins(engine_of(options, load)),
    }
    if load.ledger is not None:
        found["ledger"] = msgspec.to_builtins(load.ledger.counts())
    print_json(found)


def _replay(path: Path, *, is_json: bool) -> NoReturn:
    found = decide_again(read_decisions(path), name=str(path))
    if is_json:
        print_json(msgspec.to_builtins(found))
    else:
        print_replay(found)
    sys.exit(0 if found.first is None else 1)


@simulate.command("log")
@click.argument("ledger", type=LEDGER, metavar="LEDGER")
@ledger_filters
@click.option("--output", type=NEW_FILE, required=True, help="The file to write.")
def log(ledger: Path, output: Path, **filters: str | None) -> None:
    """Write the traffic of a server as a decision log: sizes and times, no content, no users. LEDGER is its ledger.db,
    or its data directory; it may be running. `simulate run --trace` replays the log, also elsewhere."""
    try:
        check_folder(output)
        found = of_ledger(ledger, filters).ledger
        assert found is not None
        assert found.log.header is not None
        write_lines(output, write_log(found.log.header, found.log.lines))
    except HeadraceError as error:
        _fail(error)
    click.echo(summary_of(found), err=True)


@simulate.command("tables")
@click.option("--trace", type=FILE, help="The trace of the table of real requests (req_time_s,client,prompt_len,output_len).")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def tables(trace: Path | None, is_json: bool) -> None:
    """Rerun the published tables of token fairness: published, expected and obtained side by side.

    Published are the logs of the virtual token counter (OSDI 2024), expected is what an independent simulator gave.
    Exit status 1 if a bound is not met.
    """
    try:
        real = None if trace is None else read_trace(trace)
    except HeadraceError as error:
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


def _fail(error: Exception) -> NoReturn:
    click.echo(f"headrace: {error}", err=True)
    sys.exit(2)
