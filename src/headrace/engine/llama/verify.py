"""Does the opened library match our declarations? Nothing is passed to it before this says yes.

A function that returns a struct writes it through a hidden pointer (System V x86-64). Called with
that pointer made visible and the memory filled with two different patterns in turn, it shows which
bytes it owns: those that come out equal both times. That gives the struct's true size and its
padding, without trusting any declaration of the struct.
"""

from typing import Any

from cffi import FFI

from headrace.engine.llama import definitions
from headrace.engine.llama.definitions import Layout
from headrace.engine.llama.preflight import refusal
from headrace.errors import PlatformError

_PROBE_BYTES = 1024
_PATTERNS = (0xA5, 0x5A)
_BATCH_TOKENS = 3


def check_symbols(library: Any, names: list[str]) -> None:
    """Every declared function must be exported."""
    missing = []
    for name in names:
        try:
            getattr(library, name)
        except AttributeError:
            missing.append(name)
    if missing:
        raise refusal(f"The llama.cpp library lacks functions headrace calls: {', '.join(missing)}.")


def check_layout(ffi: FFI, layout: Layout) -> None:
    """Our cffi declaration of a struct must have the recorded size and offsets."""
    declared: Any = ffi.typeof(f"struct {layout.name}")
    declared_size = ffi.sizeof(declared)
    if declared_size != layout.size:
        raise _mismatch(layout.name, "declared size in bytes", declared_size, layout.size)
    declared_fields = dict(declared.fields or ())
    if list(declared_fields) != [field.name for field in layout.fields]:
        raise _mismatch(
            layout.name, "declared fields", list(declared_fields), [f.name for f in layout.fields]
        )
    for field in layout.fields:
        found = (declared_fields[field.name].offset, ffi.sizeof(declared_fields[field.name].type))
        if found != (field.offset, field.size):
            raise _mismatch(layout.name, f"{field.name} (offset, size)", found, (field.offset, field.size))


def check_written_bytes(ffi: FFI, library: Any, function: str, layout: Layout) -> None:
    """A default-parameters function must write exactly the bytes of the recorded fields."""
    call = ffi.cast("void *(*)(void *)", ffi.addressof(library, function))
    results = []
    for pattern in _PATTERNS:
        memory = ffi.new(f"uint8_t[{_PROBE_BYTES}]", bytes([pattern]) * _PROBE_BYTES)
        call(memory)
        results.append(bytes(ffi.buffer(memory)))
    written = {index for index in range(_PROBE_BYTES) if results[0][index] == results[1][index]}
    expected = {index for field in layout.fields for index in range(field.offset, field.offset + field.size)}
    if written != expected:
        raise _mismatch(
            layout.name,
            "bytes written, as ranges",
            _ranges(written),
            _ranges(expected),
        )


def check_defaults(name: str, parameters: Any, expected: dict[str, int | float]) -> None:
    """Known default values must appear in the fields we declared for them."""
    for field, value in expected.items():
        found = getattr(parameters, field)
        is_equal = not found if isinstance(found, FFI.CData) else float(found) == float(value)
        if not is_equal:
            raise _mismatch(name, f"default of {field}", found, value)


def check_batch(ffi: FFI, library: Any, layout: Layout) -> None:
    """`llama_batch_init` must fill the batch struct the way we read it."""
    call = ffi.cast(
        "void *(*)(void *, int32_t, int32_t, int32_t)", ffi.addressof(library, "llama_batch_init")
    )
    memory = ffi.new(f"uint8_t[{_PROBE_BYTES}]", bytes([_PATTERNS[0]]) * _PROBE_BYTES)
    call(memory, _BATCH_TOKENS, 0, 1)
    tail = bytes(ffi.buffer(memory))[layout.size :]
    if tail != bytes([_PATTERNS[0]]) * len(tail):
        raise _mismatch(layout.name, "bytes written", f"beyond {layout.size}", f"at most {layout.size}")
    batch = ffi.cast(f"struct {layout.name} *", memory)[0]
    pointers = {batch.token, batch.pos, batch.n_seq_id, batch.seq_id, batch.logits}
    is_filled = batch.n_tokens == 0 and not batch.embd and len(pointers) == 5 and all(pointers)
    if not is_filled:
        raise _mismatch(
            layout.name, "fields after llama_batch_init", repr(pointers), "five arrays, no embeddings"
        )
    if not all(batch.seq_id[index] for index in range(_BATCH_TOKENS)) or batch.seq_id[_BATCH_TOKENS]:
        raise _mismatch(
            layout.name, "seq_id after llama_batch_init", "other pointers", "a list ended by NULL"
        )
    library.llama_batch_free(batch)


def check_tensor_types(ffi: FFI, library: Any) -> None:
    """The numbers we use for tensor types must mean what we think, with the block sizes we think."""
    for number, name, row_bytes in (
        (definitions.TYPE_F16, "f16", 64),
        (definitions.TYPE_Q4_0, "q4_0", 18),
        (definitions.TYPE_Q4_1, "q4_1", 20),
        (definitions.TYPE_Q8_0, "q8_0", 34),
        (definitions.TYPE_BF16, "bf16", 64),
    ):
        type_name: Any = ffi.string(library.ggml_type_name(number))
        found = (str(type_name, "utf-8"), library.ggml_row_size(number, 32))
        if found != (name, row_bytes):
            raise _mismatch("tensor type", f"{number} (name, bytes of 32 values)", found, (name, row_bytes))


def verify(ffi: FFI, library: Any) -> None:
    """All checks in turn. Raises `PlatformError` naming the first difference."""
    assert ffi.sizeof("void *") == 8, "only 64-bit platforms pass the preflight"
    check_symbols(library, dir(library))
    layouts = (
        definitions.MODEL_PARAMS,
        definitions.CONTEXT_PARAMS,
        definitions.BATCH,
        definitions.GGUF_PARAMS,
    )
    for layout in layouts:
        check_layout(ffi, layout)
    check_written_bytes(ffi, library, "llama_model_default_params", definitions.MODEL_PARAMS)
    check_written_bytes(ffi, library, "llama_context_default_params", definitions.CONTEXT_PARAMS)
    check_defaults("llama_model_params", library.llama_model_default_params(), definitions.MODEL_DEFAULTS)
    check_defaults(
        "llama_context_params", library.llama_context_default_params(), definitions.CONTEXT_DEFAULTS
    )
    check_batch(ffi, library, definitions.BATCH)
    check_tensor_types(ffi, library)


def _mismatch(subject: str, what: str, found: object, expected: object) -> PlatformError:
    return refusal(
        f"The llama.cpp library differs from headrace's definitions: {subject}, {what}: "
        f"found {found}, expected {expected}."
    )


def _ranges(indexes: set[int]) -> str:
    """Sorted byte indexes as `0-35 40-77`."""
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return " ".join(f"{first}-{last}" for first, last in parts)
