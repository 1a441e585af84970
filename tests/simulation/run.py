"""Runs the world of a seed: its own secrets, its own directory, its log lines in its trace."""

import random
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from tests.simulation.scenario import make_scenario
from tests.simulation.virtual_loop import Stalled, VirtualLoop
from tests.simulation.worker import prompts
from tests.simulation.world import Violation, World

PREFIX = "headrace-simulation-"
SHARED_MEMORY = Path("/dev/shm")
BUG_EVENTS = frozenset(
    ("request_failed", "handler_failed", "operation_left_open", "prompt_failed", "orphaned_worker_still_runs")
)
"""Log events that only a bug of ours can cause."""


def simulate(seed: int, *, parent: Path | None = None) -> World:
    """Run a seed's world to its end. `violation` says what was wrong, if anything was."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or directory_for_worlds()))
    loop = VirtualLoop()
    prompts()  # made once for all worlds, and not from the secrets of any
    try:
        with _seeded_secrets(random.Random(f"secrets {seed}")):
            world = World(make_scenario(seed), directory / "data", loop)
            (world.path / "progress").mkdir(parents=True)
            with _captured_logs(world):
                try:
                    loop.run_world(world.run())
                except Violation:
                    pass
                except Stalled:
                    world.violation = "nothing can happen any more, and somebody still waits"
                finally:
                    _let_go(world)
        return world
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def directory_for_worlds() -> Path | None:
    """Memory, where there is some that looks like a disk; else the usual place."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


def _let_go(world: World) -> None:
    """A world that ended early has open files."""
    if world.server is not None:
        world.server.let_go()
    for worker in world.workers:
        worker.let_go()


@contextmanager
def _seeded_secrets(rng: random.Random) -> Iterator[None]:
    real = secrets.token_hex, secrets.randbits
    secrets.token_hex = lambda size=32: f"{rng.getrandbits(8 * (size or 32)):0{2 * (size or 32)}x}"
    secrets.randbits = rng.getrandbits
    try:
        yield
    finally:
        secrets.token_hex, secrets.randbits = real


@contextmanager
def _captured_logs(world: World) -> Iterator[None]:
    """Log lines go into the trace; those that only a bug can cause end the world."""

    def capture(logger: Any, method: str, event: Any) -> Any:
        name = event["event"]
        if method not in ("debug", "info"):
            world.note("log", name, str(event.get("error", "")))
        if name in BUG_EVENTS:
            world.violated(f"the log says {name}: {_cause(event)}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[capture], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def _cause(event: dict[str, Any]) -> str:
    if event.get("exc_info") is True:
        event = {**event, "exc_info": repr(sys.exc_info()[1])}
    return ", ".join(f"{name}={value}" for name, value in event.items() if name != "event")
