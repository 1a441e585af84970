"""Traces of requests in the formats they are published in, and the decision log of headrace itself.

Readers take lines, so that nothing here opens a file.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain
from typing import Any

import msgspec

from headrace.errors import SetupError
from headrace.simulate.workload import SECOND_US, Arrival


class TraceError(SetupError):
    """A line of a trace is not what its format says."""


class _MooncakeLine(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class DecisionLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of the decision log: what the queue was told and what it decided. No content, no names of
    users; tenants by their ids."""

    arrival_us: int
    tenant: str
    prompt_tokens: int
    output_tokens: int
    weight: float = 1.0
    service_class: str = "interactive"
    priority: int = 0
    blocks: tuple[int, ...] = ()
    granted_us: int | None = None
    """None: it was never granted."""
    replica: str | None = None


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)
_DECISION = msgspec.json.Decoder(DecisionLine)


def read(lines: Iterable[str], *, name: str, tenant: str = "trace") -> list[Arrival]:
    """The requests of a trace in order of arrival, the first at 0. The format is told from the first line.

    Raises `TraceError` that says which line of `name` is wrong. A trace without tenants is one tenant's.
    """
    stream = iter(lines)
    head = next(stream, "")
    if head.startswith("{"):
        reader = _json_lines(chain([head], stream), name, tenant)
    elif "ContextTokens" in head:
        reader = _azure(csv.DictReader(chain([head], stream)), name, tenant)
    elif "req_time_s" in head:
        reader = _clients(csv.DictReader(chain([head], stream)), name)
    elif "Request tokens" in head:
        reader = _burst(csv.DictReader(chain([head], stream)), name, tenant)
    else:
        raise TraceError(
            f"{name}: line 1 is of no known trace; known are Azure (TIMESTAMP,ContextTokens,GeneratedTokens),"
            " BurstGPT (Timestamp,…,Request tokens,Response tokens,…), Mooncake (JSON lines with timestamp, "
            "input_length, output_length, hash_ids), req_time_s,client,prompt_len,output_len, and the "
            "decision log"
        )
    arrivals = sorted(reader, key=lambda arrival: arrival.arrival_us)
    if not arrivals:
        raise TraceError(f"{name}: has no requests")
    first = arrivals[0].arrival_us
    return [msgspec.structs.replace(one, arrival_us=one.arrival_us - first) for one in arrivals]


def decision_line(arrival: Arrival, *, granted_us: int | None, replica: str | None) -> bytes:
    """A line of the decision log, without its end."""
    return msgspec.json.encode(
        DecisionLine(
            arrival_us=arrival.arrival_us,
            tenant=arrival.tenant,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            weight=arrival.weight,
            service_class=arrival.service_class,
            priority=arrival.priority,
            blocks=arrival.blocks,
            granted_us=granted_us,
            replica=replica,
        )
    )


def _json_lines(lines: Iterable[str], name: str, tenant: str) -> Iterator[Arrival]:
    is_decision: bool | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if is_decision is None:
            is_decision = '"arrival_us"' in line
        try:
            yield (
                _of_decision(_DECISION.decode(line))
                if is_decision
                else _of_mooncake(_MOONCAKE.decode(line), tenant)
            )
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"{name}: line {number}: {error}") from error


def _of_mooncake(line: _MooncakeLine, tenant: str) -> Arrival:
    return _checked(
        arrival_us=line.timestamp * 1000,
        tenant=tenant,
        prompt_tokens=line.input_length,
        output_tokens=line.output_length,
        blocks=line.hash_ids,
    )


def _of_decision(line: DecisionLine) -> Arrival:
    if line.service_class not in ("interactive", "batch"):
        raise ValueError(f"service_class {line.service_class!r}; allowed are interactive, batch")
    if not 0 < line.weight < 1e9:
        raise ValueError(f"weight {line.weight} is not a positive number")
    return _checked(
        arrival_us=line.arrival_us,
        tenant=line.tenant,
        prompt_tokens=line.prompt_tokens,
        output_tokens=line.output_tokens,
        weight=line.weight,
        service_class=line.service_class,
        priority=line.priority,
        blocks=line.blocks,
    )


def _azure(rows: Iterable[dict[str, str]], name: str, tenant: str) -> Iterator[Arrival]:
    for number, row in enumerate(rows, 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield _checked(
                arrival_us=_microseconds(at),
                tenant=tenant,
                prompt_tokens=int(row["ContextTokens"]),
                output_tokens=int(row["GeneratedTokens"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{name}: line {number}: {error}") from error


def _burst(rows: Iterable[dict[str, str]], name: str, tenant: str) -> Iterator[Arrival]:
    for number, row in enumerate(rows, 2):
        try:
            output = int(row["Response tokens"])
            if output == 0:
                continue  # a failed request of the trace: nothing was served
            yield _checked(
                arrival_us=round(float(row["Timestamp"]) * SECOND_US),
                tenant=row.get("Model") or tenant,
                prompt_tokens=int(row["Request tokens"]),
                output_tokens=output,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{name}: line {number}: {error}") from error


def _clients(rows: Iterable[dict[str, str]], name: str) -> Iterator[Arrival]:
    for number, row in enumerate(rows, 2):
        try:
            yield _checked(
                arrival_us=round(float(row["req_time_s"]) * SECOND_US),
                tenant=row["client"],
                prompt_tokens=int(row["prompt_len"]),
                output_tokens=int(row["output_len"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{name}: line {number}: {error}") from error


def _checked(**fields: Any) -> Arrival:
    arrival = Arrival(**fields)
    if arrival.prompt_tokens < 0 or arrival.output_tokens < 0:
        raise ValueError("tokens cannot be negative")
    return arrival


def _microseconds(at: datetime) -> int:
    seconds = (at - datetime(2020, 1, 1)).total_seconds()  # noqa: DTZ001 - only differences matter
    return round(seconds * SECOND_US)
