"""What a seed stands for: models, tenants, limits, clients and everything that goes wrong."""

import random
from dataclasses import dataclass, field

import msgspec

from headrace.config.limits import UNLIMITED, LevelChanges, Limits, LimitValues
from headrace.config.settings import (
    EngineSettings,
    LedgerSettings,
    MemorySettings,
    ModelSettings,
    QueueSettings,
    Settings,
    StubTiming,
)
from tests.simulation.clients import Plan, make_plans

SECONDS_MAX = 90.0
"""Within this time all clients arrive and all faults begin."""
REQUEST_TIMEOUT_SECONDS = 45.0
QUEUE_TIMEOUT_SECONDS = 8.0
STEP_TIMEOUT_SECONDS = 6.0

DEPARTMENT = "sales"
USERS = ("ann", "bob")

EVENTS = (
    "kill_worker",
    "kill_computing",
    "kill_writing",
    "kill_server",
    "kill_server",
    "restart_server",
    "cut",
    "late",
    "stall",
    "shaky",
    "slow",
    "stuck",
    "full_disk",
    "doubled",
    "dropped",
    "mute",
    "limits",
    "limits",
)


@dataclass
class Event:
    """Something that happens to the platform."""

    kind: str
    at_s: float
    for_s: float = 0.0
    pick: float = 0.0
    """Between 0 and 1: which one it hits, or how hard."""


@dataclass
class Scenario:
    """A world before it begins."""

    seed: int
    settings: Settings
    tenants: list[Limits]
    levels: list[LevelChanges]
    """For each tenant its limits of users, departments and models."""
    keys: list[Limits]
    """For each tenant two keys, each with the limits at its place here."""
    plans: list[Plan]
    events: list[Event]
    crash_points: dict[int, str] = field(default_factory=dict)
    """Number of a trace entry: what dies right after it (`server` or `worker`)."""
    bad_starts: float = 0.0
    """How often a worker fails to start."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing goes wrong in it."""
        engines = [model.engine.stub for model in self.settings.models]
        has_faults = any(stub is not None and stub.fault_every_steps for stub in engines)
        return not (self.events or self.crash_points or self.bad_starts or has_faults)


def make_scenario(seed: int) -> Scenario:
    """Everything about a world that its seed decides beforehand."""
    rng = random.Random(f"scenario {seed}")
    batching = random.Random(f"batching {seed}")
    memory = random.Random(f"memory {seed}")
    guard = random.Random(f"guard {seed}")
    models = [_model(rng, batching, memory, guard, f"m{number}") for number in range(rng.choice((1, 1, 2)))]
    settings = Settings(
        models=models,
        limits=Limits(concurrency=rng.choice((3, 5)), tpm=rng.choice((None, 3000)))
        if rng.random() < 0.3
        else UNLIMITED,
        default_max_tokens=rng.choice((12, 24, 200)),
        queue=QueueSettings(
            length=rng.choice((2, 6, 64)),
            tokens=rng.choice((600, 1_000_000)),
            tenant_tokens=rng.choice((None, 400)),
            timeout_s=rng.choice((1.5, QUEUE_TIMEOUT_SECONDS)),
        ),
        lease_s=rng.choice((1.0, 4.0, 30.0)),
        ledger=LedgerSettings(
            abort_policy=rng.choice(("generated", "delivered", "free_on_error")),
            refusals_per_s=rng.choice((0, 2, 50)),
        ),
        headers_after_ms=rng.choice((0, 300, 2000)),
        keep_alive_ms=rng.choice((200, 1000)),
        request_timeout_s=rng.choice((3.0, REQUEST_TIMEOUT_SECONDS)),
        worker_step_timeout_s=STEP_TIMEOUT_SECONDS,
        worker_start_timeout_s=2.0,
        drain_s=2.0,
        memory_throttle_s=guard.choice((0.5, 5.0, 600.0)),
    )
    over_s = rng.choice((0.5, 2.0, 5.0, 5.0, 10.0, 20.0, SECONDS_MAX))
    tenants = rng.choice((1, 2, 3))
    plans = make_plans(
        rng,
        models=[model.id for model in models],
        tenants=tenants,
        num=rng.randrange(20, 50),
        over_s=over_s,
    )
    scenario = Scenario(
        seed=seed,
        settings=settings,
        tenants=[_with_memory(guard, _limits(rng), chance=0.5) for _ in range(tenants)],
        levels=[_levels(rng, models) for _ in range(tenants)],
        keys=[
            _with_memory(guard, _limits(rng) if rng.random() < 0.3 else UNLIMITED, chance=0.1)
            for _ in range(tenants * 2)
        ],
        plans=plans,
        events=[_event(rng, over_s, EVENTS) for _ in range(rng.choice((0, 1, 2, 3, 4, 6)))],
        bad_starts=rng.choice((0.0, 0.0, 0.2)),
    )
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        scenario.crash_points[int(10 ** rng.uniform(1.0, 3.2))] = rng.choice(("server", "server", "worker"))
    return scenario


def _model(
    rng: random.Random, batching: random.Random, memory: random.Random, guard: random.Random, model_id: str
) -> ModelSettings:
    return ModelSettings(
        id=model_id,
        workers=rng.choice((1, 1, 2)),
        limits=_with_memory(
            guard, Limits(concurrency=rng.choice((2, 4))) if rng.random() < 0.2 else UNLIMITED, chance=0.1
        ),
        memory=guard.choice((None, None, MemorySettings(base_mb=10 / 1024, mb_per_token=2 / 1024))),
        engine=EngineSettings(
            max_batch_size=rng.choice((1, 2, 4)),
            max_context_tokens=rng.choice((128, 512)),
            max_batch_tokens=rng.choice((64, 128)),
            batching=batching.choice(("continuous", "continuous", "continuous", "static")),
            batch_wait_ms=batching.choice((0.0, 0.0, 5.0, 200.0)),
            kv_layout=memory.choice(("per_sequence", "unified")),
            kv_tokens=memory.choice((None, 70, 90, 110)),
            batch_cost_alpha=batching.choice((0.3, 1.0)),
            stub=StubTiming(
                prefill_us_per_token=rng.choice((50, 1000)),
                decode_us_per_step=rng.choice((5_000, 40_000, 150_000)),
                decode_us_per_sequence=rng.choice((100, 2_000)),
                output_tokens=rng.choice((6, 12, 200)),
                seed=rng.randrange(1000),
                fault_every_steps=rng.choice((0, 0, 0, 23)),
            ),
        ),
    )


def _limits(rng: random.Random) -> Limits:
    return Limits(
        rps=rng.choice((0.5, 2, 5, 10)) if rng.random() < 0.2 else None,
        concurrency=rng.choice((1, 2, 3, 4)) if rng.random() < 0.25 else None,
        streams=rng.choice((1, 2, 3)) if rng.random() < 0.15 else None,
        tpm=rng.choice((150, 400, 1000, 2500)) if rng.random() < 0.4 else None,
        max_total_tokens=rng.choice((100, 400)) if rng.random() < 0.1 else None,
    )


def _with_memory(rng: random.Random, limits: Limits, *, chance: float) -> Limits:
    """With a limit of memory in some worlds: for so many tokens of the stub's, which take a kilobyte each."""
    if rng.random() >= chance:
        return limits
    return msgspec.structs.replace(limits, gpu_memory_gb=rng.choice((60, 120, 250, 500)) / 2**20)


def _levels(rng: random.Random, models: list[ModelSettings]) -> LevelChanges:
    """The second key of each tenant belongs to the department."""
    user_limits = _values(_limits(rng)) if rng.random() < 0.3 else {}
    return LevelChanges(
        departments={DEPARTMENT: _values(_limits(rng)) if rng.random() < 0.3 else {}},
        user_limits=user_limits,
        users={USERS[0]: _values(_limits(rng))} if rng.random() < 0.2 and not user_limits else {},
        model_limits={model.id: _values(_limits(rng)) for model in models if rng.random() < 0.2},
    )


def _values(limits: Limits) -> LimitValues:
    values: LimitValues = msgspec.to_builtins(limits)
    return values


def random_limits(rng: random.Random) -> dict[str, float | None]:
    """A change to a tenant's limits."""
    limits = _with_memory(rng, _limits(rng), chance=0.4)
    return {name: getattr(limits, name) for name in ("rps", "concurrency", "streams", "tpm", "gpu_memory_gb")}


def _event(rng: random.Random, over_s: float, kinds: tuple[str, ...]) -> Event:
    return Event(
        kind=rng.choice(kinds),
        at_s=rng.uniform(0.0, over_s + 2.0),
        for_s=rng.choice((0.3, 2.0, 7.0)),
        pick=rng.random(),
    )
