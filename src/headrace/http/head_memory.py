"""Heads that were parsed before, by which the next message is known without being parsed again.

Who keeps a connection sends the same head with each message, byte for byte but for the length of the body.
What equals a head that was parsed and accepted means what that one meant; anything else goes through the
parser. Nothing here decides what is well-formed.
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


class CutHead:
    """A head, cut in two around the digits of its `content-length`."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    @classmethod
    def of(cls, begun: bytes, headers: dict[bytes, bytes]) -> "CutHead | None":
        """`begun`: how a message came that had these headers. None if its head cannot be known again."""
        end = begun.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX) + 4
        length = _LENGTH.search(begun, 0, end)
        if end < 4 or length is None or not _SPECIAL.isdisjoint(headers):
            return None
        return cls(begun[: length.start(1)], begun[length.end(1) : end])

    def match(self, data: bytes) -> tuple[bytes, int] | None:
        """(digits of the body's length, where in `data` the body begins), if `data` begins with this head."""
        before = self._before
        if not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r", start, start + _DIGITS_MAX + 1)
        digits = data[start:end]
        if end < 0 or not digits.isdigit() or not data.startswith(self._after, end):
            return None
        return digits, end + len(self._after)


class KnownRequest:
    """What a client's last request was, but for its body."""

    __slots__ = ("_head", "_request")

    def __init__(self, head: CutHead, request: HttpRequest) -> None:
        self._head = head
        self._request = request

    @classmethod
    def of(cls, begun: bytes, request: HttpRequest) -> "KnownRequest | None":
        """`begun` is how a whole request (`is_whole`) came. None if it is of a kind that is not remembered."""
        head = CutHead.of(begun, request.headers)
        if head is None or not request.is_keep_alive or request.is_http_1_0:
            return None
        headers = request.headers.copy()
        return cls(
            head,
            HttpRequest(request.method, request.path, request.query, headers, b"", request.client_address),
        )

    def recall(self, data: bytes) -> tuple[HttpRequest, int, int] | None:
        """(the request without its body, the length of the body, where in `data` it begins), if `data` begins with
        this head.
        """
        found = self._head.match(data)
        if found is None:
            return None
        digits, body_at = found
        known = self._request
        headers = known.headers.copy()
        headers[b"content-length"] = digits
        request = HttpRequest(known.method, known.path, known.query, headers, b"", known.client_address)
        return request, int(digits), body_at


class KnownReply:
    """What a server's last reply was, but for its body."""

    __slots__ = ("_head", "_headers", "status")

    def __init__(self, head: CutHead, status: int, headers: dict[bytes, bytes]) -> None:
        self._head = head
        self._headers = headers
        self.status = status

    @classmethod
    def of(cls, data: bytes, status: int, headers: dict[bytes, bytes]) -> "KnownReply | None":
        """`data` was read at once and held this reply, whole, after which the connection stays. None if it held more
        or is of a kind that is not remembered.
        """
        head = CutHead.of(data, headers) if status == 200 else None
        if head is None or len(data) != data.find(b"\r\n\r\n") + 4 + int(headers[b"content-length"]):
            return None
        return cls(head, status, headers.copy())

    def recall(self, data: bytes) -> tuple[dict[bytes, bytes], bytes] | None:
        """(headers, body), if `data` is a whole reply with this head and nothing else."""
        found = self._head.match(data)
        if found is None:
            return None
        digits, body_at = found
        if len(data) - body_at != int(digits):
            return None
        headers = self._headers.copy()
        headers[b"content-length"] = digits
        return headers, data[body_at:]


def is_whole(begun: bytes, size: int, request: HttpRequest) -> bool:
    """Whether the `size` bytes given to a parser that stood between two requests, of which the first are `begun`,
    were exactly this request: no part of another one is in the parser.

    A chunked body never passes, because its framing is longer than the body.
    """
    head_size = begun.find(b"\r\n\r\n") + 4
    return head_size >= 4 and size == head_size + len(request.body) and b"upgrade" not in request.headers
