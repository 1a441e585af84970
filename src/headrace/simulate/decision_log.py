"""The decision log: what a queue was told of each request, and what it decided. JSON lines, without content.

The first line says what it is (`Header`), every other one is a request (`DecisionLine`), in order of arrival. A log without
its first line is read as version 1, so that a part cut out of one can be used. Fields that are not known here are passed over.

Not in it: prompts, answers, names and ids of users, keys, request ids. Tenants stand in it by their ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, get_args

import msgspec

from headrace.bounds import (
    PRIORITY_MAX,
    TRACE_REQUESTS_MAX,
    TRACE_SECONDS_MAX,
    TRACE_TIME_US_MAX,
    TRACE_TOKENS_MAX,
)
from headrace.errors import SetupError
from headrace.scheduling.policy import ServiceClass
from headrace.simulate.logged_setup import LoggedSetup, logged
from headrace.simulate.outcome import Outcome, Served
from headrace.simulate.workload import SECOND_US, Arrival

FORMAT: Final = "headrace-decisions"
VERSION: Final = 1
SERVED: Final = "served"
REFUSED: Final = "refused"


class TraceError(SetupError):
    """A line of a trace is not what its format says."""


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a log is."""

    format: Literal["headrace-decisions"]
    version: int
    source: Literal["simulation", "ledger"]
    setup: LoggedSetup | None = None
    """Policy and fleet, whole: the same requests under them get the same decisions (`headrace.simulate.replay`).
    None: whatever a server did."""
    start_ts: int | None = None
    """Of time 0, in microseconds since 1970 UTC, where that means anything."""


class DecisionLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times are microseconds since the first request of the log arrived, tokens are counts."""

    arrival_us: int
    tenant: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that came out of a prefix cache."""
    expected_output_tokens: int | None = None
    """What the queue was told of the answer's length. None: not recorded."""
    weight: float = 1.0
    service_class: str = "interactive"
    """`interactive` or `batch`."""
    priority: int = 0
    blocks: tuple[int, ...] = ()
    """Identities of the prompt's leading blocks of 512 tokens: equal ones in front are an equal prefix."""
    outcome: str = SERVED
    """`served`, `refused`, or how the ledger says that it ended early."""
    granted_us: int | None = None
    """When it got its place; the first time, if it was stopped for another. None: never."""
    waited_us: int | None = None
    """In the queue, all in all."""
    first_us: int | None = None
    """First token. None: none came."""
    last_us: int | None = None
    replica: str | None = None
    """The one that served it to its end."""
    preemptions: int = 0
    """How often it was stopped for another."""
    lost_tokens: int = 0
    """That had been computed when it was stopped, and were computed again."""


class DecisionLog(msgspec.Struct, frozen=True):
    header: Header | None
    """None: the log has lost its first line."""
    lines: list[DecisionLine]


_CLASSES: Final = get_args(ServiceClass)
_HEADER: Final = msgspec.json.Decoder(Header)
_LINE: Final = msgspec.json.Decoder(DecisionLine)
_JSON: Final = msgspec.json.Encoder()


def is_decision_log(head: str) -> bool:
    """Whether a file that begins with this line is one."""
    return f'"{FORMAT}"' in head or '"arrival_us"' in head


def read_log(lines: Iterable[str], *, name: str) -> DecisionLog:
    """A log, its requests in order of arrival, the first at 0. Raises `TraceError` that says which line of `name`
    is wrong."""
    header: Header | None = None
    found: list[DecisionLine] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if header is None and not found and f'"{FORMAT}"' in line:
                header = _HEADER.decode(line)
                _check_version(header)
            else:
                found.append(_checked(_LINE.decode(line)))
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"{name}: line {number}: {error}") from error
        if len(found) > TRACE_REQUESTS_MAX:
            raise TraceError(f"{name}: has more than {TRACE_REQUESTS_MAX:,} requests")
    if not found:
        raise TraceError(f"{name}: has no requests")
    lines_in_order = in_order(found)
    if lines_in_order[-1].arrival_us > TRACE_SECONDS_MAX * SECOND_US:
        raise TraceError(
            f"{name}: its last request comes more than {TRACE_SECONDS_MAX:,} s after its first one"
        )
    return DecisionLog(header, lines_in_order)


def in_order(lines: list[DecisionLine]) -> list[DecisionLine]:
    """By arrival, the first at 0."""
    lines.sort(key=lambda line: line.arrival_us)
    start_us = lines[0].arrival_us
    return lines if start_us == 0 else [_moved(line, start_us) for line in lines]


def write_log(header: Header, lines: Iterable[DecisionLine]) -> Iterator[bytes]:
    """The lines of the file, each with its end."""
    yield _JSON.encode(header) + b"\n"
    for line in lines:
        yield _JSON.encode(line) + b"\n"


def log_of(outcome: Outcome) -> tuple[Header, list[DecisionLine]]:
    """What a simulated fleet decided."""
    header = Header(format=FORMAT, version=VERSION, source="simulation", setup=logged(outcome.setup))
    lines = [_line(arrival, one) for arrival, one in zip(outcome.arrivals, outcome.served, strict=True)]
    return header, in_order(lines) if lines else lines


def arrival_of(line: DecisionLine) -> Arrival:
    """The request, as it came."""
    return Arrival(
        arrival_us=line.arrival_us,
        tenant=line.tenant,
        prompt_tokens=line.prompt_tokens,
        output_tokens=line.output_tokens,
        weight=line.weight,
        service_class="batch" if line.service_class == "batch" else "interactive",
        priority=line.priority,
        blocks=line.blocks,
        cached_tokens=line.cached_tokens,
        expected_output_tokens=line.expected_output_tokens,
    )


def served_of(line: DecisionLine) -> Served:
    """What became of it. Who never got a token was not served."""
    is_served = line.first_us is not None and line.last_us is not None
    granted_us = line.granted_us
    waited_us = line.waited_us
    if waited_us is None:
        waited_us = 0 if granted_us is None else max(granted_us - line.arrival_us, 0)
    return Served(
        granted_us=granted_us or 0,
        waited_us=waited_us,
        first_us=line.first_us or 0 if is_served else 0,
        last_us=line.last_us or 0 if is_served else 0,
        cached_tokens=line.cached_tokens,
        expected_output_tokens=line.expected_output_tokens or 0,
        replica=line.replica,
        is_refused=line.outcome == REFUSED,
        num_preemptions=line.preemptions,
        lost_tokens=line.lost_tokens,
    )


def has_recorded_times(lines: Sequence[DecisionLine]) -> bool:
    """Whether the log says what was decided, not only what was asked."""
    return any(line.last_us is not None for line in lines)


def _line(arrival: Arrival, served: Served) -> DecisionLine:
    is_served = bool(served.last_us)
    is_granted = served.replica is not None
    return DecisionLine(
        arrival_us=arrival.arrival_us,
        tenant=arrival.tenant,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=arrival.output_tokens,
        cached_tokens=arrival.cached_tokens,
        expected_output_tokens=served.expected_output_tokens,
        weight=arrival.weight,
        service_class=arrival.service_class,
        priority=arrival.priority,
        blocks=arrival.blocks,
        outcome=REFUSED if served.is_refused else SERVED,
        granted_us=served.granted_us if is_granted else None,
        waited_us=served.waited_us if is_granted else None,
        first_us=served.first_us if is_served else None,
        last_us=served.last_us if is_served else None,
        replica=served.replica,
        preemptions=served.num_preemptions,
        lost_tokens=served.lost_tokens,
    )


def _moved(line: DecisionLine, start_us: int) -> DecisionLine:
    times = {
        name: at_us - start_us
        for name in ("arrival_us", "granted_us", "first_us", "last_us")
        if (at_us := getattr(line, name)) is not None
    }
    return msgspec.structs.replace(line, **times)


def _check_version(header: Header) -> None:
    if header.version != VERSION:
        raise ValueError(
            f"is a decision log of version {header.version}; this headrace reads version {VERSION}"
        )


def _checked(line: DecisionLine) -> DecisionLine:
    if line.service_class not in _CLASSES:
        raise ValueError(f"service_class {line.service_class!r}; allowed are {', '.join(_CLASSES)}")
    if not 0 < line.weight < 1e9:
        raise ValueError(f"weight {line.weight} is not a positive number")
    for name in ("prompt_tokens", "output_tokens", "cached_tokens", "expected_output_tokens"):
        tokens = getattr(line, name)
        if tokens is not None and not 0 <= tokens <= TRACE_TOKENS_MAX:
            raise ValueError(f"{name} is {tokens}; allowed are 0 to {TRACE_TOKENS_MAX:,}")
    if abs(line.priority) > PRIORITY_MAX:
        raise ValueError(f"priority is {line.priority}; allowed are -{PRIORITY_MAX} to {PRIORITY_MAX}")
    for name in ("arrival_us", "granted_us", "first_us", "last_us", "waited_us"):
        if abs(getattr(line, name) or 0) > TRACE_TIME_US_MAX:
            raise ValueError(f"{name} is {getattr(line, name)}; allowed is up to {TRACE_TIME_US_MAX:,}")
    if line.cached_tokens > line.prompt_tokens:
        raise ValueError(
            f"cached_tokens {line.cached_tokens} are more than prompt_tokens {line.prompt_tokens}"
        )
    return line
