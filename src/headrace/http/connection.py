"""One client connection: reads requests, runs one handler at a time, sends replies in order.

    reading ── request ready ──▶ busy ── handler done, keep-alive ──▶ reading (or the next one read ahead)
    reading ── refusal ──▶ lingering: answer sent, input thrown away ──▶ closed
    busy ── handler done, client behind ──▶ held: nothing read or begun ── client keeps up ──▶ reading
    busy ── handler done, close ──▶ closed
    any ── client gone ──▶ handler cancelled (unless its reply is complete) ──▶ closed

While a request runs the socket is always read, because that is how a client's leaving is noticed. Up to
`pipelined_bytes_max` are kept; a client that sends more behind a running request has crossed a bound: the
rest is thrown away (after `linger_bytes_max` the connection is cut), and because requests are lost then,
the running reply is the last one.

There is no timer here: the server's sweep calls `check` once per tick, and a phase that has not moved
since an earlier tick is held against its limit.
"""

import asyncio
from typing import TYPE_CHECKING, Final, cast

from headrace.http import request_parser
from headrace.http.errors import HandlerFault, HeadRefused, RequestRefused
from headrace.http.message import STATUS_LINES, HttpRequest, render_headers
from headrace.http.request_parser import RequestParser
from headrace.http.responder import Responder, wait_for

if TYPE_CHECKING:
    from headrace.http.server import HttpServer

_BUSY: Final = 3
_LINGERING: Final = 4
_HELD: Final = 5


class ServerConnection(asyncio.Protocol):
    """Owned by the server's set until the connection is lost and its handler has finished."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._limits = server.limits
        self._write_buffer_high = server.limits.write_buffer_high
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set before any use
        self._parser: RequestParser = None  # type: ignore[assignment]  # set before any use
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._is_cancelled = False
        self._responder: Responder | None = None
        self._backlog = bytearray()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._is_write_paused = False
        self._is_lingering = False
        self._is_held = False
        self._is_overrun = False
        self._is_surplus = False
        self._linger_bytes = 0
        self.num_requests = 0
        self._phase_seen = -1
        self._phase_since = 0.0
        self._taken_seen = -1
        self._taken_since = 0.0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.is_gone = False
        """The client is gone, or the connection was cut: nothing written arrives any more."""
        self._is_lost = False

    # --- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        limits = self._limits
        self._transport.set_write_buffer_limits(high=limits.write_buffer_high, low=limits.write_buffer_low)
        peer = transport.get_extra_info("peername")
        server = self._server
        self._parser = RequestParser(
            limits,
            peer[0] if isinstance(peer, tuple) else "",
            budget=server.body_budget,
            check_head=server.head_check,
        )
        surplus = server.admit(self)
        self._is_surplus = surplus > 0
        if surplus <= 0:
            server.idle[self] = None
        if surplus > limits.connections_surplus_max:
            self.abort()
        elif server.is_draining:  # accepted in the very turn in which listening ended
            self._close()

    def data_received(self, data: bytes) -> None:
        self.bytes_received += len(data)
        if self._task is not None or self._is_held:
            self._keep_for_later(data)
        elif self._is_lingering:
            self._throw_away(data)
        elif not self.is_gone:
            self._feed(data)

    def eof_received(self) -> None:
        """The client closed its side: it is gone. Returning None lets the transport flush and close."""
        self.flush()
        self._client_gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_gone()
        self._is_lost = True
        self._parser.close()
        if self._task is None:
            self._server.forget(self)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._wake_drain_waiters()
        if self._is_held:
            self._is_held = False
            if self.is_gone:
                return
            self._transport.resume_reading()
            if self.is_last_reply:
                self._close_after_reply()
            else:
                self._go_on()

    # --- reading and running handlers -------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        if self._is_surplus:
            self._refuse(RequestRefused(503, "too_many_connections", "Too many connections are open."))
            return
        parser = self._parser
        self._server.idle.pop(self, None)
        rest = parser.feed(data)
        if rest:
            self._keep_for_later(rest)
        if parser.ready:
            self._start_next()
        elif parser.refusal is not None:
            self._refuse(parser.refusal)
        elif parser.wants_continue:
            parser.wants_continue = False
            if not parser.body_bytes:
                self.write_now(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _keep_for_later(self, data: bytes) -> None:
        if not self._is_overrun and len(self._backlog) + len(data) <= self._limits.pipelined_bytes_max:
            self._backlog += data
        else:
            self._is_overrun = True
            self._backlog.clear()
            self._throw_away(data)

    def _throw_away(self, data: bytes) -> None:
        self._linger_bytes += len(data)
        if self._linger_bytes > self._limits.linger_bytes_max:
            self.abort()

    def _start_next(self) -> None:
        request = self._parser.ready.popleft()
        self.num_requests += 1
        self._responder = responder = Responder(self, request)
        self._task = self._server.loop.create_task(self._run(request, responder))

    async def _run(self, request: HttpRequest, responder: Responder) -> None:
        server = self._server
        self._has_begun = True
        try:
            if self.is_gone:
                return
            await server.handler(request, responder)
            if not responder.is_closed:
                raise HandlerFault(f"no complete reply to {request.method} {request.path}")
        except asyncio.CancelledError:
            # Not ours: the handler awaited something that was cancelled; the client deserves an answer.
            if not self._is_cancelled:
                server.report(request, responder, HandlerFault("the handler was cancelled from inside"))
        except Exception as error:  # noqa: BLE001 - the one border where any fault becomes a reply
            server.report(request, responder, error)
        finally:
            self._has_begun = self._is_cancelled = False
            self._task = self._responder = None
            self._handler_done(responder)

    def _handler_done(self, responder: Responder) -> None:
        if self._is_lost:
            self._server.forget(self)
        elif self.is_gone:
            pass  # closing; `connection_lost` will come
        elif not responder.is_complete:
            self.abort()
        elif not responder.is_keep_alive or self.is_last_reply:
            self._close_after_reply()
        else:
            if self.is_behind:
                self.flush()
            if self._is_write_paused:  # the next reply has to wait until this one is taken
                self._is_held = True
                self._transport.pause_reading()
            else:
                self._go_on()

    def _go_on(self) -> None:
        """Take the next request read ahead, or wait for one."""
        parser = self._parser
        if parser.ready:
            self._start_next()
        elif parser.refusal is not None:
            self._refuse(parser.refusal)
        elif self._backlog or parser.wants_continue:
            data = bytes(self._backlog)
            self._backlog.clear()
            self._feed(data)
        elif parser.phase == request_parser.IDLE:
            self._server.idle[self] = None

    def _client_gone(self) -> None:
        self.is_gone = True
        self._pending.clear()
        self._pending_bytes = 0
        if self._responder is not None and not self._responder.is_complete:
            self._cancel_handler()
        self._wake_drain_waiters()

    def _cancel_handler(self) -> None:
        """Once only: a second cancellation would interrupt the handler's cleaning up.

        A task cancelled before its first step would not even run its `finally`; `_run` looks itself.
        """
        if self._task is not None and self._has_begun and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    # --- writing ------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a handler runs."""
        return self._task is not None

    @property
    def date_line(self) -> bytes:
        return self._server.date_line

    @property
    def is_last_reply(self) -> bool:
        """Whether the connection is closed after the running reply, whatever the client asks for."""
        return self._is_overrun or self._server.is_draining

    @property
    def has_output(self) -> bool:
        """Whether bytes wait for the client."""
        return bool(self._pending) or self._transport.get_write_buffer_size() > 0

    @property
    def is_behind(self) -> bool:
        """Whether more bytes wait for the client than the high mark, or still more than the low one."""
        return self._is_write_paused or self._pending_bytes >= self._write_buffer_high

    def write(self, data: bytes) -> bool:
        """Send with whatever else is written in this turn of the loop, in one system call.

        Returns whether the client keeps up, the opposite of `is_behind`.
        """
        pending = self._pending
        if not pending:
            self._server.flush_soon(self)
        pending.append(data)
        self._pending_bytes += len(data)
        return not self._is_write_paused and self._pending_bytes < self._write_buffer_high

    def write_reply(self, data: bytes) -> None:
        """Send a whole reply: at once where it is the only one under way, else with those of this turn.

        Replies that leave together wake a peer on this machine once, and its next requests come together.
        """
        if self._server.num_active > 1:
            self.write(data)
        else:
            self.write_now(data)

    def write_now(self, data: bytes) -> None:
        if self._pending:
            self.write(data)
        else:
            self.bytes_sent += len(data)
            self._transport.write(data)

    def flush(self) -> None:
        pending = self._pending
        if not pending:
            return
        data = pending[0] if len(pending) == 1 else b"".join(pending)
        pending.clear()
        self._pending_bytes = 0
        self.bytes_sent += len(data)
        self._transport.write(data)

    async def drain(self) -> None:
        """Wait for the low mark. Cancellation is how this ends when the client goes away."""
        self.flush()
        if self.is_gone:
            await asyncio.sleep(0)  # a handler that writes in a loop has to meet its cancellation somewhere
        elif self._is_write_paused:
            await wait_for(self._drain_waiters)

    def _wake_drain_waiters(self) -> None:
        for waiter in self._drain_waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- ending -------------------------------------------------------------------------------

    def abort(self) -> None:
        """Cut the connection now. A handler whose reply is not complete is cancelled."""
        self._client_gone()
        self._transport.abort()

    def cancel(self) -> None:
        """Cancel the handler, if one runs, because the server stops."""
        if self._has_begun:
            self._cancel_handler()
        else:
            self.abort()

    def close_if_idle(self) -> None:
        """Close a connection that has no request, begun or running."""
        if self._phase() == request_parser.IDLE:
            self._close()
        elif self._is_held:
            self._is_held = False
            self._close_after_reply()

    def _close(self) -> None:
        self._server.idle.pop(self, None)
        self.flush()
        self.is_gone = True
        self._transport.close()

    def _close_after_reply(self) -> None:
        # Closing with unread input resets the connection and may destroy the reply.
        if self._backlog or self._is_overrun:
            self._linger()
        else:
            self._close()

    def _refuse(self, refusal: RequestRefused) -> None:
        if isinstance(refusal, HeadRefused):
            headers, body = refusal.headers, refusal.body
        else:
            rendered, body = self._server.render_refusal(refusal.status, refusal.code, refusal.message)
            headers = render_headers(rendered)
        self._server.count_refusal()
        self._parser.drop_body()
        self.write_now(
            b"%b%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINES[refusal.status], self.date_line, headers, len(body), body)
        )
        self._linger()

    def _linger(self) -> None:
        """Keep reading and throwing away, so that the client sees the answer instead of a reset."""
        self.flush()
        self._server.idle.pop(self, None)
        self._is_lingering = True
        self._backlog.clear()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()

    # --- time -----------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Called once per sweep with the monotonic time in seconds: enforce every limit of time."""
        self._check_write_stall(now_s)
        if self.is_gone:
            return
        phase = self._phase()
        seen = self.num_requests * 8 + phase
        if seen != self._phase_seen:
            self._phase_seen = seen
            self._phase_since = now_s
            return
        age_s = now_s - self._phase_since
        limits = self._limits
        if phase == request_parser.HEAD:
            if age_s > limits.header_seconds_max:
                self._refuse(RequestRefused(408, "request_timeout", "The headers took too long."))
        elif phase == request_parser.BODY:
            if age_s > limits.body_seconds_max + self._parser.body_bytes / limits.body_rate_min:
                self._refuse(RequestRefused(408, "request_timeout", "The body took too long."))
        elif phase == request_parser.IDLE:
            is_new = not self.bytes_received
            if age_s > (limits.header_seconds_max if is_new else limits.keep_alive_seconds):
                self._close()
        elif phase == _LINGERING:
            if self.has_output:
                self._phase_since = now_s  # an answer still being taken; `_check_write_stall` bounds that
            elif age_s > limits.linger_seconds_max:
                self.abort()

    def _phase(self) -> int:
        if self._is_lingering:
            return _LINGERING
        if self._is_held:
            return _HELD
        return _BUSY if self._task is not None else self._parser.phase

    def _check_write_stall(self, now_s: float) -> None:
        """A client has to take `write_stall_bytes_min` in each `write_stall_seconds_max`, or everything."""
        waiting = self._transport.get_write_buffer_size()
        taken = self.bytes_sent - waiting
        if not waiting or taken - self._taken_seen >= self._limits.write_stall_bytes_min:
            self._taken_seen = taken
            self._taken_since = now_s
        elif now_s - self._taken_since > self._limits.write_stall_seconds_max:
            self.abort()
