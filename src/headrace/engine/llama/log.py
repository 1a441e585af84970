"""What llama.cpp has to say, kept in memory instead of on stderr."""

from collections import deque
from typing import Any

from cffi import FFI

from headrace.engine.llama import definitions

_LINES_MAX = 32
_LINE_CHARACTERS_MAX = 400


class LibraryLog:
    """The last warnings and errors of the library.

    The library calls back from any of its threads, in the middle of C++ code that cannot unwind a
    Python exception: `_receive` therefore does nothing that can fail, and cffi drops what still does.
    """

    def __init__(self, ffi: FFI, library: Any) -> None:
        self._ffi = ffi
        self._lines: deque[str] = deque(maxlen=_LINES_MAX)
        self._is_kept = False
        # The library stores the bare pointer: the callback object has to live as long as the library.
        self._callback = ffi.callback(
            "void(int32_t, const char *, void *)", self._receive, onerror=_ignore_error
        )
        library.llama_log_set(self._callback, ffi.NULL)

    def clear(self) -> None:
        """Forget what was said so far, so that `text` is about what comes next."""
        self._lines.clear()

    def text(self) -> str:
        """The kept lines in one, oldest first; empty when nothing was said."""
        return "; ".join(line for line in (kept.strip() for kept in list(self._lines)) if line)

    def _receive(self, level: int, text: Any, _user_data: Any) -> None:
        if level != definitions.LOG_CONTINUED:
            self._is_kept = level in (definitions.LOG_WARN, definitions.LOG_ERROR)
        if self._is_kept:
            line: Any = self._ffi.string(text, _LINE_CHARACTERS_MAX)
            self._lines.append(str(line, "utf-8", "replace"))


def _ignore_error(_kind: object, _value: object, _traceback: object) -> None:
    """Stops cffi from printing a traceback to stderr for a log line it could not deliver."""
