"""A core on a loop of its own thread, and a real admin process in front of it."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import httpx
import uvloop

from headrace.clock import SystemClock
from headrace.core.control import ControlServer
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.core.messages import ModelView, QueueView, TenantQueueView, WaitingView, WorkerView
from headrace.core.refunds import Refunds
from headrace.ledger.records import OperationRecord, Reservation
from headrace.store.journal import Journal

WORKER = WorkerView(
    id="w0",
    model="smol",
    kind="embedded",
    status="ready",
    address="127.0.0.1:1",
    pid=7,
    slots=4,
    running=1,
    restarts=0,
)


def no_model(model_id: str, changes: dict[str, int | float | None], actor: str) -> ModelView:
    """There is no core behind this world, so there are no models."""
    raise ControlFailure(404, "model_not_found", f"there is no model {model_id!r}")


QUEUE = QueueView(
    model="smol", policy="fair", length=1, length_max=8, tokens=30, tokens_max=100,
    waiting_by_class={"interactive": 1, "batch": 0}, running=4, places=4, tenants_waiting=1, jain_index=1.0,
    tenants=[
        TenantQueueView(tenant="a", waiting=1, running=4, weight=2.0, share=1.0, lead=0.0, received_60s=70.5)
    ],
    requests=[
        WaitingView(
            request_id="req_1", tenant="a", api_key_id="k", position=1, is_position_exact=True, waited_ms=12,
            reason="replicas_full", reason_text="every place is taken", is_throttled=False, share=1.0, service_class="interactive",
            priority=0, tokens=30,
        )
    ],
)  # fmt: skip


def one_queue(model_id: str | None, limit: int) -> list[QueueView]:
    if limit > 256:
        raise ControlFailure(400, "invalid_limit", "limit is from 1 to 256", "limit")
    if model_id not in (None, "smol"):
        raise ControlFailure(404, "model_not_found", f"there is no model {model_id!r}")
    return [QUEUE]


class AdminWorld:
    """Use as a context manager. `http` talks to the admin process with its key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "core.sock"
        self.loop = uvloop.new_event_loop()  # as `serve` does
        self.thread = threading.Thread(target=self.loop.run_forever)

    def __enter__(self) -> Self:
        self.thread.start()
        self.on_core(self._start)
        self.process, self.port = self.start_admin()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = self.client(self.key)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self.stop_admin(self.process)
        self.on_core(self._stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def client(self, key: str | None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=10)

    def on_core(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Runs a coroutine function on the core's loop and returns what it returns."""
        return asyncio.run_coroutine_threadsafe(function(), self.loop).result(timeout=20)

    async def _start(self) -> None:
        self.directory = Directory.open(self.folder, SystemClock())
        self.journal = Journal(self.folder / "ledger.db", SystemClock())
        self.issued = self.directory.create_admin_key(actor="test")
        self.key = self.issued.key
        self.server = ControlServer(
            self.directory,
            list_workers=lambda: [WORKER],
            flush_ledger=self.journal.flush,
            refund=Refunds(self.journal, self.directory, SystemClock()).refund,
            list_models=list,
            update_model=no_model,
            list_queues=one_queue,
        )
        await self.server.start(self.socket)

    async def _stop(self) -> None:
        await self.server.stop()
        await self.journal.close()
        self.directory.close()

    def start_admin(self, **changes: Any) -> tuple["subprocess.Popen[bytes]", int]:
        settings = {
            "host": "127.0.0.1",
            "port": 0,
            "core_socket": str(self.socket),
            "ledger_path": str(self.folder / "ledger.db"),
            "public_keys": self.directory.keyring.encoded_public_keys(),
        } | changes
        self.log = self.folder / "admin.log"
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace.admin.run"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        self.answer: dict[str, Any] = json.loads(line)
        return process, self.answer.get("port", 0)

    @staticmethod
    def stop_admin(process: "subprocess.Popen[bytes]") -> int:
        """Closes its standard input, as the death of its parent does."""
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        status = process.wait(timeout=10)
        process.stdout.close()
        return status

    def record(self, request_id: str, **changes: Any) -> OperationRecord:
        """An operation that went through the journal, not waited for."""
        fields: dict[str, Any] = {
            "request_id": request_id,
            "tenant_id": "demo",
            "api_key_id": "key_1",
            "model": "smol",
            "mode": "stream",
            "prompt_tokens": 10,
            "prompt_tokens_cached": 4,
            "completion_tokens": 5,
            "queue_enter_ts": 1_790_000_000_000_000,
            "end_ts": 1_790_000_001_000_000,
            "latency_us": 1_000_000,
            "status": 200,
            "outcome": "completed",
            "count_source": "engine",
        } | changes
        for kind in ("prompt_tokens", "completion_tokens"):
            fields.setdefault(f"charged_{kind}", fields[kind])
        record = OperationRecord(**fields)

        async def write() -> None:
            self.journal.reserve(_reservation(record))
            self.journal.settle(record)

        self.on_core(write)
        return record

    def open(self, request_id: str) -> None:
        """An operation that goes on."""
        record = OperationRecord(
            request_id=request_id, tenant_id="demo", api_key_id="key_1", model="smol", queue_enter_ts=1,
            end_ts=1, latency_us=0, status=200, outcome="completed", count_source="none",
        )  # fmt: skip

        async def write() -> None:
            self.journal.reserve(_reservation(record))

        self.on_core(write)


def _reservation(record: OperationRecord) -> Reservation:
    return Reservation(
        request_id=record.request_id,
        tenant_id=record.tenant_id,
        api_key_id=record.api_key_id,
        user_id=record.user_id,
        department=record.department,
        model=record.model,
        mode=record.mode,
        prompt_tokens_estimated=20,
        reserved_tokens=40,
        queue_enter_ts=record.queue_enter_ts,
        trace_id="",
    )
