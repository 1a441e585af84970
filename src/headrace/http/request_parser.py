"""Bytes in, whole requests out. No sockets, no clock.

httptools (llhttp, strict) refuses by itself: bare CR or LF, folded headers, control characters, space
before the colon, bad or doubled Content-Length, Content-Length beside Transfer-Encoding, bad chunk
sizes. Added here: sizes, versions, Host, other doubled headers, any transfer coding but `chunked`.

    IDLE ── first byte of a method ──▶ HEAD ── end of headers ──▶ BODY ── end of message ──▶ IDLE
    any of them ── something wrong ──▶ `refusal` set, nothing more is parsed
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import httptools

from headrace import bounds
from headrace.http.errors import RequestRefused
from headrace.http.head_memory import HEAD_BYTES_MAX, KnownRequest, is_whole
from headrace.http.limits import HttpLimits
from headrace.http.message import HttpRequest, parse_target

IDLE: Final = 0
HEAD: Final = 1
BODY: Final = 2

_SINGLE_HEADERS: Final = frozenset(
    (
        b"authorization",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"idempotency-key",
        b"transfer-encoding",
        b"x-api-key",
    )
)
_FRAMING_BYTES_MIN: Final = 64 * bounds.KIB
_FRAMING_PER_BODY_BYTE: Final = 8


class BodyBudget:
    """The bytes of incomplete bodies that all parsers of one server hold together."""

    __slots__ = ("bytes_held", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0


class RequestParser:
    """One per connection. `feed` bytes, take requests from `ready`, look at `refusal`.

    `check_head` sees every request when its headers are complete, with the body still empty, and raises
    RequestRefused where the body shall not be read. Parsers with the same `budget` share its bound.

    `refusal` belongs after everything in `ready`. `wants_continue`: a client waits for `100 Continue`
    before it sends the body of the request being parsed; whoever sends it clears the flag.
    """

    __slots__ = (
        "_begun",
        "_body",
        "_budget",
        "_check_head",
        "_client_address",
        "_expect",
        "_fed_bytes",
        "_first_part",
        "_head_bytes",
        "_header_count",
        "_headers",
        "_is_between",
        "_is_http_1_0",
        "_is_keep_alive",
        "_is_last",
        "_is_replaying",
        "_is_upgrade",
        "_known",
        "_known_body_left",
        "_limits",
        "_parser",
        "_request",
        "_url",
        "_wire_bytes",
        "body_bytes",
        "phase",
        "ready",
        "refusal",
        "wants_continue",
    )

    def __init__(
        self,
        limits: HttpLimits,
        client_address: str,
        *,
        budget: BodyBudget | None = None,
        check_head: Callable[[HttpRequest], None] | None = None,
    ) -> None:
        self._limits = limits
        self._budget = budget or BodyBudget(limits.bodies_bytes_max)
        self._check_head = check_head
        self._client_address = client_address
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self.ready: deque[HttpRequest] = deque()
        self.refusal: RequestRefused | None = None
        self.phase = IDLE
        self.wants_continue = False
        self.body_bytes = 0
        self._head_bytes = 0
        self._wire_bytes = 0
        self._url = b""
        self._request: HttpRequest | None = None
        self._headers: dict[bytes, bytes] = {}
        self._header_count = 0
        self._first_part = b""
        self._body: bytearray | None = None
        self._expect = 0
        self._is_http_1_0 = False
        self._is_keep_alive = True
        self._is_last = False
        self._is_upgrade = False
        self._is_replaying = False
        self._known: KnownRequest | None = None
        self._is_between = True
        """Whether it is certain that nothing of a request has been given to the C parser."""
        self._begun = b""
        """How what it was given since then began; empty where that is not known."""
        self._fed_bytes = 0
        self._known_body_left = 0
        """Bytes to come of the body of a request that is read without the C parser."""

    def feed(self, data: bytes) -> bytes:
        """Parse `data`. Returns the part left alone because a request became ready before it."""
        if self._known_body_left:
            return self._feed_known_body(data)
        if self._is_between:
            rest = None if self._known is None else self._feed_known(self._known, data)
            if rest is not None:
                return rest
            self._is_between = False
            self._begun = data[:HEAD_BYTES_MAX]
            self._fed_bytes = 0
        rest = self._parse(data)
        if self._begun:
            self._fed_bytes += len(data) - len(rest)
            if self.ready:
                self._note_head(self.ready[0])
        return rest

    def _note_head(self, request: HttpRequest) -> None:
        """The first request since the C parser stood between two is ready."""
        begun, self._begun = self._begun, b""
        if is_whole(begun, self._fed_bytes, request):
            self._is_between = True
            self._known = KnownRequest.of(begun, request)

    def _feed_known(self, known: KnownRequest, data: bytes) -> bytes | None:
        """As `feed`, for a request with a head that was parsed before. None, and nothing done, if it is none."""
        if self._is_last or self.refusal is not None:
            return None
        recalled = known.recall(data)
        if recalled is None:
            return None
        request, length, body_at = recalled
        if length > self._limits.body_bytes_max:
            return None
        try:
            if self._check_head is not None:
                self._check_head(request)
        except RequestRefused as refused:
            self.refusal = refused
            return b""
        self._request = request
        self._is_keep_alive = True
        self._known_body_left = length
        self.phase = BODY
        return self._feed_known_body(data[body_at:])

    def _feed_known_body(self, data: bytes) -> bytes:
        left = self._known_body_left
        size = len(data)
        try:
            if data and left:
                self.on_body(data if size <= left else data[:left])
        except RequestRefused as refused:
            self.refusal = refused
            self._known_body_left = 0
            self.drop_body()
            return b""
        if size < left:
            self._known_body_left = left - size
            return b""
        self._known_body_left = 0
        self.on_message_complete()
        return data[left:]

    def _parse(self, data: bytes) -> bytes:
        size = len(data)
        step = bounds.PARSE_BYTES_PER_STEP
        if size <= step:
            self._feed_step(data)
            return b""
        view = memoryview(data)
        offset = 0
        while offset < size and self.refusal is None and not self._is_last:
            # Inside a body of known length nothing can be pipelined before its end.
            body_left = self._expect - self.body_bytes if self.phase == BODY else 0
            length = max(step, body_left)
            self._feed_step(view[offset : offset + length])
            offset += length
            if self.ready:
                return data[offset:]
        return b""

    def close(self) -> None:
        """Break the reference cycle with the C parser, so that no garbage collection is needed."""
        self._parser = None
        self._is_last = True
        self.drop_body()

    def drop_body(self) -> None:
        """Let go of an incomplete body: the request was refused or its client is gone."""
        self._budget.bytes_held -= self.body_bytes
        self.body_bytes = 0
        self._first_part = b""
        self._body = None

    def _feed_step(self, data: bytes | memoryview) -> None:
        if self._is_last or self.refusal is not None:
            return  # what follows `Connection: close` or a refusal is nobody's
        parser = self._parser
        assert parser is not None
        size = len(data)
        self._wire_bytes += size
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserError as error:
            if not self._is_last:
                self.refusal = _refusal_of(error)
                self.drop_body()
            return
        if self.phase == BODY:
            framing = self._wire_bytes - self.body_bytes
            if framing > _FRAMING_BYTES_MIN + _FRAMING_PER_BODY_BYTE * self.body_bytes:
                self.refusal = RequestRefused(400, "malformed_request", "The body is mostly chunk framing.")
                self.drop_body()
        elif self.phase == HEAD or not self.ready:
            self.phase = HEAD  # also where only a part of the method has come
            self._head_bytes += size
            if self._head_bytes > self._limits.header_bytes_max + bounds.PARSE_BYTES_PER_STEP:
                self.refusal = self._headers_too_large()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on as if `Upgrade` had not been asked for, which a server may do (RFC 9110 7.8).

        Java's HTTP client asks for h2c by default, also on a POST, and llhttp then takes the body for
        the new protocol. So a fresh parser is given a head with the same framing, then the rest.
        """
        length = self._headers.get(b"content-length")
        framing = b"content-length: %b\r\n" % length if length is not None else b""
        if b"transfer-encoding" in self._headers:
            framing = b"transfer-encoding: chunked\r\n"
        self._parser = httptools.HttpRequestParser(self)
        self._is_upgrade = False
        self._is_replaying = True
        self._feed_step(b"POST / HTTP/1.1\r\nhost: a\r\n%b\r\n" % framing)
        self._is_replaying = False
        if rest:
            self._feed_step(rest)

    # --- callbacks of httptools ---------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        if self._is_replaying:
            return
        self.phase = HEAD
        self._url = self._url + url if self._url else url
        if len(self._url) > self._limits.request_line_bytes_max:
            most = self._limits.request_line_bytes_max
            raise RequestRefused(414, "request_line_too_long", f"The request line is over {most} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase == BODY:
            return  # trailers are allowed and not used; `_feed_step` bounds them
        self._header_count += 1
        if self._header_count > self._limits.header_count_max:
            raise self._headers_too_large()
        name = name.lower()
        value = value.rstrip()
        headers = self._headers
        if name in headers:
            if name in _SINGLE_HEADERS:
                text = f"The header {name.decode('ascii')} is given twice."
                raise RequestRefused(400, "malformed_request", text)
            value = headers[name] + (b"; " if name == b"cookie" else b", ") + value
        headers[name] = value

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            return
        parser = self._parser
        assert parser is not None
        headers = self._headers
        version = parser.get_http_version()
        if version == "1.1":
            self._is_http_1_0 = False
            if b"host" not in headers:
                raise RequestRefused(400, "malformed_request", "The Host header is missing.")
        elif version == "1.0":
            self._is_http_1_0 = True
        else:
            raise _version_not_supported()
        if self._wire_bytes > self._limits.header_bytes_max:
            size = sum(len(name) + len(value) + 4 for name, value in headers.items())
            if size > self._limits.header_bytes_max:
                raise self._headers_too_large()
        self._is_keep_alive = parser.should_keep_alive()
        method = parser.get_method().decode("ascii")
        if parser.should_upgrade():
            if method == "CONNECT":
                raise RequestRefused(400, "malformed_request", "CONNECT is for proxies; this is none.")
            self._is_upgrade = True
        path, query = parse_target(self._url)
        self._wire_bytes = 0
        self.phase = BODY
        length = headers.get(b"content-length")
        if length is not None:
            self._expect = int(length)
            if self._expect > self._limits.body_bytes_max:
                raise self._body_too_large()
        if b"transfer-encoding" in headers:
            self._check_transfer_encoding()
        if b"expect" in headers:
            self._check_expect()
        self._request = request = HttpRequest(
            method, path, query, headers, b"", self._client_address, self._is_keep_alive, self._is_http_1_0
        )
        if self._check_head is not None:
            self._check_head(request)

    def on_body(self, data: bytes) -> None:
        size = len(data)
        budget = self._budget
        self.body_bytes += size
        budget.bytes_held += size
        if self.body_bytes > self._limits.body_bytes_max:
            raise self._body_too_large()
        if budget.bytes_held > budget.bytes_max:
            text = "Too many large requests are being received at once. Try again later."
            raise RequestRefused(503, "too_many_bodies", text)
        if self._body is not None:
            self._body += data
        elif self._first_part:  # one buffer, because a list of tiny parts takes many times their size
            self._body = bytearray(self._first_part)
            self._body += data
            self._first_part = b""
        else:
            self._first_part = data

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        request = self._request
        assert request is not None
        request.body = self._first_part if self._body is None else bytes(self._body)
        self._request = None
        self.drop_body()
        self.ready.append(request)
        self._is_last = not self._is_keep_alive
        self.phase = IDLE
        self.wants_continue = False
        self._url = b""
        self._headers = {}
        self._expect = self._header_count = self._head_bytes = self._wire_bytes = 0

    # --- checks ---------------------------------------------------------------------------------

    def _check_transfer_encoding(self) -> None:
        if self._is_http_1_0 or self._headers[b"transfer-encoding"].lower() != b"chunked":
            text = "The only transfer encoding understood is 'chunked', in HTTP/1.1."
            raise RequestRefused(400, "malformed_request", text)

    def _check_expect(self) -> None:
        if self._headers[b"expect"].lower() != b"100-continue":
            raise RequestRefused(417, "expectation_failed", "The only expectation met is '100-continue'.")
        self.wants_continue = not self._is_http_1_0

    def _headers_too_large(self) -> RequestRefused:
        text = (
            f"Headers may have {self._limits.header_bytes_max} bytes, {self._limits.header_count_max} lines."
        )
        return RequestRefused(431, "headers_too_large", text)

    def _body_too_large(self) -> RequestRefused:
        text = f"The request body is over {self._limits.body_bytes_max} bytes."
        return RequestRefused(413, "body_too_large", text)


def _version_not_supported() -> RequestRefused:
    return RequestRefused(505, "http_version_not_supported", "Only HTTP/1.1 and 1.0 are spoken here.")


def _refusal_of(error: httptools.HttpParserError) -> RequestRefused:
    """Translate what stopped the parser: our own refusal from a callback, or llhttp's reason."""
    cause = error.__context__
    if isinstance(cause, RequestRefused):
        return cause
    if isinstance(error, httptools.HttpParserCallbackError):
        raise error  # a bug in a callback above, not the client's doing
    reason = str(error)
    if reason in ("Invalid HTTP version", "Pause on PRI/Upgrade"):
        return _version_not_supported()
    return RequestRefused(400, "malformed_request", f"The request is not well-formed HTTP/1.1: {reason}.")
