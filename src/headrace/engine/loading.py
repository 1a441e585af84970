"""Picks and loads the engine a worker is told to use."""

from pathlib import Path
from typing import Final

from headrace.config.settings import EngineSettings
from headrace.engine.builtin import SHA256, builtin_model_path
from headrace.engine.protocol import Engine
from headrace.engine.stub import StubEngine
from headrace.errors import ModelError

PROCESS_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
"""To be set before a process that loads the engine starts: both libraries read it when they are loaded.

Threads of GNU OpenMP otherwise spin while they wait, and then a busy neighbour costs more than the
second thread gains. 2 threads on 2 cores, one of them kept busy by another process, ms per decode
step of 32 rows: passive 122, active 293 (one thread: 114 to 268). On cores of its own a process with
several threads is faster with `active`: 80 against 83 to 150, and 6.8 against 10 to 18 at one row.
numpy's OpenBLAS starts threads that spin, too, and is not used.
"""


def load_engine(model_path: str | None, settings: EngineSettings, *, cache: Path) -> Engine:
    """The engine, loaded but not warm. Raises `SetupError` with what has to change."""
    if settings.stub is not None:
        return StubEngine(settings)
    if model_path is None:
        raise ModelError("no model file is set")
    # Only here: loading the library costs time and memory that other roles do not need.
    from headrace.engine.llama import LlamaEngine, LlamaSettings, prepare_model

    prepared = prepare_model(Path(model_path), cache, library=settings.library)
    if Path(model_path) == builtin_model_path() and prepared.source_sha256 != SHA256:
        raise ModelError(f"the built-in model {model_path} is damaged; 'make clean install' brings it back")
    engine = LlamaEngine.load(
        LlamaSettings(
            model_path=prepared.path,
            library=settings.library,
            sequences=settings.max_batch_size,
            context_tokens=settings.max_context_tokens,
            batch_tokens=settings.max_batch_tokens,
            threads=settings.threads,
            kv_layout=settings.kv_layout,
            kv_tokens=settings.kv_tokens,
            flash_attention=settings.flash_attention,
            weights_sha256=prepared.sha256,
        )
    )
    if settings.reproducible and engine.info.quantization != "Q8_0":
        engine.shutdown()
        raise ModelError(
            f"engine.reproducible was verified with Q8_0 weights only, and {model_path} has {engine.info.quantization}: a row "
            "alone and the same row among others may differ in their last bits. Q8_0 and Q4_1 files can be served so."
        )
    return engine
