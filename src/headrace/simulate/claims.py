"""What the fair queue promises of classes, long prompts, returning tenants and full slots, each shown on a load.

Lines without a bound are there to compare: the same load without what the claim is about.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from headrace.scheduling.policy import QueuePolicy
from headrace.simulate.engine import EngineModel
from headrace.simulate.fleet import simulate
from headrace.simulate.measure import Figures, Window, measure
from headrace.simulate.outcome import Outcome, Setup
from headrace.simulate.tables import Bound, Line, line_of
from headrace.simulate.workload import LOADS, SECOND_US, Arrival, Client, merged, visitors

FLOOR: Final = 0.1
AGING_S: Final = 30
WAIT_AFTER_AGING_S: Final = 10
LONG_PROMPT_TOKENS: Final = 2000
RETURNING_REQUESTS: Final = 200
STEPS_LATER_MAX: Final = 4.0
"""The step that runs when a chat comes, the next tokens of the others, and a portion of another prompt beside its own."""
_NEVER_US: Final = 10**15
_MINUTE_S: Final = 60


def check(*, duration_s: float = 600, idle_s: float = 3600) -> Iterator[Line]:
    """Every claim, with its bound and what came out. `duration_s` is the length of each load, `idle_s` how long the returning
    tenant was away. Shorter ones make the figures coarser."""
    for claim in (_classes, _long_prompts, _full_slots):
        yield from claim(duration_s)
    yield from _returning(idle_s)


def _run(
    arrivals: Sequence[Arrival],
    policy: QueuePolicy,
    engine: EngineModel,
    *,
    has_preemption: bool = False,
) -> Outcome:
    setup = Setup(
        name=policy.name, policy=policy, prediction="half", engine=engine, has_preemption=has_preemption
    )
    return simulate(setup, arrivals)


def _figures(
    clients: Sequence[Client],
    duration_s: float,
    policy: QueuePolicy,
    engine: EngineModel,
    *,
    has_preemption: bool = False,
) -> Figures:
    outcome = _run(merged(clients, duration_s), policy, engine, has_preemption=has_preemption)
    return measure(outcome, Window(duration_s=duration_s))


def _classes(duration_s: float) -> Iterator[Line]:
    """Interactive asks for 120 % of what there is; what is left for batch, and how long it waits."""
    table = "classes: interactive at 120 % of what the engine can do, batch behind it"
    engine = EngineModel()
    high, low = LOADS["classes"]()
    flood = Client(tenant="low", rate_rps=high.rate_rps, service_class="batch", is_poisson=True)
    floods: list[tuple[str, float, Bound | None]] = [
        ("batch floods, no floor, no aging", 0.0, None),
        (f"batch floods, floor {100 * FLOOR:g} %, no aging", FLOOR, (">=", 95 * FLOOR)),
    ]
    for run, floor, bound in floods:
        policy = QueuePolicy(batch_floor=floor, aging_us=_NEVER_US)
        figures = _figures((high, flood), duration_s, policy, engine)
        yield line_of(table, run, "batch's part of the service, %", _part(figures, "low"), bound=bound)
    waits: list[tuple[str, QueuePolicy, Bound | None]] = [
        ("batch asks for 17 %, no floor, no aging", QueuePolicy(batch_floor=0, aging_us=_NEVER_US), None),
        (
            f"batch asks for 17 %, floor {100 * FLOOR:g} %, aging {AGING_S} s",
            QueuePolicy(batch_floor=FLOOR, aging_us=AGING_S * SECOND_US),
            ("<=", AGING_S + WAIT_AFTER_AGING_S),
        ),
    ]
    for run, policy, limit in waits:
        figures = _figures((high, low), duration_s, policy, engine)
        one = next(one for one in figures.tenants if one.tenant == "low")
        yield line_of(table, run, "batch's longest wait, s", one.wait_s.max, bound=limit)


def _long_prompts(duration_s: float) -> Iterator[Line]:
    table = "long prompts: short chats at 5 rps, and a prompt of 6 000 tokens every 10 s"
    short, long = LOADS["long-prompts"]()
    for run, limit in (
        ("no budget", None),
        (f"budget for prompts over {LONG_PROMPT_TOKENS}", LONG_PROMPT_TOKENS),
    ):
        policy, engine = (
            QueuePolicy(long_prompt_tokens=limit),
            EngineModel(reads_short_first=limit is not None),
        )
        alone = [_figures((one,), duration_s, policy, engine).tenants[0] for one in (long, short)]
        both = _figures((short, long), duration_s, policy, engine).tenants
        is_claim = limit is not None
        yield line_of(
            table,
            run,
            "first token of short ones, p99, times alone",
            both[1].ttft_s.p99 / alone[1].ttft_s.p99,
            bound=("<=", 2.0) if is_claim else None,
        )
        yield line_of(
            table,
            run,
            "latency of long ones, mean, times alone",
            both[0].latency_s.mean / alone[0].latency_s.mean,
            bound=("<=", 1.5) if is_claim else None,
        )


def _full_slots(duration_s: float) -> Iterator[Line]:
    """Eight slots full of answers of 200 to 1800 tokens, 192 more waiting, and short chats from ten tenants."""
    table = "full slots: 200 long jobs on 8 slots, and a short chat every 2 s"
    engine = EngineModel(slots=8, kv_tokens=100_000)
    context_tokens = engine.slots * (256 + 1000)
    step_s = (
        engine.decode_us
        + engine.decode_us_per_sequence * engine.slots
        + engine.decode_us_per_context_token * context_tokens
    ) / SECOND_US
    load = LOADS["flood-and-visitors"]()
    alone_s = _first_tokens(_figures(visitors(), duration_s, QueuePolicy(), engine))
    for run, reserve, has_preemption in (
        ("neither reserve nor preemption", 0, False),
        ("interactive reserve of 1", 1, False),
        ("preemption", 0, True),
    ):
        policy = QueuePolicy(interactive_reserve=reserve)
        figures = _figures(load, duration_s, policy, engine, has_preemption=has_preemption)
        steps = (_first_tokens(figures) - alone_s) / step_s
        bound: Bound | None = ("<=", STEPS_LATER_MAX) if reserve or has_preemption else None
        yield line_of(table, run, "first token of chats, p95, steps later than alone", steps, bound=bound)
        yield line_of(table, run, "throughput tok/s", figures.throughput_tokens_per_s)
        if has_preemption:
            tokens = figures.throughput_tokens_per_s * figures.end_s
            yield line_of(table, run, "computed again, % of all tokens", 100 * figures.lost_tokens / tokens)


def _returning(idle_s: float) -> Iterator[Line]:
    table = f"returning: idle for {idle_s:g} s, then {RETURNING_REQUESTS} requests at once beside a flood"
    active_s = float(_MINUTE_S)
    back_s = active_s + idle_s
    clients = (Client(tenant="here", rate_rps=3.0), Client(tenant="back", rate_rps=0.5, end_s=active_s))
    burst = [
        Arrival(arrival_us=round(back_s * SECOND_US), tenant="back", prompt_tokens=256, output_tokens=256)
        for _ in range(RETURNING_REQUESTS)
    ]
    arrivals = sorted([*merged(clients, back_s + 5 * _MINUTE_S), *burst], key=lambda one: one.arrival_us)
    outcome = _run(arrivals, QueuePolicy(), EngineModel())
    for minute in (1, 2, 3):
        begin_s = back_s + (minute - 1) * _MINUTE_S
        part = _granted_part(outcome, begin_s, begin_s + _MINUTE_S)
        figure = f"minute {minute}: of what was granted, % off its half"
        yield line_of(table, "fair", figure, abs(100 * part / 0.5 - 100), bound=("<=", 5.0))
    for minute in (2, 3):  # in the first, what ran when it came is still served
        begin_s = back_s + (minute - 1) * _MINUTE_S
        window = Window(duration_s=begin_s + _MINUTE_S, warm_up_s=begin_s, step_s=begin_s + 2 * _MINUTE_S)
        off = abs(100 * _part(measure(outcome, window), "back") / 50 - 100)
        yield line_of(
            table, "fair", f"minute {minute}: of what was served, % off its half", off, bound=("<=", 5.0)
        )


def _part(figures: Figures, tenant: str) -> float:
    """Percent of the service."""
    served = {one.tenant: one.service_per_s for one in figures.tenants}
    return 100 * served[tenant] / sum(served.values())


def _first_tokens(figures: Figures) -> float:
    """Seconds, 95 % of the visitors' first tokens. The slowest visitor's."""
    return max(one.ttft_s.p95 for one in figures.tenants if one.tenant.startswith("visitor"))


def _granted_part(outcome: Outcome, begin_s: float, end_s: float) -> float:
    granted = [
        arrival.tenant == "back"
        for arrival, one in zip(outcome.arrivals, outcome.served, strict=True)
        if begin_s * SECOND_US <= one.granted_us < end_s * SECOND_US
    ]
    return sum(granted) / len(granted)
