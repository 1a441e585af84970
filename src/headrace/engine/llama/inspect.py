"""What a model file says of itself, and what of it fits into this machine's memory. Loads no weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.llama import memory
from headrace.engine.llama.gguf import GgufFile
from headrace.engine.llama.library import open_library


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve the model. Memory in MiB."""

    sequences: int
    context_tokens: int
    """Of each sequence, prompt and answer together."""
    kv_mib: int
    total_mib: int
    """Weights, KV memory and computing, as estimated before a start."""
    fits: bool


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """A model's geometry. Sizes in bytes."""

    file: str
    name: str | None
    architecture: str
    layers: int
    heads: int
    embedding: int
    vocabulary: int
    trained_context_tokens: int | None
    weights_bytes: int
    kv_bytes_per_token: int
    """Of one sequence, all layers, in 16-bit floating point."""
    kv_tokens_per_gib: int
    available_bytes: int
    """What this process may take now."""
    fits: list[Fit]


def inspect_model(path: Path, *, sequences: Sequence[int], contexts: Sequence[int]) -> ModelReport:
    """Read a GGUF file. Raises `ModelError` if it is none or no model that headrace runs."""
    library = open_library("wheel")
    with GgufFile(library, path) as file:
        file.check_complete()
        shape = memory.read_shape(file)
        architecture = file.text("general.architecture") or ""
        name = file.text("general.name")
        trained = file.number(f"{architecture}.context_length")
    available = memory.available_bytes()
    usable = [context for context in contexts if trained is None or context <= trained]
    return ModelReport(
        file=str(path),
        name=name,
        architecture=architecture,
        layers=shape.layers,
        heads=shape.heads,
        embedding=shape.embedding,
        vocabulary=shape.vocabulary,
        trained_context_tokens=trained,
        weights_bytes=shape.weights_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        kv_tokens_per_gib=(1 << 30) // shape.kv_bytes_per_token,
        available_bytes=available,
        fits=[_fit(shape, number, context, available) for number in sequences for context in usable],
    )


def _fit(shape: memory.Shape, sequences: int, context: int, available: int) -> Fit:
    demand = memory.estimate_demand(
        shape,
        sequences=sequences,
        context_tokens=context,
        batch_tokens=max(512, sequences),
        is_flash_attention=True,
        pool_tokens=None,
    )
    return Fit(
        sequences=sequences,
        context_tokens=context,
        kv_mib=demand.kv >> 20,
        total_mib=demand.total >> 20,
        fits=demand.total <= available,
    )


def as_plain(report: ModelReport) -> dict[str, Any]:
    """For printing."""
    plain: dict[str, Any] = msgspec.to_builtins(report)
    return plain
