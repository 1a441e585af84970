"""Bugs planted in the fair queue, to show that its tests find them.

    python -m tests.scheduling.fair_bugs [--seeds 200]

Each bug replaces one method. The exit status is 0 if every bug is found and nothing is found without one.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from headrace.scheduling.counters import TenantCounter, TenantCounters
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.jobs import Job
from headrace.scheduling.preemption import RunningShares
from tests.scheduling.fair_machine import FairMachine
from tests.scheduling.fair_shares import check_backlogged, check_return, check_stopping


def _no_lift(counters: TenantCounters, tenant: str, weight: float) -> TenantCounter:
    known = counters.get(tenant)
    value = 0.0 if known is None else known.value
    counter = _ENTER(counters, tenant, weight)
    if counter.num_waiting == 1:
        counters.correct(counter, value - counter.value)
    return counter


def _swapped_weight(counters: TenantCounters, counter: TenantCounter, charge: float) -> None:
    _GRANT(counters, counter, charge * counter.weight * counter.weight)


def _no_charge_at_the_grant(queue: FairQueue[Any], job: Job[Any]) -> float:
    return 0.0


def _stopped_for_any(shares: RunningShares[Any], waiting: Job[Any], **terms: Any) -> Job[Any] | None:
    return _VICTIM(shares, waiting, **{**terms, "charge": 0.0, "quantum": 0.0})


_ENTER = TenantCounters.enter
_GRANT = TenantCounters.grant
_VICTIM = RunningShares.victim

BUGS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "no-lift": (TenantCounters, "enter", _no_lift),
    "swapped-weights": (TenantCounters, "grant", _swapped_weight),
    "charged-at-the-end": (FairQueue, "_charge", _no_charge_at_the_grant),
    "stopped-for-any": (RunningShares, "victim", _stopped_for_any),
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    owner, name, replacement = BUGS[bug]
    with mock.patch.object(owner, name, replacement):
        yield


def outside(seeds: int) -> str | None:
    """What the checks from outside find, or None."""
    for number in range(seeds):
        for check in (check_backlogged, check_return, check_stopping):
            try:
                check(number)
            except AssertionError as error:
                return f"{check.__name__}: {error}"
    return None


def inside(examples: int) -> str | None:
    """What random histories find, or None."""
    machine = seed(1)(FairMachine)
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            ),
        )
    except (AssertionError, Flaky) as error:
        return str(error).splitlines()[0] if str(error) else "an assertion of the queue itself"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    arguments = parser.parse_args()
    failed = 0
    for bug in (None, *BUGS):
        if bug is None:
            found = [outside(arguments.seeds), inside(arguments.seeds)]
        else:
            with planted(bug):
                found = [outside(arguments.seeds), inside(arguments.seeds)]
        is_right = (found == [None, None]) if bug is None else all(found)
        failed += not is_right
        print(f"{bug or 'as it is'}: {'right' if is_right else 'WRONG'}")
        for way, what in zip(("from outside", "by histories"), found, strict=True):
            print(f"    {way}: {what or 'nothing found'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
