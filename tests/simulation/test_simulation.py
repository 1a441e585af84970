"""The simulation itself: it repeats, it holds on the code as it is, and it finds what is planted."""

import hashlib
import os
import subprocess
import sys

import pytest

from tests.simulation.__main__ import report, tail_of
from tests.simulation.bugs import BUGS, planted
from tests.simulation.run import simulate
from tests.simulation.world import World

SEEDS = 100
BUG_SEEDS_MAX = 300
PRINT_DIGEST = """
from tests.simulation.test_simulation import digest
from tests.simulation.run import simulate
print(*(digest(simulate(seed)) for seed in range(6)))
"""


def digest(world: World) -> str:
    """A world's whole trace in one word."""
    return hashlib.sha256(repr(world.trace).encode()).hexdigest()


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_every_invariant_holds(first: int) -> None:
    for seed in range(first, first + 20):
        world = simulate(seed)
        assert world.violation is None, report(seed, world.violation or "", tail_of(world))


def test_a_world_is_full_of_life() -> None:
    """Seeds in which nothing happens would prove nothing."""
    seen: dict[str, int] = {}
    for seed in range(150):
        for entry in simulate(seed).trace:
            words = [str(entry[1])]
            if entry[1] in ("settled", "refused"):
                words.append(f"{entry[1]} {entry[3]}")
            for word in words:
                seen[word] = seen.get(word, 0) + 1
    for outcome in (
        "completed",
        "client_closed",
        "worker_lost",
        "worker_error",
        "timeout",
        "recovered",
        "expired",
    ):
        assert seen.get(f"settled {outcome}", 0) >= 3, (outcome, seen)
    assert seen["refused rate_limit_exceeded"] > 20
    assert seen["refused ledger_unavailable"] > 0
    assert seen["no memory"] > 20 and seen["throttled"] > 20
    for event in (
        "server died",
        "server stopped",
        "worker ended",
        "cut",
        "late",
        "dropped",
        "doubled",
        "muted",
        "preempted",
        "settled late",
    ):
        assert seen.get(event, 0) >= 3, (event, seen)


def test_the_same_seed_is_the_same_world() -> None:
    for seed in range(12):
        first, second = simulate(seed), simulate(seed)
        assert first.trace == second.trace


def test_the_same_seed_is_the_same_world_in_another_process_with_other_hashes() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", PRINT_DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    with planted(bug):
        for seed in range(BUG_SEEDS_MAX):
            world = simulate(seed)
            if world.violation is not None:
                break
        else:
            pytest.fail(f"{bug} was not found within {BUG_SEEDS_MAX} seeds")
    said = report(seed, world.violation, tail_of(world), bug=bug)
    assert f"--seeds 1 --start {seed} --bug {bug}" in said
    assert "VIOLATION" in said
