"""Picks and loads the engine a worker is told to use."""

from pathlib import Path

from headrace.config.settings import EngineSettings
from headrace.engine.protocol import Engine
from headrace.engine.stub import StubEngine
from headrace.errors import ModelError


def load_engine(model_path: str | None, settings: EngineSettings, *, cache: Path) -> Engine:
    """The engine, loaded but not warm. Raises `SetupError` with what has to change."""
    if settings.stub is not None:
        return StubEngine(settings)
    if model_path is None:
        raise ModelError("no model file is set")
    # Only here: loading the library costs time and memory that other roles do not need.
    from headrace.engine.llama import LlamaEngine, LlamaSettings, prepare_model

    prepared = prepare_model(Path(model_path), cache)
    return LlamaEngine.load(
        LlamaSettings(
            model_path=prepared.path,
            sequences=settings.max_batch_size,
            context_tokens=settings.max_context_tokens,
            batch_tokens=settings.max_batch_tokens,
            threads=settings.threads,
            kv_layout=settings.kv_layout,
            flash_attention=settings.flash_attention,
        )
    )
