"""A model file made fast once: Q4_1 weights rewritten as Q8_0.

Q4_1 has no fast matrix kernel in llama.cpp on x86-64: computing many sequences at once gains little,
and that is what a server does. Q8_0 holds the same values almost exactly and batches well. Measured
with SmolLM2-135M on one core of a Zen 5 (`tools/measure_engine.py`), Q4_1 / Q8_0 / Q4_0: decode of 32
sequences 178 / 236 / 271 tokens per second, of one 141 / 144 / 201, prefill 238 / 371 / 453. But Q4_0
is another model: against Q4_1 its next-token distributions differ by 0.34 nats (Q8_0: 0.007) and its
perplexity is 158 instead of 125 (Q8_0: 126).

The copy is made by the library's own functions, tensor by tensor (0.65 s, 70 MB peak), and kept in a
cache directory under a name made of the source's SHA-256, next to a file with its own SHA-256.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from headrace.config.settings import EngineLibrary
from headrace.engine.llama import definitions
from headrace.engine.llama.cache import ModelCache
from headrace.engine.llama.gguf import GgufFile, Tensor
from headrace.engine.llama.library import Library, open_library
from headrace.errors import ModelError

Progress = Callable[[float], None]
"""Called with the fraction done, from 0 to 1."""

TARGET_TYPE: Final = definitions.TYPE_Q8_0
_CHUNK_VALUES: Final = 1 << 20
_COPY_BYTES: Final = 1 << 22
_KEPT_TENSOR: Final = "token_embd.weight"


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The file to load and where it comes from."""

    path: Path
    was_converted: bool
    """`path` is a converted copy in the cache; False: it is the file that was given."""
    was_reused: bool
    """The copy was there from an earlier start, intact."""
    source_sha256: str | None
    """None when the file is used as it is: hashing a large one would only delay the start."""
    sha256: str | None
    """Of the copy; None when the file is used as it is."""


def prepare_model(
    path: Path, cache_dir: Path, *, library: EngineLibrary = "wheel", on_progress: Progress | None = None
) -> PreparedModel:
    """The best file to load for the model in `path`: itself, or a converted copy in `cache_dir`. `library`: which does it.

    A copy made earlier is used after its SHA-256 was checked (0.1 s for 138 MB), and made anew when it
    does not match. Several processes may ask at the same time: one converts, the others wait.
    Raises `ModelError` for an unusable source or cache, `PlatformError` without a usable library.
    """
    opened = open_library(library)
    with GgufFile(opened, path) as source:
        source.check_complete()
        is_worthwhile = _is_worthwhile(source)
    if not is_worthwhile:
        return PreparedModel(
            path=path, was_converted=False, was_reused=False, source_sha256=None, sha256=None
        )
    source_sha256 = file_sha256(path)
    cache = ModelCache(cache_dir, f"{path.stem}.{source_sha256[:16]}.Q8_0.gguf")

    def make(target: Path) -> str:
        return convert(opened, path, target, tensor_type=TARGET_TYPE, on_progress=on_progress)

    sha256, was_reused = cache.obtain(file_sha256, make)
    return PreparedModel(
        path=cache.path,
        was_converted=True,
        was_reused=was_reused,
        source_sha256=source_sha256,
        sha256=sha256,
    )


def convert(
    library: Library,
    source_path: Path,
    target_path: Path,
    *,
    tensor_type: int,
    on_progress: Progress | None = None,
) -> str:
    """Write a copy of a model with its Q4_1 tensors in another type; the copy's SHA-256.

    Holds at most one chunk of a tensor in memory. Raises `OSError` when the target cannot be written
    and `ModelError` when the source holds values that are not numbers.
    """
    digest = hashlib.sha256()
    with (
        GgufFile(library, source_path) as source,
        source_path.open("rb", buffering=0) as reader,
        target_path.open("xb", buffering=_COPY_BYTES) as writer,
    ):
        originals = list(source.tensors)
        is_converted = [_is_converted(tensor) for tensor in originals]
        source_data = source.data_offset
        head, offsets = _new_head(library, source, is_converted, tensor_type)

        def write(block: bytes | memoryview) -> None:
            digest.update(block)
            writer.write(block)

        write(head)
        written = 0
        total = sum(tensor.size for tensor in originals) or 1
        done = 0
        for tensor, is_changed, offset in zip(originals, is_converted, offsets, strict=True):
            write(bytes(offset - written))
            written = offset
            reader.seek(source_data + tensor.offset)
            blocks: Iterable[bytes | memoryview] = _copied(reader, tensor)
            if is_changed:
                blocks = _converted(library, source_path, reader, tensor, tensor_type)
            for block in blocks:
                write(block)
                written += len(block)
            done += tensor.size
            if on_progress is not None:
                on_progress(done / total)
        write(bytes(-written % source.alignment))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal. Raises `ModelError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"The model file {path} cannot be read: {error.strerror}.") from error


def _is_worthwhile(source: GgufFile) -> bool:
    """Whether most of the weights are of the type that batches badly."""
    convertible = sum(tensor.size for tensor in source.tensors if _is_converted(tensor))
    return 2 * convertible > source.weights_bytes


def _is_converted(tensor: Tensor) -> bool:
    """Token embeddings stay as shipped: they are looked up, not multiplied by batches of rows."""
    return tensor.type == definitions.TYPE_Q4_1 and tensor.name != _KEPT_TENSOR


def _new_head(
    library: Library, source: GgufFile, is_converted: list[bool], tensor_type: int
) -> tuple[bytes, list[int]]:
    """The copy's head as bytes and the offsets of its tensors in its data part."""
    api, handle = library.api, source.handle
    for tensor, is_changed in zip(source.tensors, is_converted, strict=True):
        if is_changed:
            api.gguf_set_tensor_type(handle, tensor.name.encode(), tensor_type)
    file_type = definitions.FILE_TYPE_BY_TENSOR_TYPE[tensor_type]
    api.gguf_set_val_u32(handle, b"general.file_type", file_type)
    size = api.gguf_get_meta_size(handle)
    buffer = library.ffi.new("uint8_t[]", size)
    api.gguf_get_meta_data(handle, buffer)
    offsets = [api.gguf_get_tensor_offset(handle, index) for index in range(len(is_converted))]
    return bytes(library.ffi.buffer(buffer)), offsets


def _copied(reader: Any, tensor: Tensor) -> Iterator[bytes]:
    """A tensor's bytes as they are."""
    left = tensor.size
    while left:
        block = reader.read(min(left, _COPY_BYTES))
        if not block:
            raise ModelError(f"The model file ended inside the tensor {tensor.name}: was it replaced?")
        left -= len(block)
        yield block


def _converted(
    library: Library, path: Path, reader: Any, tensor: Tensor, tensor_type: int
) -> Iterator[memoryview]:
    """A Q4_1 tensor's rows in another type, a chunk of rows at a time."""
    api, ffi = library.api, library.ffi
    row_values = tensor.shape[0]
    rows = tensor.shape[1] * tensor.shape[2] * tensor.shape[3]
    rows_at_once = max(1, min(rows, _CHUNK_VALUES // row_values))
    source_row = api.ggml_row_size(definitions.TYPE_Q4_1, row_values)
    target_row = api.ggml_row_size(tensor_type, row_values)
    packed = bytearray(rows_at_once * source_row)
    values = np.empty(rows_at_once * row_values, dtype=np.float32)
    values_pointer = ffi.cast("float *", values.ctypes.data)
    result = ffi.new("uint8_t[]", rows_at_once * target_row)
    for first in range(0, rows, rows_at_once):
        count = min(rows_at_once, rows - first)
        if reader.readinto(memoryview(packed)[: count * source_row]) != count * source_row:
            raise ModelError(f"The model file {path} ended inside the tensor {tensor.name}: was it replaced?")
        api.dequantize_row_q4_1(ffi.from_buffer(packed), values_pointer, count * row_values)
        if not np.isfinite(values[: count * row_values]).all():
            raise ModelError(
                f"The model file {path} is corrupt: {tensor.name} holds values that are no numbers."
            )
        api.ggml_quantize_chunk(tensor_type, values_pointer, result, 0, count, row_values, ffi.NULL)
        yield memoryview(ffi.buffer(result, count * target_row))
