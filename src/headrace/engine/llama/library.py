"""The embedded llama.cpp library: checked, opened, verified."""

import functools
from typing import Any

from cffi import FFI

from headrace.config.settings import EngineLibrary
from headrace.engine.llama import definitions, preflight, verify
from headrace.engine.llama.builds import Build, find_build
from headrace.engine.llama.log import LibraryLog


class Library:
    """A verified library.

    `api` holds the functions declared in `definitions`; cffi releases the interpreter lock around
    each call. `log` holds what the library complained about.
    """

    def __init__(self, build: Build) -> None:
        self.build = build
        self.ffi = FFI()
        self.ffi.cdef(definitions.DECLARATIONS)
        try:
            api: Any = self.ffi.dlopen(str(build.path))
        except OSError as error:
            raise preflight.refusal(f"The library {build.path} cannot be loaded: {error}.") from error
        verify.verify(self.ffi, api)
        self.api = api
        self.log = LibraryLog(self.ffi, api)
        api.llama_backend_init()

    def text(self, pointer: Any) -> str | None:
        """A C string as text; None for NULL. Bytes that are not UTF-8 are replaced."""
        if pointer == self.ffi.NULL:
            return None
        raw: Any = self.ffi.string(pointer)
        return str(raw, "utf-8", "replace")

    def unpack(self, pointer: Any, count: int) -> list[int]:
        """`count` integers from a C array."""
        values: Any = self.ffi.unpack(pointer, count) if count else ()
        return list(values)


@functools.cache
def open_library(library: EngineLibrary) -> Library:
    """The library that a setting asks for, opened at the first call (0.2 s, most of it hashing).

    Once per process and library, because a library's log callback is global.
    Raises `PlatformError` when the machine or the library is not what headrace was verified with.
    """
    return Library(find_build(library))
