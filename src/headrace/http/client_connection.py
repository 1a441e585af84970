"""One connection to a model server: one exchange at a time, reused only when there is no doubt.

    idle ── send ──▶ waiting for the head ──▶ body ── whole reply ──▶ idle (back to the pool)
    any ── error, EOF, timeout, early leave, byte out of turn ──▶ destroyed

A connection goes back to the pool only after a reply that ended by its own framing, with keep-alive
on both sides, nothing after it, and the request fully written.
"""

import asyncio
from typing import TYPE_CHECKING, cast

import httptools

from headrace import bounds
from headrace.http.client_response import ClientResponse
from headrace.http.errors import UpstreamBroken, UpstreamError, UpstreamTimedOut
from headrace.http.head_memory import KnownReply

if TYPE_CHECKING:
    from headrace.http.client import HttpClient


class StaleConnection(UpstreamBroken):
    """A reused connection ended before any byte of the reply: see `HttpClient.request` on repeating.

    `was_sent`: whether the request had been written to it.
    """

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class UpstreamConnection(asyncio.Protocol):
    """Counted by the pool until the connection is lost."""

    def __init__(self, client: "HttpClient") -> None:
        self._client = client
        self.loop = client.loop
        self.name = client.name
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set before any use
        self._parser = httptools.HttpResponseParser(self)
        self._response: ClientResponse | None = None
        self._parts: list[bytes] = []
        self._head_bytes = 0
        self._is_head_request = False
        self._is_interim = False
        self._is_message_complete = False
        self._is_reusable = False
        self._is_reply_until_eof = False
        self._is_paused = False
        self._unsent = b""
        """A request that leaves at the end of this turn of the loop."""
        self._is_turn_over = True
        self._is_made = False
        self._is_abandoned = False
        self.is_lost = False
        self.num_exchanges = 0
        self.bytes_received = 0
        self.idle_since_s = 0.0
        self._bytes_at_start = 0
        self._started_s = 0.0
        self._seen = (-1, -1)
        self._seen_since_s = 0.0

    # --- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_made = True
        if self._is_abandoned:
            self._transport.abort()
        else:
            self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        response = self._response
        size = len(data)
        self.bytes_received += size
        if response is None:
            self.destroy()  # bytes out of turn: whose reply would they be?
            return
        is_first = self.bytes_received - size == self._bytes_at_start
        known = self._client.known_reply
        if is_first and known is not None and not self._is_head_request:
            recalled = known.recall(data)
            if recalled is not None:
                response.status = known.status
                response.headers, body = recalled
                response.has_head = self._is_reusable = True
                if body:
                    self._parts.append(body)
                self._reply_complete(response)
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__
            if cause is not None and not isinstance(cause, UpstreamError):
                raise cause from None  # a bug in a callback below
            self._fail(UpstreamBroken(f"{self.name}: not a well-formed HTTP reply ({cause or error})"))
            return
        if self._is_message_complete:
            if is_first and self._is_reusable and not self._is_head_request:
                self._client.known_reply = KnownReply.of(data, response.status, response.headers)
            self._reply_complete(response)
        elif response.has_head:
            response.deliver()
            if size >= bounds.RELAY_BYTES_PER_TURN and self._response is not None:
                self._give_others_a_turn()
        else:
            self._head_bytes += size
            if self._head_bytes > bounds.UPSTREAM_HEADER_BYTES_MAX:
                self._fail(UpstreamBroken(f"{self.name}: the reply's headers are too large"))

    def eof_received(self) -> None:
        """The server closed its side. Returning None lets the transport close."""
        self._ended()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._ended(exc)
        self._client.forget(self)
        del self._parser  # breaks the cycle with the C parser, whose callbacks are our methods

    # --- callbacks of httptools ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_message_complete:
            raise UpstreamBroken("bytes after the end of the reply")

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        assert response is not None
        if response.has_head:
            return  # trailers
        name = name.lower()
        value = value.rstrip()
        headers = response.headers
        headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        response = self._response
        assert response is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._is_interim = True
            response.headers.clear()
            return
        response.status = status
        response.has_head = True
        headers = response.headers
        self._is_reply_until_eof = not (
            b"content-length" in headers or b"transfer-encoding" in headers or status in (204, 304)
        )
        if self._is_head_request:
            self._is_message_complete = True  # the parser waits for a body that does not come

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
            return
        self._is_message_complete = True
        self._is_reusable = self._parser.should_keep_alive()

    # --- exchanges --------------------------------------------------------------------------------

    async def exchange(self, request: bytes, *, is_head_request: bool) -> ClientResponse:
        """Send a whole request, return the reply once its head has come. Raises UpstreamError.

        Cancelled or failed while waiting, the connection is destroyed.
        """
        assert self._response is None
        self.num_exchanges += 1
        response = ClientResponse(self)
        if self.is_lost or self._transport.is_closing():
            raise StaleConnection(f"{self.name}: the idle connection had been closed", was_sent=False)
        self._response = response
        self._parts = response.parts
        self._head_bytes = 0
        self._is_head_request = is_head_request
        self._is_message_complete = self._is_reusable = self._is_reply_until_eof = False
        self._bytes_at_start = self.bytes_received
        self._started_s = self._client.now_s
        if self._client.num_busy > 1:
            self._unsent = request
            self._client.flush_soon(self)
        else:
            self._transport.write(request)
        try:
            while not response.has_head:
                await response.wait()
        finally:
            if not response.has_head:
                self.destroy()
        return response

    def flush(self) -> None:
        """Send what was kept for the end of the turn, if it is still wanted."""
        request, self._unsent = self._unsent, b""
        if request and not self.is_lost:
            self._transport.write(request)

    def _reply_complete(self, response: ClientResponse) -> None:
        self._response = None
        is_written = not self._unsent and self._transport.get_write_buffer_size() == 0
        if self._is_reusable and is_written and not self._transport.is_closing():
            self.resume()
            self._client.release(self)
        else:
            self.destroy()
        response.finish()

    def _ended(self, exc: Exception | None = None) -> None:
        response = self._response
        if response is None:
            return
        if response.has_head and self._is_reply_until_eof and exc is None:
            self._response = None
            response.finish()
        elif self.num_exchanges > 1 and self.bytes_received == self._bytes_at_start:
            text = f"{self.name}: the reused connection ended before a reply"
            self._fail(StaleConnection(text, was_sent=True))
        else:
            place = "inside the reply" if self.bytes_received > self._bytes_at_start else "before a reply"
            self._fail(UpstreamBroken(f"{self.name}: the connection ended {place}"))

    def _fail(self, error: UpstreamError) -> None:
        response, self._response = self._response, None
        self.destroy()
        if response is not None:
            response.fail(error)

    def destroy(self) -> None:
        """Cut the connection; the model server learns at once that nobody wants the rest."""
        response, self._response = self._response, None
        self._unsent = b""
        if response is not None:
            response.fail(UpstreamBroken(f"{self.name}: the reply was left"))
        if not self.is_lost:
            self._transport.abort()

    def abandon(self) -> None:
        """Whoever asked for this connection gave up while it was being made."""
        self._is_abandoned = True
        if self._is_made:
            self.destroy()

    # --- pressure ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """The consumer is behind: do not read."""
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """The consumer takes more."""
        if self._is_paused:
            self._is_paused = False
            if self._is_turn_over:
                self._transport.resume_reading()

    def _give_others_a_turn(self) -> None:
        """Read no more in this turn of the loop: uvloop would read up to 32 times before others run."""
        if self._is_turn_over:
            self._is_turn_over = False
            self._transport.pause_reading()
            self.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_turn_over = True
        if not self._is_paused and not self.is_lost:
            self._transport.resume_reading()

    # --- time -----------------------------------------------------------------------------------

    def check(self, now_s: float, *, head_timeout_s: float, idle_timeout_s: float) -> None:
        """Called once per sweep while an exchange runs."""
        response = self._response
        if response is None:
            return
        if not response.has_head:
            if now_s - self._started_s > head_timeout_s:
                self._fail(UpstreamTimedOut(f"{self.name}: no reply within {head_timeout_s:g} s"))
            return
        seen = (self.num_exchanges, self.bytes_received)
        if seen != self._seen or self._is_paused:  # a consumer that is behind is not the server's fault
            self._seen = seen
            self._seen_since_s = now_s
        elif now_s - self._seen_since_s > idle_timeout_s:
            self._fail(UpstreamTimedOut(f"{self.name}: silent for {idle_timeout_s:g} s inside the reply"))
