"""Traces of requests in the formats they are published in; and the decision log (`headrace.simulate.decision_log`).

Readers take lines, so that nothing here opens a file.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import msgspec

from headrace.bounds import TRACE_REQUESTS_MAX, TRACE_SECONDS_MAX, TRACE_TIME_US_MAX, TRACE_TOKENS_MAX
from headrace.simulate.decision_log import TraceError, arrival_of, is_decision_log, read_log
from headrace.simulate.workload import SECOND_US, Arrival

Row = Mapping[str, str | None]


class _MooncakeLine(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)
_KNOWN = (
    "known are Azure (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT (Timestamp,…,Request tokens,Response tokens,…), "
    "Mooncake (JSON lines with timestamp, input_length, output_length, hash_ids), "
    "req_time_s,client,prompt_len,output_len, and the decision log"
)


def read(lines: Iterable[str], *, name: str, tenant: str = "trace") -> list[Arrival]:
    """The requests of a trace in order of arrival, the first at 0. The format is told from the first line.

    Raises `TraceError` that says which line of `name` is wrong. A trace without tenants is one tenant's.
    """
    stream = iter(lines)
    head = next(stream, "")
    whole = chain([head], stream)
    if is_decision_log(head):
        return [arrival_of(line) for line in read_log(whole, name=name).lines]
    if head.startswith("{"):
        reader = _mooncake(whole, name, tenant)
    elif "ContextTokens" in head:
        reader = _rows(whole, name, lambda row: _of_azure(row, tenant))
    elif "req_time_s" in head:
        reader = _rows(whole, name, _of_clients)
    elif "Request tokens" in head:
        reader = _rows(whole, name, lambda row: _of_burst(row, tenant))
    else:
        raise TraceError(f"{name}: {'line 1 is of no known trace' if head else 'is empty'}; {_KNOWN}")
    return _in_order(reader, name)


def _in_order(reader: Iterable[Arrival], name: str) -> list[Arrival]:
    arrivals = []
    for arrival in reader:
        arrivals.append(arrival)
        if len(arrivals) > TRACE_REQUESTS_MAX:
            raise TraceError(f"{name}: has more than {TRACE_REQUESTS_MAX:,} requests")
    if not arrivals:
        raise TraceError(f"{name}: has no requests")
    arrivals.sort(key=lambda arrival: arrival.arrival_us)
    first_us, last_us = arrivals[0].arrival_us, arrivals[-1].arrival_us
    if last_us - first_us > TRACE_SECONDS_MAX * SECOND_US:
        raise TraceError(
            f"{name}: its last request comes more than {TRACE_SECONDS_MAX:,} s after its first one"
        )
    return [msgspec.structs.replace(one, arrival_us=one.arrival_us - first_us) for one in arrivals]


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


def _rows(lines: Iterable[str], name: str, make: Callable[[Row], Arrival | None]) -> Iterator[Arrival]:
    rows = csv.DictReader(lines)
    while True:
        try:
            row = next(rows, None)
            if row is None:
                return
            found = make(row)
        except csv.Error as error:  # the line is not counted yet
            raise TraceError(f"{name}: line {rows.line_num + 1}: {error}") from error
        except ValueError as error:
            raise TraceError(f"{name}: line {rows.line_num}: {error}") from error
        if found is not None:
            yield found


def _of_azure(row: Row, tenant: str) -> Arrival:
    text = _text(row, "TIMESTAMP")
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None:
            at = at.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"TIMESTAMP is {text!r}, not like 2023-11-16 18:15:46.680590") from error
    seconds = (at - datetime(2020, 1, 1)).total_seconds()  # noqa: DTZ001 - only differences matter
    return _checked(
        arrival_us=round(seconds * SECOND_US),
        tenant=tenant,
        prompt_tokens=_count(row, "ContextTokens"),
        output_tokens=_count(row, "GeneratedTokens"),
    )


def _of_burst(row: Row, tenant: str) -> Arrival | None:
    output = _count(row, "Response tokens")
    if output == 0:
        return None  # a failed request of the trace: nothing was served
    return _checked(
        arrival_us=_time_us(row, "Timestamp"),
        tenant=row.get("Model") or tenant,
        prompt_tokens=_count(row, "Request tokens"),
        output_tokens=output,
    )


def _of_clients(row: Row) -> Arrival:
    return _checked(
        arrival_us=_time_us(row, "req_time_s"),
        tenant=_text(row, "client"),
        prompt_tokens=_count(row, "prompt_len"),
        output_tokens=_count(row, "output_len"),
    )


def _text(row: Row, column: str) -> str:
    text = row.get(column)
    if not text:
        raise ValueError(f"{column} is missing")
    return text


def _count(row: Row, column: str) -> int:
    text = _text(row, column)
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{column} is {text!r}, not a whole number") from error


def _time_us(row: Row, column: str) -> int:
    text = _text(row, column)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"{column} is {text!r}, not a time in seconds")
    return round(seconds * SECOND_US)


def _checked(**fields: Any) -> Arrival:
    arrival = Arrival(**fields)
    if min(arrival.prompt_tokens, arrival.output_tokens) < 0:
        raise ValueError("tokens cannot be negative")
    if max(arrival.prompt_tokens, arrival.output_tokens) > TRACE_TOKENS_MAX:
        raise ValueError(f"more than {TRACE_TOKENS_MAX:,} tokens")
    if abs(arrival.arrival_us) > TRACE_TIME_US_MAX:
        raise ValueError(f"a time more than {TRACE_TIME_US_MAX // SECOND_US:,} s from 0")
    return arrival
