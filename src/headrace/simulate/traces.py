"""Traces of requests in the formats they are published in; and the decision log (`headrace.simulate.decision_log`).

Readers take lines, so that nothing here opens a file.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain
from typing import Any

import msgspec

from headrace.simulate.decision_log import TraceError, arrival_of, is_decision_log, read_log
from headrace.simulate.workload import SECOND_US, Arrival


class _MooncakeLine(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)


def read(lines: Iterable[str], *, name: str, tenant: str = "trace") -> list[Arrival]:
    """The requests of a trace in order of arrival, the first at 0. The format is told from the first line.

    Raises `TraceError` that says which line of `name` is wrong. A trace without tenants is one tenant's.
    """
    stream = iter(lines)
    head = next(stream, "")
    if is_decision_log(head):
        return [arrival_of(line) for line in read_log(chain([head], stream), name=name).lines]
    if head.startswith("{"):
        reader = _mooncake(chain([head], stream), name, tenant)
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


def _mooncake(lines: Iterable[str], name: str, tenant: str) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _of_mooncake(_MOONCAKE.decode(line), tenant)
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
