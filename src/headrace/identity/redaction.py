"""Takes keys out of text before it reaches a log.

What is recognised: `hr_live_…` and `hr_admin_…` in any letter case, whole or cut off, and a bare JWT
(someone who strips the prefix has still the secret). What stays is the prefix, to say what it was.
"""

import re
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

_KEY = re.compile(r"(hr_(?:live|admin)_)[A-Za-z0-9_.\-=]+", re.IGNORECASE)
_JWT = re.compile(r"eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*(?:\.[A-Za-z0-9_\-]*)?")
_DEPTH_MAX: Final = 8


def redact(text: str) -> str:
    """The text with everything that looks like a key replaced by `[redacted]`."""
    if "_" in text:
        text = _KEY.sub(r"\1[redacted]", text)
    if "eyJ" in text:
        text = _JWT.sub("[redacted]", text)
    return text


def redact_event(logger: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """A structlog processor: redacts keys in every value of the event, nested ones too.

    Put it after the processors that format exceptions, right before the renderer. Objects that are not
    text, numbers or containers are replaced by their redacted `repr`.
    """
    return {redact(name): _redacted(value, _DEPTH_MAX) for name, value in event.items()}


def _redacted(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return redact(value)
    if depth == 0:
        return "[too deep]"
    if isinstance(value, Mapping):
        return {_redacted(name, depth - 1): _redacted(item, depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(item, depth - 1) for item in value]
    if isinstance(value, bytes | bytearray):
        return redact(value.decode("utf-8", "replace"))
    return redact(repr(value))
