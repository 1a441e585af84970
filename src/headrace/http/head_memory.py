"""The head of a connection's last request, by which the next one is known without being parsed again.

A client that keeps its connection sends the same head with each request, byte for byte but for the length of
the body. What equals a head that was parsed and accepted means what that one meant; anything else goes through
the parser. Nothing here decides what is well-formed.
"""

import re
from typing import Final

from headrace.http.message import HttpRequest

HEAD_BYTES_MAX: Final = 2048
"""Longer heads are not remembered: one is kept for each connection."""
_DIGITS_MAX: Final = 12
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,12})(?=\r\n)", re.IGNORECASE)
_SPECIAL: Final = frozenset((b"transfer-encoding", b"upgrade", b"expect"))
"""Headers that change how a body is framed, or what is sent before it."""


def is_whole(begun: bytes, size: int, request: HttpRequest) -> bool:
    """Whether the `size` bytes given to a parser that stood between two requests, of which the first are `begun`,
    were exactly this request: no part of another one is in the parser.

    A chunked body never passes, because its framing is longer than the body.
    """
    head_size = begun.find(b"\r\n\r\n") + 4
    return head_size >= 4 and size == head_size + len(request.body) and b"upgrade" not in request.headers


class HeadMemory:
    """One head, cut in two around the digits of its `content-length`."""

    __slots__ = ("_after", "_before", "_request")

    def __init__(self, before: bytes, after: bytes, request: HttpRequest) -> None:
        self._before = before
        self._after = after
        self._request = request

    @classmethod
    def of(cls, begun: bytes, request: HttpRequest) -> "HeadMemory | None":
        """`begun` is how a whole request (`is_whole`) came. None if it is of a kind that is not remembered."""
        end = begun.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(begun, 0, end)
        if length is None or not request.is_keep_alive or request.is_http_1_0:
            return None
        if not _SPECIAL.isdisjoint(request.headers):
            return None
        known = HttpRequest(
            request.method, request.path, request.query, request.headers.copy(), b"", request.client_address
        )
        return cls(begun[: length.start(1)], begun[length.end(1) : end], known)

    def recall(self, data: bytes) -> tuple[HttpRequest, int, int] | None:
        """(the request without its body, the length of the body, where in `data` it begins), if `data` begins with
        this head.
        """
        before = self._before
        if not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r", start, start + _DIGITS_MAX + 1)
        digits = data[start:end]
        if end < 0 or not digits.isdigit() or not data.startswith(self._after, end):
            return None
        known = self._request
        headers = known.headers.copy()
        headers[b"content-length"] = digits
        request = HttpRequest(known.method, known.path, known.query, headers, b"", known.client_address)
        return request, int(digits), end + len(self._after)
