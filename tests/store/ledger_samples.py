"""Reservations and records for the tests of the ledger."""

from typing import Any

from headrace.ledger.records import OperationRecord, Reservation

BASE_TS = 1_790_000_000_000_000


class StubClock:
    """Time that goes on only when told."""

    def __init__(self, now_us: int = BASE_TS) -> None:
        self.now_us = now_us

    def wall_us(self) -> int:
        return self.now_us

    def monotonic_us(self) -> int:
        return self.now_us


def reservation(request_id: str = "req_1", **changes: Any) -> Reservation:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": "demo",
        "api_key_id": "key_1",
        "model": "smol",
        "mode": "stream",
        "prompt_tokens_estimated": 100,
        "reserved_tokens": 228,
        "queue_enter_ts": BASE_TS,
        "trace_id": "0" * 32,
    }
    return Reservation(**(fields | changes))


def record(request_id: str = "req_1", **changes: Any) -> OperationRecord:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt_ids": ("att_1", "att_2"),
        "tenant_id": "demo",
        "api_key_id": "key_1",
        "model": "smol",
        "prompt_tokens": 90,
        "completion_tokens": 10,
        "gpu_memory_mb": 1.25,
        "queue_enter_ts": BASE_TS,
        "end_ts": BASE_TS + 1_000_000,
        "latency_us": 1_000_000,
        "status": 200,
        "outcome": "completed",
        "count_source": "engine",
        "policy_actions": ("MASKED",),
    }
    return OperationRecord(**(fields | changes))
