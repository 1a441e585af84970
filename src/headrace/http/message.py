"""What travels: the request as a handler sees it, and the head of a reply as bytes."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote_to_bytes

from headrace.http.errors import RequestRefused

Headers = bytes | Sequence[tuple[bytes, bytes]]
"""Reply headers: pairs (names in lower case), or a ready block of `name: value\\r\\n` lines, which is
trusted and costs nothing. `content-length`, `transfer-encoding`, `connection` and `date` are not in it:
the server writes those."""

STATUS_LINES: Final[dict[int, bytes]] = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}
STATUSES_WITHOUT_BODY: Final = frozenset((204, 304))
_PLAIN: Final = b"/._-~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SERVER_HEADERS: Final = frozenset((b"content-length", b"transfer-encoding", b"connection", b"date"))


class HttpRequest:
    """One complete request: the handler gets it with its body read.

    `path` is decoded and has no `.`/`..` segments, no doubled slashes and no control characters; `query`
    is raw, without the `?`. `headers` has lower-case names; a repeated one is joined with `, ` (those
    where that would be ambiguous are refused before). `client_address` is the peer's IP, without port.
    `found` is for the owner: what its `check_head` has found out already, for its handler. None at first.
    """

    __slots__ = (
        "body",
        "client_address",
        "found",
        "headers",
        "is_http_1_0",
        "is_keep_alive",
        "method",
        "path",
        "query",
    )

    def __init__(  # positional all the way: it is built once per request
        self,
        method: str,
        path: str,
        query: bytes,
        headers: dict[bytes, bytes],
        body: bytes,
        client_address: str = "",
        is_keep_alive: bool = True,
        is_http_1_0: bool = False,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.client_address = client_address
        self.is_keep_alive = is_keep_alive
        self.is_http_1_0 = is_http_1_0
        self.found: object = None

    def __repr__(self) -> str:
        return f"<HttpRequest {self.method} {self.path} {len(self.body)} bytes>"


def parse_target(target: bytes) -> tuple[str, bytes]:
    """Split a request target into (path, query). Raises RequestRefused (400) for what is not plain.

    Absolute form (`http://host/path`) is accepted as RFC 9112 3.2.2 asks; `*` stays `*`.
    """
    if not target.translate(None, _PLAIN) and b"//" not in target and b"/." not in target:
        return target.decode("ascii"), b""  # nearly always; `_PLAIN` has no `:`, so this starts with `/`
    raw_path, _, query = target.partition(b"?")
    return _path_of(raw_path, target), query


def _path_of(raw_path: bytes, target: bytes) -> str:
    if b"#" in target:
        raise RequestRefused(400, "malformed_request", "The request target has a fragment (#).")
    if raw_path == b"*":
        return "*"
    if not raw_path.startswith(b"/"):
        scheme, separator, rest = raw_path.partition(b"://")
        if not separator or scheme.lower() not in (b"http", b"https"):
            raise RequestRefused(400, "malformed_request", "The request target is not a path.")
        raw_path = b"/" + rest.partition(b"/")[2]
    try:
        path = unquote_to_bytes(raw_path).decode("utf-8")
    except UnicodeDecodeError:
        raise RequestRefused(400, "malformed_request", "The path is not UTF-8.") from None
    if not path.isprintable():
        raise RequestRefused(400, "malformed_request", "The path has control characters.")
    # Refused rather than resolved: no client of an API needs them, and a proxy in front of us that
    # resolves them differently would have checked another path.
    segments = path.split("/")
    if "." in segments or ".." in segments:
        raise RequestRefused(400, "malformed_request", "The path has a '.' or '..' segment.")
    return "/" + "/".join(filter(None, segments)) + ("/" if path.endswith("/") and path.strip("/") else "")


def render_headers(headers: Headers) -> bytes:
    """The header lines as bytes. Raises ValueError where a pair would break out of its line."""
    if isinstance(headers, bytes):
        assert not headers or headers.endswith(b"\r\n")
        return headers
    assert _SERVER_HEADERS.isdisjoint([name for name, _ in headers]), "the server writes these itself"
    block = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if block.count(b"\n") != len(headers) or block.count(b"\r") != len(headers):
        raise ValueError("a reply header contains a line break")
    return block
