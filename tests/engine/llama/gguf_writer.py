"""A few lines that write GGUF heads, for models that do not come in a package."""

import struct
from pathlib import Path

Value = int | float | str | bool | list[str] | list[float] | list[int]


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    head = struct.pack("<I", 9)
    if isinstance(value[0], str):
        return head + struct.pack("<IQ", 8, len(value)) + b"".join(_text(str(item)) for item in value)
    if isinstance(value[0], float):
        return head + struct.pack(f"<IQ{len(value)}f", 6, len(value), *value)
    return head + struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)


def write_head(path: Path, keys: dict[str, Value]) -> Path:
    """A GGUF file with keys and no tensors."""
    body = b"".join(_text(key) + _value(value) for key, value in keys.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + body)
    return path
