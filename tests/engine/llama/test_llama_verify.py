"""The checks of our declarations catch declarations that are wrong."""

from typing import Any

import pytest
from cffi import FFI

from headrace.engine.llama import definitions, verify
from headrace.engine.llama.definitions import Field, Layout
from headrace.engine.llama.library import Library
from headrace.errors import PlatformError

CONTEXT = definitions.CONTEXT_PARAMS
CONTEXT_FUNCTION = "llama_context_default_params"


def moved(layout: Layout, name: str, offset: int) -> Layout:
    fields = tuple(field._replace(offset=offset) if field.name == name else field for field in layout.fields)
    return layout._replace(fields=fields)


def test_our_definitions_pass(library: Library) -> None:
    verify.verify(library.ffi, library.api)


def test_a_missing_function_is_named() -> None:
    class Exports:
        llama_decode = 1

    with pytest.raises(PlatformError, match="llama_encode_twice"):
        verify.check_symbols(Exports(), ["llama_decode", "llama_encode_twice"])


def test_a_wrong_struct_size_is_caught(library: Library) -> None:
    with pytest.raises(PlatformError, match=r"llama_context_params.*size.*found 168, expected 160"):
        verify.check_layout(library.ffi, CONTEXT._replace(size=160))


def test_a_wrong_offset_is_caught(library: Library) -> None:
    with pytest.raises(PlatformError, match="type_v"):
        verify.check_layout(library.ffi, moved(CONTEXT, "type_v", 112))


def test_a_declaration_of_another_build_is_caught() -> None:
    """A build without `moe_cache_size` exists: every field behind it would be eight bytes off."""
    other = FFI()
    other.cdef(definitions.DECLARATIONS.replace("size_t moe_cache_size;", ""))
    with pytest.raises(PlatformError, match="llama_context_params"):
        verify.check_layout(other, CONTEXT)


@pytest.mark.parametrize(
    "layout",
    [
        CONTEXT._replace(fields=CONTEXT.fields[:-1]),
        CONTEXT._replace(fields=(*CONTEXT.fields, Field("one_more", 168, 8))),
        CONTEXT._replace(fields=(*CONTEXT.fields, Field("in_the_padding", 142, 1))),
    ],
)
def test_the_library_shows_its_true_size_and_padding(library: Library, layout: Layout) -> None:
    with pytest.raises(PlatformError, match="bytes written"):
        verify.check_written_bytes(library.ffi, library.api, CONTEXT_FUNCTION, layout)


@pytest.mark.parametrize(("field", "value"), [("n_batch", 512), ("yarn_ext_factor", 0.0), ("op_offload", 0)])
def test_a_wrong_default_is_caught(library: Library, field: str, value: float) -> None:
    parameters = library.api.llama_context_default_params()
    with pytest.raises(PlatformError, match=f"default of {field}"):
        verify.check_defaults("llama_context_params", parameters, {field: value})


def test_a_pointer_that_should_be_null_is_caught(library: Library) -> None:
    class Parameters:
        devices: Any = library.ffi.cast("void *", 8)

    with pytest.raises(PlatformError, match="default of devices"):
        verify.check_defaults("llama_model_params", Parameters(), {"devices": 0})


def test_a_batch_struct_too_small_is_caught(library: Library) -> None:
    with pytest.raises(PlatformError, match=r"llama_batch.*beyond 48"):
        verify.check_batch(library.ffi, library.api, definitions.BATCH._replace(size=48))


def test_a_batch_with_fields_in_another_order_is_caught(library: Library) -> None:
    other = FFI()
    other.cdef(definitions.DECLARATIONS.replace("float *embd; int32_t *pos;", "int32_t *pos; float *embd;"))
    with pytest.raises(PlatformError, match="llama_batch"):
        verify.check_batch(other, other.dlopen(str(_library_path())), definitions.BATCH)


def test_tensor_types_that_mean_something_else_are_caught(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "TYPE_Q8_0", 9)
    with pytest.raises(PlatformError, match="tensor type"):
        verify.check_tensor_types(library.ffi, library.api)


def _library_path() -> object:
    from headrace.engine.llama.preflight import find_library

    return find_library()
