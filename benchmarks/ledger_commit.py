"""What the ledger costs the event loop: microseconds per operation (reserve and settle), by group size.

    .venv/bin/python benchmarks/ledger_commit.py [--operations 20000] [--directory DIR]

For each group size and durability level, `group` tasks reserve, wait, settle, wait, again and again, with request ids that
grow with time, as the gateway's do (random ids cost about 7 µs more). Prints one JSON object. `inline` is the journal as shipped; `thread` is the same file written by a writer thread,
each measured while a second task keeps the loop busy (`busy_us` a turn), since that is when the two
differ. `stall_us` is how long the loop was held up between two turns of that task, less its own work.
"""

import argparse
import asyncio
import json
import platform
import sqlite3
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

from headrace.clock import SystemClock
from headrace.ledger.records import OperationRecord, Reservation
from headrace.store.journal import Journal
from headrace.store.ledger_file import Batch, LedgerFile

BUSY_SECONDS = 0.0002


def reservation(number: int) -> Reservation:
    return Reservation(
        request_id=f"req_{number:032x}",
        tenant_id="demo",
        api_key_id="key_0123456789abcdef01234567",
        model="smollm2-135m",
        mode="stream",
        prompt_tokens_estimated=100,
        reserved_tokens=228,
        queue_enter_ts=1_790_000_000_000_000 + number,
        trace_id="0" * 32,
    )


def record(number: int) -> OperationRecord:
    return OperationRecord(
        request_id=f"req_{number:032x}",
        attempt_ids=(f"att_{number:032x}",),
        tenant_id="demo",
        api_key_id="key_0123456789abcdef01234567",
        model="smollm2-135m",
        worker_id="worker-0",
        mode="stream",
        prompt_tokens_estimated=100,
        prompt_tokens=90,
        completion_tokens=128,
        reserved_tokens=228,
        gpu_memory_mb=12.5,
        memory_source="kv_geometry",
        queue_enter_ts=1_790_000_000_000_000 + number,
        start_ts=1_790_000_000_000_100 + number,
        first_token_ts=1_790_000_000_050_000 + number,
        end_ts=1_790_000_001_000_000 + number,
        latency_us=1_000_000,
        status=200,
        outcome="completed",
        finish_reason="stop",
        count_source="engine",
        trace_id="0" * 32,
    )


class ThreadedJournal:
    """The alternative that was decided against: group commit on a writer thread."""

    def __init__(self, path: Path) -> None:
        self._file = LedgerFile.open(path)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._seq = 0
        self._open: dict[str, int] = {}
        self._batch = Batch()
        self._futures: list[asyncio.Future[None]] = []
        self._is_writing = False

    def reserve(self, opened: Reservation) -> asyncio.Future[None]:
        self._seq += 1
        self._open[opened.request_id] = self._seq
        self._batch.add_reservation(opened, self._seq, 0)
        return self._after()

    def settle(self, ended: OperationRecord) -> asyncio.Future[None]:
        self._seq += 1
        self._batch.add_settlement(ended, self._open.pop(ended.request_id), self._seq, 0)
        return self._after()

    def _after(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._futures.append(future)
        if len(self._futures) == 1:
            loop.call_soon(self._write)
        return future

    def _write(self) -> None:
        if self._is_writing or not self._futures:
            return
        self._is_writing = True
        batch, futures = self._batch, self._futures
        self._batch, self._futures = Batch(), []
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._file.write, batch).add_done_callback(
            lambda done: self._written(done, futures)
        )

    def _written(self, done: asyncio.Future[None], futures: list[asyncio.Future[None]]) -> None:
        done.result()
        self._is_writing = False
        for future in futures:
            future.set_result(None)
        self._write()

    async def close(self) -> None:
        self._thread.shutdown()
        self._file.close()


async def operations(journal: Journal | ThreadedJournal, numbers: range, waits: list[float]) -> None:
    for number in numbers:
        begin = time.perf_counter()
        await journal.reserve(reservation(number))
        await journal.settle(record(number))
        waits.append(time.perf_counter() - begin)


async def keep_busy(stalls: list[float]) -> None:
    """Computes for `BUSY_SECONDS` in every turn, as a loop full of requests does."""
    while True:
        end = time.perf_counter() + BUSY_SECONDS
        while time.perf_counter() < end:
            pass
        await asyncio.sleep(0)
        stalls.append(time.perf_counter() - end)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e6, 1) if ordered else 0.0


async def measure(
    directory: Path, *, writer: str, durability: str, group: int, count: int, is_busy: bool
) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder) / "ledger.db"
        if writer == "inline":
            journal: Journal | ThreadedJournal = Journal(path, SystemClock(), durability=durability)  # type: ignore[arg-type]
        else:
            journal = ThreadedJournal(path)
        waits: list[float] = []
        stalls: list[float] = []
        busy = asyncio.create_task(keep_busy(stalls)) if is_busy else None
        share = count // group
        cpu, begin = time.thread_time(), time.perf_counter()
        await asyncio.gather(
            *(operations(journal, range(i, share * group, group), waits) for i in range(group))
        )
        wall, loop_cpu = time.perf_counter() - begin, time.thread_time() - cpu
        if busy is not None:
            busy.cancel()
        await journal.close()
    return {
        "writer": writer,
        "durability": durability,
        "group": group,
        "busy": is_busy,
        "operations": share * group,
        "wall_us_per_operation": round(wall / (share * group) * 1e6, 1),
        "loop_cpu_us_per_operation": round(loop_cpu / (share * group) * 1e6, 1),
        "wait_us_p50": quantile(waits, 0.5),
        "wait_us_p99": quantile(waits, 0.99),
        "stall_us_p50": quantile(stalls, 0.5),
        "stall_us_p99": quantile(stalls, 0.99),
        "stall_us_max": quantile(stalls, 1.0),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    arguments = parser.parse_args()
    cases = [("inline", level, group, False) for level in ("os", "fsync") for group in (1, 8, 32, 128)]
    cases += [(writer, "os", group, True) for writer in ("inline", "thread") for group in (8, 32)]
    results = []
    for writer, durability, group, is_busy in cases:
        count = arguments.operations // (10 if group == 1 or is_busy else 1)
        results.append(
            await measure(
                arguments.directory,
                writer=writer,
                durability=durability,
                group=group,
                count=count,
                is_busy=is_busy,
            )
        )
    print(
        json.dumps(
            {
                "benchmark": "ledger_commit",
                "python": platform.python_version(),
                "sqlite": sqlite3.sqlite_version,
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    uvloop.run(main())
