"""How a handler answers: whole (`send`) or as a stream (`start`, `write`…, `end`).

    NEW ── send ──────────────────────▶ DONE
    NEW ── start ──▶ STREAMING ── end ─▶ DONE
    NEW, STREAMING ── abort ───────────▶ DONE (connection cut)

When the client is gone, everything here quietly does nothing: the handler hears of it by being
cancelled. Calling in the wrong state is our bug and asserted.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from headrace.http.message import (
    STATUS_LINES,
    STATUSES_WITHOUT_BODY,
    Headers,
    HttpRequest,
    render_headers,
)

if TYPE_CHECKING:
    from headrace.http.connection import ServerConnection

_NEW: Final = 0
_STREAMING: Final = 1
_DONE: Final = 2


class Responder:
    """The answer to one request. `body_bytes_sent` counts body bytes handed over, without framing."""

    __slots__ = (
        "_connection",
        "_has_body",
        "_is_chunked",
        "_is_http_1_0",
        "_is_keep_alive",
        "_state",
        "body_bytes_sent",
        "status",
    )

    def __init__(self, connection: "ServerConnection", request: HttpRequest) -> None:
        self._connection = connection
        self._has_body = request.method != "HEAD"
        self._is_http_1_0 = request.is_http_1_0
        self._is_keep_alive = request.is_keep_alive
        self._is_chunked = False
        self._state = _NEW
        self.body_bytes_sent = 0
        self.status = 0
        """Status sent, 0 before."""

    @property
    def has_started(self) -> bool:
        """Whether a status has been sent (or the connection aborted), so that no other can be."""
        return self._state != _NEW

    @property
    def is_complete(self) -> bool:
        """Whether the reply has been given in full, or the connection aborted."""
        return self._state == _DONE

    @property
    def is_closed(self) -> bool:
        """Whether writes go nowhere: the reply is complete or the client is gone."""
        return self._state == _DONE or self._connection.is_gone

    @property
    def is_keep_alive(self) -> bool:
        """Whether the connection may serve another request after this one."""
        return self._is_keep_alive

    @property
    def is_writable(self) -> bool:
        """Whether the client keeps up: False between the high and the low mark."""
        return not self._connection.is_behind

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole reply. For HEAD the body gives only its length; for 204 and 304 it is empty."""
        assert self._state == _NEW, "a reply has already been started"
        self._state = _DONE
        self.status = status
        connection = self._connection
        if connection.is_gone:
            return
        block = render_headers(headers)
        ending = self._connection_line()
        if status in STATUSES_WITHOUT_BODY:
            assert not body
            data = b"%b%b%b%b\r\n" % (STATUS_LINES[status], connection.date_line, block, ending)
        else:
            data = b"%b%b%bcontent-length: %d\r\n%b\r\n%b" % (
                STATUS_LINES[status],
                connection.date_line,
                block,
                len(body),
                ending,
                body if self._has_body else b"",
            )
            self.body_bytes_sent = len(body)
        connection.write_reply(data)

    def start(self, status: int, headers: Headers) -> None:
        """Begin a stream: chunked, or up to the end of the connection for an HTTP/1.0 client."""
        assert self._state == _NEW, "a reply has already been started"
        assert status not in STATUSES_WITHOUT_BODY
        self._state = _STREAMING
        self.status = status
        connection = self._connection
        if connection.is_gone:
            return
        if self._is_http_1_0:
            self._is_keep_alive = False
        else:
            self._is_chunked = True
        connection.write(
            b"%b%b%b%b%b\r\n"
            % (
                STATUS_LINES[status],
                connection.date_line,
                render_headers(headers),
                b"transfer-encoding: chunked\r\n" if self._is_chunked else b"",
                self._connection_line(),
            )
        )

    def write(self, data: bytes) -> bool:
        """Send `data` as one HTTP chunk, together with what else is written in this turn of the loop.

        Returns False when the client is behind or gone and the caller should `drain` before it writes
        more.
        """
        assert self._state != _NEW, "start() comes before write()"
        connection = self._connection
        if connection.is_gone:
            return False
        if self._state == _DONE or not data or not self._has_body:
            return True
        size = len(data)
        self.body_bytes_sent += size
        return connection.write(b"%x\r\n%b\r\n" % (size, data) if self._is_chunked else data)

    async def drain(self) -> None:
        """Wait until the client has taken enough. Ends by cancellation when the client goes away."""
        connection = self._connection
        if connection.is_behind or connection.is_gone:
            await connection.drain()

    def end(self) -> None:
        """End the stream well. Without it (see `abort`) the client can tell that something is missing."""
        assert self._state != _NEW, "start() comes before end()"
        if self._state == _DONE:
            return
        self._state = _DONE
        if self._is_chunked and self._has_body and not self._connection.is_gone:
            self._connection.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """Cut the connection without ending the reply. The handler is not cancelled by this."""
        self._state = _DONE
        self._is_keep_alive = False
        self._connection.abort()

    def _connection_line(self) -> bytes:
        if self._is_keep_alive and not self._connection.is_last_reply:
            return b"connection: keep-alive\r\n" if self._is_http_1_0 else b""
        self._is_keep_alive = False
        return b"connection: close\r\n"


async def wait_for(waiters: list[asyncio.Future[None]]) -> None:
    """Join `waiters` until someone completes all of them. Cancelling leaves no trace."""
    future = asyncio.get_running_loop().create_future()
    waiters.append(future)
    try:
        await future
    finally:
        if future in waiters:
            waiters.remove(future)
