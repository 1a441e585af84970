"""The runs that `headrace simulate run` compares: a policy for each, with what is changed for it alone."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import click
import msgspec
from click.core import ParameterSource

from headrace.cli.simulation_load import Load, weights_of
from headrace.scheduling.policy import POLICIES, QueuePolicy
from headrace.simulate.engine import EngineModel
from headrace.simulate.fleet import simulate
from headrace.simulate.measure import Window
from headrace.simulate.outcome import Outcome, Setup
from headrace.simulate.workload import SECOND_US

TICKS_MAX: Final = 200
CHANGEABLE: Final = (
    "prediction", "workers", "slots", "kv-tokens", "cache-blocks", "prefill-us", "decode-us", "batch-floor", "aging",
    "reserve", "reserve-output-tokens", "quantum", "long-prompt-tokens", "long-prompts-max",
    "preemption",
)  # fmt: skip
"""Options that may be set for one run alone."""
_WEIGHT: Final = "weight."


class Variant(msgspec.Struct, frozen=True):
    """A run: its name, as it was asked for, and its options."""

    name: str
    policy: str
    options: dict[str, Any]
    weights: dict[str, float]


def variant_of(text: str, options: Mapping[str, Any], convert: Callable[[str, str], Any]) -> Variant:
    """What `POLICY,OPTION=VALUE,…` asks for. `convert` gives the value of an option. Raises `click.UsageError`."""
    policy, *changes = text.split(",")
    if policy not in POLICIES:
        raise click.BadParameter(
            f"{policy!r} is no policy; allowed are {', '.join(POLICIES)}", param_hint="--policy"
        )
    changed, weights = dict(options), {}
    for change in changes:
        name, sign, value = change.strip().partition("=")
        if name.startswith(_WEIGHT) and sign:
            tenant_weight = change.strip().removeprefix(_WEIGHT)
            weights.update(weights_of([tenant_weight]))
        elif name in CHANGEABLE and sign:
            changed[name.replace("-", "_")] = convert(name, value)
        else:
            raise click.BadParameter(
                f"{change!r}; after the policy's name come OPTION=VALUE or weight.TENANT=NUMBER, allowed are"
                f" {', '.join(CHANGEABLE)}",
                param_hint="--policy",
            )
    return Variant(text, policy, changed, weights)


def run_variant(variant: Variant, load: Load) -> Outcome:
    """Serve the load."""
    arrivals = load.arrivals
    unknown = set(variant.weights) - {arrival.tenant for arrival in arrivals}
    if unknown:
        raise click.UsageError(f"{variant.name}: no requests of tenant {', '.join(sorted(unknown))}")
    if variant.weights:
        arrivals = [
            msgspec.structs.replace(one, weight=variant.weights.get(one.tenant, one.weight))
            for one in arrivals
        ]
    return simulate(_setup(variant, load), arrivals)


def window_of(load: Load, options: Mapping[str, Any]) -> Window:
    """Over which runs are compared."""
    duration_s = options["duration"]
    if options["load"] is None and load.arrivals:
        duration_s = max(load.arrivals[-1].arrival_us / SECOND_US, 1.0)
    # Long traces are compared at as many points of time as short ones.
    step_s = max(30.0, duration_s / TICKS_MAX)
    return Window(
        duration_s=duration_s,
        warm_up_s=60.0 if duration_s > 120 else 0.0,
        width_s=2 * step_s,
        step_s=step_s,
    )


def engine_of(options: Mapping[str, Any], load: Load) -> EngineModel:
    """As asked for; what was not, as the ledger's operations were, or the default."""
    model = load.engine or EngineModel()
    changes = {
        "prefill_us_per_token": options["prefill_us"],
        "decode_us": options["decode_us"],
    }
    return msgspec.structs.replace(
        model,
        slots=options["slots"],
        kv_tokens=options["kv_tokens"],
        cache_blocks=options["cache_blocks"],
        reads_short_first=options["long_prompt_tokens"] is not None,
        **{name: value for name, value in changes.items() if value is not None},
    )


def _setup(variant: Variant, load: Load) -> Setup:
    options = variant.options
    long_prompt_tokens = options["long_prompt_tokens"]
    # First in, first out knows no long prompts, in the engine neither.
    fleet = options if variant.policy != "fifo" else {**options, "long_prompt_tokens": None}
    return Setup(
        name=variant.name,
        policy=QueuePolicy(
            name=variant.policy,  # type: ignore[arg-type]
            batch_floor=options["batch_floor"],
            aging_us=round(options["aging"] * SECOND_US),
            quantum=options["quantum"],
            long_prompt_tokens=long_prompt_tokens,
            long_prompts_max=options["long_prompts_max"],
            interactive_reserve=options["reserve"],
            reserve_output_tokens_max=options["reserve_output_tokens"],
        ),
        prediction=options["prediction"] or load.prediction or "half",
        engine=engine_of(fleet, load),
        workers=options["workers"],
        has_preemption=options["preemption"],
        seed=options["seed"],
    )


def check_alone(name: str, context: click.Context, *, besides: Collection[str]) -> None:
    """Raises `click.UsageError` if other options than `besides` go with this one."""
    asked = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name not in (name, *besides)
        and context.get_parameter_source(parameter.name or "") is not ParameterSource.DEFAULT
    ]
    if asked:
        raise click.UsageError(
            f"--{name} takes fleet, policy and requests out of its file; it does not go with {', '.join(asked)}"
        )


def notes_of(load: Load, variants: Sequence[Variant]) -> list[str]:
    """What may surprise in the figures."""
    sizes = [one.prompt_tokens + one.output_tokens for one in load.arrivals]
    notes = []
    for variant in variants:
        room = variant.options["kv_tokens"]
        number = sum(size > room for size in sizes)
        if number:
            notes.append(
                f"{variant.name}: {number:,} of {len(sizes):,} requests are larger than a worker's memory (--kv-tokens"
                f" {room}); each of them runs alone on its worker"
            )
    return notes


def variants_of(texts: Sequence[str], context: click.Context, options: Mapping[str, Any]) -> list[Variant]:
    """All runs, in the order asked for."""
    parameters = {
        name.removeprefix("--"): parameter for parameter in context.command.params for name in parameter.opts
    }

    def convert(name: str, value: str) -> Any:
        parameter = parameters[name]
        kind = click.BOOL if isinstance(parameter, click.Option) and parameter.is_flag else parameter.type
        try:
            return kind.convert(value, parameter, context)
        except click.BadParameter as error:
            raise click.BadParameter(f"{name}: {error.message}", param_hint="--policy") from error

    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise click.BadParameter(f"{twice!r} is there twice", param_hint="--policy")
    return [variant_of(text, options, convert) for text in texts]
