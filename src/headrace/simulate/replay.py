"""A decision log decided once more by this version: the same decisions, or which one differs first."""

from typing import Any, Final

import msgspec

from headrace.simulate.decision_log import DecisionLine, DecisionLog, TraceError, arrival_of, log_of
from headrace.simulate.fleet import simulate
from headrace.simulate.logged_setup import setup_of

DECIDED: Final = (
    "granted_us", "replica", "outcome", "first_us", "last_us", "waited_us", "preemptions",
    "lost_tokens",
)  # fmt: skip
"""What must be the same, in the order in which it comes about. What was expected of each answer is taken from the log."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request, what differs first."""

    request: int
    """Its place in the log, from 1."""
    tenant: str
    arrival_us: int
    field: str
    logged: int | str | None
    decided: int | str | None
    at_us: int
    """When it shows, in time since the first arrival."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison."""

    policy: str
    requests: int
    differing: int
    """Requests of which anything differs."""
    first: Difference | None
    """By time. None: nothing differs."""


def replay(log: DecisionLog, *, name: str) -> Replay:
    """Serve the requests of the log with its own fleet and policy, and compare.

    Raises `TraceError` if the log does not say what these were: it has lost its first line, or it came from a ledger.
    """
    if log.header is None or log.header.setup is None:
        reason = "has lost its first line, which says under what it was made" if log.header is None else (
            "came out of a ledger: a server decided, under policies that it does not name"
        )  # fmt: skip
        raise TraceError(
            f"{name}: {reason}; --trace serves its requests with a fleet and policies of your choice"
        )
    setup = setup_of(log.header.setup)
    _, lines = log_of(simulate(setup, [arrival_of(line) for line in log.lines]))
    found = [
        difference
        for number, (old, new) in enumerate(zip(log.lines, lines, strict=True), 1)
        if (difference := _difference(number, old, new)) is not None
    ]
    return Replay(
        policy=setup.name,
        requests=len(lines),
        differing=len(found),
        first=min(found, key=lambda one: (one.at_us, one.request), default=None),
    )


def _difference(number: int, old: DecisionLine, new: DecisionLine) -> Difference | None:
    for field in DECIDED:
        was, is_now = getattr(old, field), getattr(new, field)
        if was != is_now:
            return Difference(
                request=number,
                tenant=old.tenant,
                arrival_us=old.arrival_us,
                field=field,
                logged=was,
                decided=is_now,
                at_us=_time(field, old, new),
            )
    return None


def _time(field: str, old: DecisionLine, new: DecisionLine) -> int:
    """When the two part: at the earlier of two times, at the end for what is known only then."""
    if field == "outcome":
        return old.arrival_us
    names = {"replica": ("granted_us",), "waited_us": ("last_us",), "preemptions": ("last_us",), "lost_tokens": ("last_us",)}  # fmt: skip
    times: list[Any] = [getattr(line, name) for line in (old, new) for name in names.get(field, (field,))]
    return min((time for time in times if time is not None), default=old.arrival_us)
