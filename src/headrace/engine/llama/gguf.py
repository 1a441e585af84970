"""Reading the head of a GGUF file: keys and tensor descriptions, never the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from headrace.engine.llama import definitions
from headrace.engine.llama.library import Library
from headrace.errors import ModelError

_NUMBER_TYPES = {
    0: "uint8_t",
    1: "int8_t",
    2: "uint16_t",
    3: "int16_t",
    4: "uint32_t",
    5: "int32_t",
    10: "uint64_t",
    11: "int64_t",
}


class Tensor(NamedTuple):
    """One tensor of the file; offset from the start of the data part and size in bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    size: int


class GgufFile:
    """An open head of a GGUF file. Use as a context manager; raises `ModelError` for unusable files."""

    def __init__(self, library: Library, path: Path) -> None:
        self._library = library
        self._api = library.api
        self.path = path
        self.size_bytes = _check_magic(path)
        parameters = library.ffi.new("struct gguf_init_params *", {"no_alloc": True})
        library.log.clear()
        self.handle: Any = self._api.gguf_init_from_file(os.fsencode(path), parameters[0])
        if self.handle == library.ffi.NULL:
            raise ModelError(f"The model file {path} is corrupt or truncated: {library.log.text()}")
        self.data_offset: int = self._api.gguf_get_data_offset(self.handle)
        self.alignment: int = self._api.gguf_get_alignment(self.handle)
        self.tensors = [self._tensor(index) for index in range(self._api.gguf_get_n_tensors(self.handle))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.gguf_free(self.handle)

    @property
    def weights_bytes(self) -> int:
        """All tensors together."""
        return sum(tensor.size for tensor in self.tensors)

    def check_complete(self) -> None:
        """Raise `ModelError` when the file ends before its last tensor does."""
        end = self.data_offset + max((tensor.offset + tensor.size for tensor in self.tensors), default=0)
        if self.size_bytes < end:
            raise ModelError(
                f"The model file {self.path} is truncated: {self.size_bytes} bytes of {end}. Download it again."
            )

    def text(self, key: str) -> str | None:
        """The value of a text key; None when the key is absent or of another type."""
        index = self._find(key)
        if index is None or self._api.gguf_get_kv_type(self.handle, index) != definitions.GGUF_STRING:
            return None
        return self._library.text(self._api.gguf_get_val_str(self.handle, index))

    def number(self, key: str) -> int | None:
        """The value of an integer key; None when the key is absent or of another type."""
        index = self._find(key)
        if index is None:
            return None
        name = _NUMBER_TYPES.get(self._api.gguf_get_kv_type(self.handle, index))
        if name is None:
            return None
        pointer = self._api.gguf_get_val_data(self.handle, index)
        return int(self._library.ffi.cast(f"const {name} *", pointer)[0])

    def numbers(self, key: str, count: int) -> list[int] | None:
        """An integer key given once for all layers or as an array with one entry per layer."""
        single = self.number(key)
        if single is not None:
            return [single] * count
        index = self._find(key)
        if index is None or self._api.gguf_get_kv_type(self.handle, index) != definitions.GGUF_ARRAY:
            return None
        name = _NUMBER_TYPES.get(self._api.gguf_get_arr_type(self.handle, index))
        if name is None or self._api.gguf_get_arr_n(self.handle, index) < count:
            return None
        pointer = self._api.gguf_get_arr_data(self.handle, index)
        return self._library.unpack(self._library.ffi.cast(f"const {name} *", pointer), count)

    def tensors_of_type(self, number: int) -> Iterator[Tensor]:
        """The tensors of one ggml type."""
        return (tensor for tensor in self.tensors if tensor.type == number)

    def _find(self, key: str) -> int | None:
        index: int = self._api.gguf_find_key(self.handle, key.encode())
        return index if index >= 0 else None

    def _tensor(self, index: int) -> Tensor:
        api, handle = self._api, self.handle
        return Tensor(
            name=self._library.text(api.gguf_get_tensor_name(handle, index)) or "",
            type=api.gguf_get_tensor_type(handle, index),
            shape=tuple(self._library.unpack(api.gguf_get_tensor_ne(handle, index), 4)),
            offset=api.gguf_get_tensor_offset(handle, index),
            size=api.gguf_get_tensor_size(handle, index),
        )


def _check_magic(path: Path) -> int:
    """The file's size in bytes, after making sure that it is a readable GGUF file."""
    try:
        if path.is_dir():
            raise ModelError(f"The model path {path} is a directory; name the GGUF file in it.")
        if not path.is_file():
            reason = "is not a regular file" if path.exists() else "does not exist"
            raise ModelError(f"The model file {path} {reason}.")
        with path.open("rb") as file:
            magic = file.read(len(definitions.GGUF_MAGIC))
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ModelError(f"The model file {path} cannot be read: {error.strerror}.") from error
    if magic != definitions.GGUF_MAGIC:
        raise ModelError(f"The model file {path} is not a GGUF file (it does not begin with 'GGUF').")
    return size
