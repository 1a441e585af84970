"""`python -m tests.simulation`: run many seeds, say what they found.

The exit status is 0 if no seed violates an invariant, or with a planted bug, if one does.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.simulation.bugs import BUGS, planted
from tests.simulation.run import PREFIX, directory_for_worlds, simulate
from tests.simulation.world import World

TAIL = 60
"""Entries of the trace that a failure shows."""


def main() -> int:
    arguments = _arguments()
    # One directory for all worlds, so that nothing stays of those that are broken off.
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=directory_for_worlds()) as parent:
        arguments.parent = Path(parent)
        return _main(arguments)


def _main(arguments: argparse.Namespace) -> int:
    if arguments.all_bugs:
        return max([_hunt(bug, arguments) for bug in BUGS])
    if arguments.bug:
        return _hunt(arguments.bug, arguments)
    began = time.monotonic()
    failed = 0
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    for seed, violation, tail in _results(seeds, None, arguments):
        if violation is not None:
            failed += 1
            print(report(seed, violation, tail), flush=True)
            if failed >= arguments.failures:
                break
    print(f"{len(seeds)} seeds from {arguments.start}: {failed} violated, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def report(seed: int, violation: str, tail: Iterable[str], *, bug: str | None = None) -> str:
    """What a person needs to know about a failure."""
    option = f" --bug {bug}" if bug else ""
    return (
        "\n".join(tail)
        + f"\nseed {seed} violates: {violation}\nagain: python -m tests.simulation --seeds 1 --start {seed}{option}"
    )


def tail_of(world: World, length: int = TAIL) -> list[str]:
    """The end of a trace as lines."""
    return [f"{entry[0] / 1e6:12.6f} " + " ".join(map(str, entry[1:])) for entry in world.trace[-length:]]


def _hunt(bug: str, arguments: argparse.Namespace) -> int:
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    for number, (seed, violation, tail) in enumerate(_results(seeds, bug, arguments), 1):
        if violation is not None:
            if arguments.verbose:
                print(report(seed, violation, tail, bug=bug))
            print(f"{bug}: found after {number} seeds (seed {seed}): {violation[:200]}", flush=True)
            return 0
    print(f"{bug}: NOT found within {len(seeds)} seeds")
    return 1


Result = tuple[int, str | None, list[str]]


def _results(seeds: Iterable[int], bug: str | None, arguments: argparse.Namespace) -> Iterator[Result]:
    length = 10**9 if arguments.verbose else TAIL
    jobs = [(seed, bug, length, arguments.parent) for seed in seeds]
    if arguments.jobs == 1 or len(jobs) == 1:
        yield from map(_run, jobs)
        return
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        yield from pool.imap(_run, jobs, chunksize=1 if bug else 10)


def _run(job: tuple[int, str | None, int, Path]) -> Result:
    seed, bug, length, parent = job
    gc.disable()  # what is collected when must not depend on earlier worlds
    with planted(bug):
        world = simulate(seed, parent=parent)
    tail = tail_of(world, length) if world.violation is not None or length > TAIL else []
    violation = world.violation
    del world
    if seed % 10 == 0:
        gc.collect()
    return seed, violation, tail


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant a bug and look for it")
    parser.add_argument("--all-bugs", action="store_true", help="look for each planted bug")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    parser.add_argument("--verbose", action="store_true", help="whole traces")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
