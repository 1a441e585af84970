"""Random work against a cache far too small: nothing crashes, every answer is right, all memory comes back.

The stub's answer follows from every token a slot holds, so one token of another's shows in the answer; its pool of cells
takes nothing once it is full. Ten thousand operations: `make soak`. On the real engine: `make soak-engine`.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config.settings import EngineSettings, StubTiming
from headrace.engine.stub import StubEngine
from tests.worker.cache_soak import BATCH_TOKENS, CONTEXT, KV_TOKENS, SLOTS, Soak

OPERATIONS = int(os.environ.get("HEADRACE_TEST_SOAK_OPERATIONS", "1500"))
SEED = int(os.environ.get("HEADRACE_TEST_SOAK_SEED", "0"))


def engine(**options: Any) -> StubEngine:
    settings = EngineSettings(
        max_batch_size=SLOTS,
        max_context_tokens=CONTEXT,
        **{"max_batch_tokens": BATCH_TOKENS, **options},
        stub=StubTiming(output_tokens=90),
    )
    made = StubEngine(settings, sleep=lambda seconds: None)
    # As large as its states are, or none would fit into the few bytes there are for them.
    made.info = msgspec.structs.replace(made.info, kv_bytes_per_token=8)
    return made


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("layout", ["per_sequence", "unified"])
@pytest.mark.parametrize("kv_tokens", [None, KV_TOKENS])
def test_a_cache_far_too_small(tmp_path: Path, layout: str, kv_tokens: int | None, chunk: int | None) -> None:
    soak = Soak(
        tmp_path, SEED, chunk=chunk, make_engine=lambda: engine(kv_layout=layout, kv_tokens=kv_tokens)
    )
    soak.run(OPERATIONS)
    assert soak.check_answers(engine(max_batch_tokens=CONTEXT)) > OPERATIONS / 10
    cached = sum(record.prompt_tokens_cached for record in soak.records.values())
    assert cached > OPERATIONS, "a cache that is never hit proves nothing"
    assert soak.total("headrace_worker_placements_total", source="restore") > OPERATIONS / 500
    assert soak.total("headrace_worker_preemptions_total", reason="queue") > OPERATIONS / 500
    by_memory = soak.total("headrace_worker_preemptions_total", reason="memory")
    assert by_memory > OPERATIONS / 500 if kv_tokens else by_memory == 0
