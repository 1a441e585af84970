"""A pool of cells on the real library: the books agree with it, down to which cell holds what."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI
from prometheus_client import CollectorRegistry

from headrace.caching.cells import CellBook
from headrace.clock import SystemClock
from headrace.engine.llama import LlamaEngine, LlamaSettings, PreparedModel
from headrace.engine.llama.library import Library
from headrace.engine.llama.preflight import find_library
from headrace.engine.protocol import Span
from headrace.errors import EngineFault
from headrace.request.sampling import Sampling
from headrace.scheduling.steps import StepLimits
from headrace.worker.loop import EngineLoop
from headrace.worker.messages import AttemptRecord
from headrace.worker.parking import Parking
from headrace.worker.progress import ProgressFile
from headrace.worker.sequence import Sequence
from headrace.worker.slots import EngineSlots
from headrace.worker.stats import StepStats
from tests.engine.llama.chosen import LIBRARY

GREEDY = Sampling(temperature=0)
SLOTS, POOL = 6, 512


@pytest.fixture
def pool(prepared: PreparedModel) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(
        LlamaSettings(
            library=LIBRARY,
            model_path=prepared.path,
            sequences=SLOTS,
            context_tokens=400,
            batch_tokens=128,
            threads=1,
            kv_layout="unified",
            kv_tokens=POOL - 100,
        )
    )
    yield engine
    engine.shutdown()


def slots_of(engine: LlamaEngine, directory: Path | None = None) -> tuple[EngineSlots, StepStats]:
    stats = StepStats(CollectorRegistry(), kv_bytes_per_token=1)
    parking = None
    if directory is not None:
        parking = Parking(directory / "kv", state_key="k", bytes_max=1 << 30)
    return EngineSlots(engine, clock=SystemClock(), stats=stats, parking=parking), stats


def library_map(engine: LlamaEngine, library: Library) -> list[frozenset[int]]:
    """Who holds each used cell, in the order of the cells, read from a saved state of the whole context."""
    ffi = FFI()
    ffi.cdef("size_t llama_state_get_data(void *context, uint8_t *target, size_t size);")
    api: Any = ffi.dlopen(str(find_library()))
    handle = ffi.cast("void *", int(library.ffi.cast("uintptr_t", engine._context._handle)))
    size = engine._context._api.llama_state_get_size(engine._context._handle)
    buffer = ffi.new("uint8_t[]", size)
    assert api.llama_state_get_data(handle, buffer, size) == size
    data = bytes(ffi.buffer(buffer, size))
    at = 0

    def number() -> int:
        nonlocal at
        at += 4
        return int.from_bytes(data[at - 4 : at], "little")

    name_bytes = number()
    at += name_bytes
    assert number() == 1, "one stream"
    holders = []
    for _ in range(number()):
        number()  # position
        holders.append(frozenset(number() for _ in range(number())))
    return holders


def books_map(cells: CellBook) -> list[frozenset[int]]:
    held: dict[int, set[int]] = {}
    for slot, runs in enumerate(cells._runs):
        for run in runs:
            for cell in run.cells:
                held.setdefault(cell, set()).add(slot)
    return [frozenset(held[cell]) for cell in sorted(held)]


def test_the_pool_is_rounded_up_and_no_larger(pool: LlamaEngine) -> None:
    assert pool.info.kv_tokens == POOL
    assert pool.info.kv_bytes == POOL * pool.info.kv_bytes_per_token
    assert pool.info.request_tokens_max == 400


def test_the_books_know_which_cell_holds_what(pool: LlamaEngine, library: Library) -> None:
    slots, _ = slots_of(pool)
    cells = slots.cells

    def agree() -> None:
        assert slots.engine_holds() == (list(cells.lengths), cells.used)
        assert books_map(cells) == library_map(pool, library)

    def grow(*spans: tuple[int, int]) -> None:
        slots.forward(
            [Span(slot, cells.length(slot), [700 + slot] * number, False) for slot, number in spans]
        )
        agree()

    for slot in range(SLOTS):
        pool.open(slot, GREEDY)
    grow((0, 60), (1, 30))
    grow((2, 20))
    for _ in range(3):
        grow((2, 1), (0, 1), (1, 1))
    pool.close(1)
    cells.cut(1, 0)
    agree()
    grow((3, 40))
    grow((2, 1), (3, 1), (0, 1))
    pool.close(4)
    pool.copy(0, 4, 45)
    cells.copied(0, 4, 45)
    agree()
    pool.open(4, GREEDY, held=45)
    grow((4, 20))
    state = pool.save(4)
    pool.close(0, keep=10)
    cells.cut(0, 10)
    agree()
    pool.close(5)
    pool.restore(5, state, 50)
    cells.grew(5, 65)
    cells.cut(5, 50)
    agree()
    assert len(Counter(books_map(cells))) > 4, "cells of one, of two, and in no plain order"


def test_a_full_pool_is_a_fault_and_nothing_worse(pool: LlamaEngine) -> None:
    for slot in range(SLOTS):
        pool.open(slot, GREEDY)
    for slot in range(4):
        pool.forward([Span(slot, 0, [700] * 128, False)])
    with pytest.raises(EngineFault, match="KV cache is full"):
        pool.forward([Span(4, 0, [700], False)])
    pool.close(0)
    pool.close(4)
    pool.open(4, GREEDY)
    pool.forward([Span(4, 0, [700], False)])
    assert pool.cells_used() == 3 * 128 + 1


def test_a_loop_on_a_pool_far_too_small_brings_all_to_their_ends(pool: LlamaEngine, tmp_path: Path) -> None:
    slots, stats = slots_of(pool, tmp_path)
    records: list[AttemptRecord] = []
    loop = EngineLoop(
        pool,
        limits=StepLimits(batch_tokens_max=128, target_step_ms=1e4, idle_step_ms=1e4),
        clock=SystemClock(),
        progress=ProgressFile(tmp_path / "progress"),
        on_news=lambda news: records.extend(record for _, record in news.records),
        stats=stats,
        slots=slots,
        debug=True,
    )
    head = pool.vocabulary.tokenize("The river turns the mill. " * 10, is_special_parsed=False, is_start=True)
    for number in range(9):
        loop.submit(
            Sequence(
                attempt_id=f"a{number}",
                tenant_id=f"t{number % 2}",
                connection_id=0,
                prompt=[*(head if number % 3 else []), *range(1000, 1050 + number)],
                max_tokens=60,
                sampling=GREEDY,
                stop=[],
                arrived_us=0,
            )
        )
    while loop.num_running or loop.num_waiting:
        loop.step()
    assert {record.finish_reason for record in records} <= {"stop", "length"}
    assert len(records) == 9
    assert sum(record.preemptions for record in records) > 0
    assert records[0].attempt_id == "a0" or records[0].preemptions == 0
    assert slots.cells.used_running == 0
