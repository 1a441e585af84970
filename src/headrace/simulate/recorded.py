"""A server's own traffic as a decision log, out of the rows of its ledger.

What stands for what:

- the arrival is when a request entered the queue, its place when a worker started it;
- sizes are what the engine counted: a request that was aborted or failed comes again with what it used until then;
- prompt tokens that came out of the cache do so again;
- a refused request is not in it: how long its answer would have been, nobody knows. Nor is one of which nothing was counted
  (it left the queue, or an upstream gave no figures). Both are counted in `Recorded`.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from headrace.scheduling.policy import ServiceClass
from headrace.simulate.decision_log import (
    FORMAT,
    SERVED,
    VERSION,
    DecisionLine,
    DecisionLog,
    Header,
    TraceError,
    in_order,
)
from headrace.simulate.engine import EngineModel
from headrace.store.traffic import TrafficRow

ROWS_TIMED_MIN: Final = 20
"""With fewer operations the speed of an engine is not told from them."""
_REPAIR: Final = "`headrace ledger verify` says what else is wrong"


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A log, and what of the ledger is not in it. Counts are requests."""

    log: DecisionLog
    operations: int
    """Requests that the rows stand for."""
    aborted: int
    """In the log with what they used until they ended early."""
    refused: int
    uncounted: int
    """Of which nothing was counted."""

    def counts(self) -> dict[str, int]:
        """By name, without the log."""
        return {
            "operations": self.operations,
            "replayed": len(self.log.lines),
            "aborted": self.aborted,
            "refused": self.refused,
            "uncounted": self.uncounted,
        }


def record(rows: Sequence[TrafficRow], weights: Mapping[str, float], *, name: str) -> Recorded:
    """The log of these rows. Tenants that `weights` does not name have weight 1.

    Raises `TraceError` if nothing is left, a row is damaged, or rows are of several models: one fleet serves one.
    """
    for row in rows:
        flaw = _flaw(row)
        if flaw:
            raise TraceError(f"{name}: operation {row.request_id}: {flaw}; {_REPAIR}")
    models = Counter(row.model for row in rows)
    if len(models) > 1:
        shown = ", ".join(f"{model} ({count})" for model, count in models.most_common(10))
        raise TraceError(f"{name}: operations of several models, and a fleet serves one: {shown}")
    refused = [row for row in rows if row.outcome == "refused"]
    others = [row for row in rows if row.outcome != "refused"]
    counted = [row for row in others if row.prompt_tokens or row.completion_tokens]
    if not counted:
        raise TraceError(f"{name}: {_nothing(rows, refused)}")
    lines = in_order([_line(row, weights.get(row.tenant_id, 1.0)) for row in counted])
    start_ts = min(row.queue_enter_ts for row in counted)
    header = Header(format=FORMAT, version=VERSION, source="ledger", start_ts=start_ts)
    return Recorded(
        log=DecisionLog(header, lines),
        operations=sum(row.num_requests for row in rows),
        aborted=sum(line.outcome != SERVED for line in lines),
        refused=sum(row.num_requests for row in refused),
        uncounted=len(others) - len(counted),
    )


def engine_speed(rows: Sequence[TrafficRow], model: EngineModel) -> EngineModel | None:
    """The model with the speed that the fastest tenth of these operations had: they were the least disturbed by others.
    None if there are too few. An estimate: the ledger knows only what each one waited for, not what a step cost."""
    prefill = [
        row.prefill_us / (row.prompt_tokens - row.prompt_tokens_cached)
        for row in rows
        if row.prefill_us > 0 and row.prompt_tokens > row.prompt_tokens_cached
    ]
    decode = [
        row.decode_us / (row.completion_tokens - 1)
        for row in rows
        if row.decode_us > 0 and row.completion_tokens > 1
    ]
    if min(len(prefill), len(decode)) < ROWS_TIMED_MIN:
        return None
    prefill_us, decode_us = statistics.quantiles(prefill, n=10)[0], statistics.quantiles(decode, n=10)[0]
    factor = decode_us / (model.decode_us + model.decode_us_per_sequence)
    return msgspec.structs.replace(
        model,
        prefill_us_per_token=prefill_us,
        decode_us=model.decode_us * factor,
        decode_us_per_sequence=model.decode_us_per_sequence * factor,
        decode_us_per_context_token=model.decode_us_per_context_token * factor,
    )


def _line(row: TrafficRow, weight: float) -> DecisionLine:
    service_class: ServiceClass = "batch" if row.priority == "batch" else "interactive"
    has_tokens = row.first_token_ts is not None
    return DecisionLine(
        arrival_us=row.queue_enter_ts,
        tenant=row.tenant_id,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.completion_tokens,
        cached_tokens=row.prompt_tokens_cached,
        weight=weight,
        service_class=service_class,
        outcome=SERVED if row.outcome == "completed" else row.outcome,
        granted_us=row.start_ts,
        first_us=row.first_token_ts,
        last_us=row.end_ts if has_tokens else None,
        replica=row.worker_id,
    )


def _flaw(row: TrafficRow) -> str | None:
    """What cannot be, or None."""
    for field in ("prompt_tokens", "prompt_tokens_cached", "completion_tokens"):
        if getattr(row, field) < 0:
            return f"{field} is {getattr(row, field)}"
    if row.num_requests < 1:
        return f"num_requests is {row.num_requests}"
    if row.prompt_tokens_cached > row.prompt_tokens:
        return (
            f"prompt_tokens_cached {row.prompt_tokens_cached} is more than prompt_tokens {row.prompt_tokens}"
        )
    if row.queue_enter_ts < 0 or row.end_ts < row.queue_enter_ts:
        return f"it ended (end_ts {row.end_ts}) before it came (queue_enter_ts {row.queue_enter_ts})"
    return None


def _nothing(rows: Sequence[TrafficRow], refused: Sequence[TrafficRow]) -> str:
    if not rows:
        return "no operations in this period"
    return (
        f"nothing to replay: of {len(rows)} operations {len(refused)} were refused, the others used nothing"
    )
