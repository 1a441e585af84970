"""The same random work on the real engine in reproducible mode: every answer is that of the engine alone.

A few operations here; a thousand or as many as wanted: `make soak-engine`, `make soak-engine OPERATIONS=300`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.llama import LlamaEngine, LlamaSettings, PreparedModel
from headrace.worker.process import REPRODUCIBLE_CHUNK_TOKENS
from tests.engine.llama.chosen import LIBRARY
from tests.worker.cache_soak import BATCH_TOKENS, CONTEXT, KV_TOKENS, SLOTS, Soak

OPERATIONS = int(os.environ.get("HEADRACE_TEST_ENGINE_SOAK_OPERATIONS", "60"))
SEED = int(os.environ.get("HEADRACE_TEST_SOAK_SEED", "0"))


@pytest.fixture
def engine(prepared: PreparedModel) -> Iterator[LlamaEngine]:
    made = LlamaEngine.load(
        LlamaSettings(
            library=LIBRARY,
            model_path=prepared.path,
            sequences=SLOTS,
            context_tokens=CONTEXT,
            batch_tokens=BATCH_TOKENS,
            threads=1,
            kv_tokens=KV_TOKENS,
        )
    )
    yield made
    made.shutdown()


def test_a_cache_far_too_small_on_the_real_engine(engine: LlamaEngine, tmp_path: Path) -> None:
    def emptied() -> LlamaEngine:
        for slot in range(SLOTS):
            engine.close(slot)
        return engine

    soak = Soak(
        tmp_path,
        SEED,
        chunk=REPRODUCIBLE_CHUNK_TOKENS,
        make_engine=emptied,
        answer_tokens=(1, 24, 64, 64),
        steps=12,
    )
    soak.run(OPERATIONS)
    num_complete = soak.check_answers(emptied())
    counts = {
        "operations": OPERATIONS,
        "answers": num_complete,
        "cached": sum(record.prompt_tokens_cached for record in soak.records.values()),
        "restored": soak.total("headrace_worker_placements_total", source="restore"),
        "preempted by owners": soak.total("headrace_worker_preemptions_total", reason="queue"),
        "preempted for memory": soak.total("headrace_worker_preemptions_total", reason="memory"),
    }
    print(counts)
    if OPERATIONS >= 300:
        assert all(counts.values()), counts
    assert num_complete > OPERATIONS / 10
