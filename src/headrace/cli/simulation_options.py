"""The options of `headrace simulate run`."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click

from headrace.bounds import SEED_MAX, SIMULATED_SLOTS_MAX, SIMULATED_WORKERS_MAX, TRACE_REQUESTS_MAX
from headrace.scheduling.policy import POLICIES
from headrace.simulate.outcome import Prediction
from headrace.simulate.workload import LOADS

COUNT_MAX: Final = 10**12
"""Of tokens and blocks; larger numbers are taken for slips."""
FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)
LEDGER: Final = click.Path(path_type=Path, exists=True)
NEW_FILE: Final = click.Path(path_type=Path, dir_okay=False)
Command = TypeVar("Command", bound=Callable[..., Any])


class Real(click.FloatRange):
    """A number in a range. Neither `nan` nor `inf` is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def _all_of(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


ledger_filters = _all_of(
    (
        click.option("--from", "from_", metavar="TIME", help="Of a ledger: what ended from this date or time on (UTC without a zone)."),
        click.option("--to", metavar="TIME", help="Up to this date or time, itself not included."),
        click.option("--tenant", help="Of a ledger: only this tenant."),
        click.option("--model", help="Of a ledger: only this model. A fleet serves one."),
    )
)  # fmt: skip

load_options = _all_of(
    (
        click.option("--trace", "traces", type=FILE, multiple=True, help="Replay a trace. Several are merged, each one a tenant unless it names its own."),
        click.option("--load", type=click.Choice(sorted(LOADS)), help="A synthetic load instead."),
        click.option("--from-ledger", type=LEDGER, metavar="LEDGER", help="The traffic of a server instead: its ledger.db, or its data directory. It may be running."),
        ledger_filters,
        click.option("--duration", type=Real(1, 10_000_000), default=600.0, show_default=True, help="Seconds of the synthetic load, and of what is measured."),
        click.option("--requests", type=click.IntRange(1, TRACE_REQUESTS_MAX), help="Take only so many requests, the first ones."),
        click.option("--speed", type=Real(0.001, 1000), default=1.0, show_default=True, help="Requests come so many times faster."),
        click.option("--seed", type=click.IntRange(0, SEED_MAX), default=0, show_default=True, help="Of a synthetic load, and of guessed lengths. The same again for the same seed."),
        click.option("--weight", "weights", multiple=True, metavar="TENANT=WEIGHT"),
        click.option("--batch", multiple=True, metavar="TENANT", help="This tenant's requests are of class batch."),
    )
)  # fmt: skip

fleet_options = _all_of(
    (
        click.option("--policy", "policies", multiple=True, default=("fifo", "fair"), show_default=True, metavar="POLICY[,OPTION=VALUE…]", help=f"{', '.join(POLICIES)}; again for each to compare. What follows is for this run alone: any option below by its name, or weight.TENANT=NUMBER."),
        click.option("--prediction", type=click.Choice(get_args(Prediction)), help="What is known of an answer's length: exact, give or take a half, nothing. Default: half, or as a decision log says."),
        click.option("--workers", type=click.IntRange(1, SIMULATED_WORKERS_MAX), default=1, show_default=True),
        click.option("--slots", type=click.IntRange(1, SIMULATED_SLOTS_MAX), default=32, show_default=True, help="Requests at once in a worker."),
        click.option("--kv-tokens", type=click.IntRange(1, COUNT_MAX), default=10_000, show_default=True, help="Memory of a worker."),
        click.option("--cache-blocks", type=click.IntRange(0, COUNT_MAX), default=0, show_default=True, help="Prefix cache of a worker, in blocks of 512 tokens."),
        click.option("--prefill-us", type=Real(0, 1e6), help="Microseconds a prompt token takes. Default: 218, or as in the ledger."),
        click.option("--decode-us", type=Real(1, 1e7), help="Microseconds a step takes. Default: 33500, or as in the ledger."),
        click.option("--batch-floor", type=Real(0, 0.99), default=0.1, show_default=True, help="Share of the class batch."),
        click.option("--aging", type=Real(0.001, 1e9), default=60.0, show_default=True, help="Seconds after which batch counts as interactive."),
        click.option("--reserve", type=click.IntRange(0, COUNT_MAX), default=0, show_default=True, help="Places kept for short interactive requests."),
        click.option("--reserve-output-tokens", type=click.IntRange(1, COUNT_MAX), default=256, show_default=True, help="Up to so many expected tokens a request is short."),
        click.option("--quantum", type=Real(0, 1e12), default=0.0, show_default=True, help="Cost by which warm prefixes may go first."),
        click.option("--long-prompt-tokens", type=click.IntRange(1, COUNT_MAX), help="Longer prompts have a budget of their own."),
        click.option("--preemption", is_flag=True, help="Stop running requests of the most over-served tenant for interactive ones that find no place (fair only)."),
    )
)  # fmt: skip

output_options = _all_of(
    (
        click.option("--price", type=Real(0, 1e9), help="Of a worker for an hour: figures get a cost."),
        click.option("--decisions", type=NEW_FILE, help="Write the decisions of the last policy, one JSON object a line, without content."),
        click.option("--replay", type=FILE, help="Instead of all of these: decide what --decisions wrote once more, with its own fleet and policy. Exit status 1 if a decision differs, and which one is first."),
        click.option("--plot", type=NEW_FILE, metavar="FILE", help="Draw the runs: .png, .svg or .pdf. Needs matplotlib: pip install 'headrace[plot]'."),
        click.option("--json", "is_json", is_flag=True, help="Print one JSON object."),
    )
)  # fmt: skip
