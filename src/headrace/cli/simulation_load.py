"""What `headrace simulate` is to serve: a synthetic load, traces, or the traffic in a server's ledger."""

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

import click
import msgspec

from headrace.admin.usage_query import BadQuery, parse_query
from headrace.bounds import MIB, TRACE_BYTES_MAX, TRACE_REQUESTS_MAX
from headrace.clock import SystemClock
from headrace.errors import SetupError
from headrace.simulate.decision_log import (
    DecisionLog,
    TraceError,
    arrival_of,
    has_recorded_times,
    is_decision_log,
    read_log,
    served_of,
)
from headrace.simulate.engine import EngineModel
from headrace.simulate.outcome import Outcome, Prediction, Served, Setup
from headrace.simulate.recorded import Recorded, engine_speed, record
from headrace.simulate.traces import read
from headrace.simulate.workload import LOADS, Arrival, merged
from headrace.store.traffic import read_traffic, tenant_weights

RECORDED: Final = "recorded"
_UNREADABLE: Final = (OSError, EOFError, zlib.error, UnicodeDecodeError)
"""What reading a file that is no trace may end in."""
_BUFFER_BYTES: Final = 256 * 1024
_GZIP_MAGIC: Final = b"\x1f\x8b"


class Load(msgspec.Struct, kw_only=True):
    """What is served, and what is known of how it was served."""

    arrivals: list[Arrival]
    served: list[Served] | None = None
    """Of a decision log, or a ledger: what became of each."""
    prediction: Prediction | None = None
    """Under which a decision log was made."""
    ledger: Recorded | None = None
    engine: EngineModel | None = None
    """With the speed that the ledger's operations had."""

    def recorded(self) -> Outcome | None:
        """What was, as if it were a run."""
        if self.served is None:
            return None
        return Outcome(
            setup=Setup(name=RECORDED),
            arrivals=self.arrivals,
            served=self.served,
            end_us=max((one.last_us for one in self.served), default=0),
        )


def load_of(options: dict[str, Any]) -> Load:
    """What the options of a run ask for. Raises `click.UsageError` and `HeadraceError`."""
    sources = sum((bool(options["traces"]), options["load"] is not None, options["from_ledger"] is not None))
    if sources != 1:
        raise click.UsageError("say what to serve: one of --trace FILE, --load NAME and --from-ledger LEDGER")
    if options["from_ledger"] is None:
        for name in ("from_", "to", "tenant", "model"):
            if options[name] is not None:
                raise click.UsageError(f"--{name.rstrip('_')} goes with --from-ledger")
        found = _of_traces(options["traces"]) if options["traces"] else _synthetic(options)
    else:
        found = of_ledger(options["from_ledger"], options)
    return _adapted(found, options)


def of_ledger(path: Path, options: dict[str, Any]) -> Load:
    """What the operations of a server's ledger amount to. The server may run meanwhile. `path` is the ledger, or its
    directory; tenants' weights come out of the control.db beside it."""
    filters = {
        "from": options["from_"],
        "to": options["to"],
        "tenant": options["tenant"],
        "model": options["model"],
    }
    try:
        query = parse_query({name: value for name, value in filters.items() if value is not None})
    except BadQuery as error:
        raise click.BadParameter(str(error), param_hint=f"--{error.field}") from error
    if path.is_dir():
        path = path / "ledger.db"
    rows = read_traffic(path, query, SystemClock())
    try:
        found = record(rows, tenant_weights(path.with_name("control.db")), name=str(path))
    except TraceError as error:
        if query.model is None and "several models" in str(error):
            raise TraceError(f"{error}; choose one with --model") from error
        raise
    load = _of_log(found.log)
    load.ledger, load.engine = found, engine_speed(rows, EngineModel())
    return load


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a trace, which may be packed (gzip). Raises `SetupError`."""
    with _lines(path) as lines:
        return read(lines, name=str(path), tenant=path.name)


def read_decisions(path: Path) -> DecisionLog:
    """A decision log, which may be packed (gzip). Raises `SetupError`."""
    with _lines(path) as lines:
        return read_log(lines, name=str(path))


def _of_traces(paths: Sequence[Path]) -> Load:
    if len(paths) == 1:
        with _lines(paths[0]) as lines:
            is_log = is_decision_log(lines.readline())
        if is_log:
            return _of_log(read_decisions(paths[0]))
    arrivals = [arrival for path in paths for arrival in read_trace(path)]
    arrivals.sort(key=lambda arrival: arrival.arrival_us)
    return Load(arrivals=arrivals)


class _Bounded(io.RawIOBase):
    """A file of which no more than `TRACE_BYTES_MAX` can be read, packed small as it may be."""

    def __init__(self, inner: io.BufferedIOBase) -> None:
        super().__init__()
        self._inner = inner
        self._left = TRACE_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count = self._inner.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise SetupError(f"has more than {TRACE_BYTES_MAX // MIB:,} MiB")
        return count


@contextmanager
def _lines(path: Path) -> Iterator[TextIO]:
    """The lines of a file. What is wrong with it, here or where they are read, is a `SetupError` that names it."""
    try:
        with path.open("rb") as file:
            is_packed = file.peek(2)[:2] == _GZIP_MAGIC
            inner = gzip.GzipFile(fileobj=file) if is_packed else file
            buffered = io.BufferedReader(_Bounded(inner), _BUFFER_BYTES)
            with io.TextIOWrapper(buffered, encoding="utf-8-sig", newline="") as lines:
                yield lines
    except TraceError:
        raise
    except _UNREADABLE as error:
        what = "is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error}"
        raise SetupError(f"{path}: {what}") from error
    except SetupError as error:
        raise SetupError(f"{path}: {error}") from error


def _of_log(log: DecisionLog) -> Load:
    setup = log.header.setup if log.header else None
    return Load(
        arrivals=[arrival_of(line) for line in log.lines],
        served=[served_of(line) for line in log.lines] if has_recorded_times(log.lines) else None,
        prediction=setup.prediction if setup else None,
    )


def _synthetic(options: dict[str, Any]) -> Load:
    duration_s = options["duration"] * options["speed"]
    clients = LOADS[options["load"]]()
    rate_rps = sum(client.rate_rps for client in clients)
    if rate_rps * duration_s > TRACE_REQUESTS_MAX:
        raise click.UsageError(
            f"{rate_rps:g} requests/s for {duration_s:,.0f} s are more than {TRACE_REQUESTS_MAX:,}: a shorter --duration"
        )
    arrivals = merged(clients, duration_s, seed=options["seed"])
    start_us = arrivals[0].arrival_us if arrivals else 0
    return Load(
        arrivals=[msgspec.structs.replace(one, arrival_us=one.arrival_us - start_us) for one in arrivals]
    )


def _adapted(load: Load, options: dict[str, Any]) -> Load:
    """Speed, number, weights and classes as asked for."""
    weights = weights_of(options["weights"])
    _check_tenants({*weights, *options["batch"]}, load.arrivals)
    speed, count, batch = options["speed"], options["requests"], options["batch"]
    is_told = options["prediction"] is not None
    load.arrivals = [
        msgspec.structs.replace(
            arrival,
            arrival_us=round(arrival.arrival_us / speed),
            weight=weights.get(arrival.tenant, arrival.weight),
            service_class="batch" if arrival.tenant in batch else arrival.service_class,
            expected_output_tokens=None if is_told else arrival.expected_output_tokens,
        )
        for arrival in load.arrivals[:count]
    ]
    # What was, was at the speed at which it was.
    load.served = None if load.served is None or speed != 1.0 else load.served[:count]
    return load


def weights_of(pairs: Iterable[str]) -> dict[str, float]:
    """Of texts like TENANT=WEIGHT. Raises `click.BadParameter`."""
    weights = {}
    for pair in pairs:
        tenant, sign, value = pair.rpartition("=")
        try:
            weights[tenant] = float(value)
        except ValueError:
            sign = ""
        if not sign or not 0 < weights[tenant] < 1e9:
            raise click.BadParameter(
                f"{pair!r}; allowed is TENANT=WEIGHT, a number above 0", param_hint="--weight"
            )
    return weights


def _check_tenants(named: set[str], arrivals: Sequence[Arrival]) -> None:
    unknown = named - {arrival.tenant for arrival in arrivals}
    if unknown:
        raise click.UsageError(f"no requests of tenant {', '.join(sorted(unknown))}")
