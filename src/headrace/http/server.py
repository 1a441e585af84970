"""The listening side: accepts connections, sweeps them once a second, drains them at the end."""

import asyncio
import errno
import ssl
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from itertools import islice

from headrace.clock import Clock, SystemClock
from headrace.errors import SetupError
from headrace.http.connection import ServerConnection
from headrace.http.errors import HeadRefused, RequestRefused
from headrace.http.limits import HttpLimits
from headrace.http.message import Headers, HttpRequest, render_headers
from headrace.http.request_parser import BodyBudget
from headrace.http.responder import Responder

Handler = Callable[[HttpRequest, Responder], Awaitable[None]]
"""Answers one request. Cancelled when the client goes away before the reply is complete; left alone
to finish its bookkeeping once it is."""
OnError = Callable[[HttpRequest, Responder, Exception], None]
"""Turns what a handler raised into a reply, or ends or aborts a started one (`has_started`). Left
incomplete, the connection is cut. Also called when the client is gone, so that the fault is recorded."""
RenderRefusal = Callable[[int, str, str], tuple[Headers, bytes]]
"""(status, code, message) → (headers, body) of a refusal made below the handler."""
RefusalReply = tuple[int, Headers, bytes]
"""(status, headers, body) of a refusal by `CheckHead`. Headers as for `Responder.send`."""
CheckHead = Callable[[HttpRequest], RefusalReply | None]
"""Looks at a request whose headers are complete, before any byte of its body is kept (`body` is empty) and
before `100 Continue` is sent. None lets it pass; a reply is sent at once, after those to the requests before
it, with `connection: close`; what the client still sends is thrown away. The handler never sees the request.
Called for every request, with or without a body, inside the parser: it has to be quick and must not wait.
What it raises is answered 500 and given to the loop's exception handler."""

_BACKLOG = 2048
_ROOM_TRIES = 16
"""Idle connections looked at to make room for a new one; those with output waiting are left."""
_CUT_SECONDS = 0.1
"""For cut sockets to be really closed before `drain` returns; only a stubborn handler takes all of it."""


class HttpServer:
    """One listening socket. Built once, `start`ed once, `drain`ed once.

    `check_head`, if given, may refuse a request by its headers, before its body is read (see `CheckHead`).
    """

    def __init__(
        self,
        handler: Handler,
        *,
        render_refusal: RenderRefusal,
        on_error: OnError,
        check_head: CheckHead | None = None,
        limits: HttpLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.handler = handler
        self.render_refusal = render_refusal
        self.limits = limits or HttpLimits()
        self.body_budget = BodyBudget(self.limits.bodies_bytes_max)
        self.idle: dict[ServerConnection, None] = {}
        """Connections that have no request, begun or running; the longest idle one first."""
        self.is_draining = False
        self.date_line = b""
        self.port = 0
        """The port listened on, after `start`."""
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # set by start
        self._on_error = on_error
        self._check_head = check_head
        self._clock = clock or SystemClock()
        self._listener: asyncio.Server | None = None
        self._connections: set[ServerConnection] = set()
        self._unflushed: list[ServerConnection] = []
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._all_gone: asyncio.Future[None] | None = None
        self._requests_past = 0
        self._bytes_received_past = 0
        self._bytes_sent_past = 0
        self.num_connections_total = 0
        """Connections accepted since the start."""
        self.num_refusals = 0
        """Requests refused below the handler since the start."""

    # --- life ---------------------------------------------------------------------------------

    async def start(
        self,
        host: str,
        port: int,
        *,
        ssl_context: ssl.SSLContext | None = None,
        reuse_port: bool = False,
    ) -> None:
        """Listen. Port 0 picks a free one (see `port`). Raises SetupError where that is not possible."""
        self.loop = asyncio.get_running_loop()
        try:
            self._listener = await self.loop.create_server(
                lambda: ServerConnection(self),
                host,
                port,
                ssl=ssl_context,
                backlog=_BACKLOG,
                reuse_port=reuse_port or None,
            )
        except OSError as error:
            raise _not_listening(host, port, error) from error
        self.port = self._listener.sockets[0].getsockname()[1]
        self._sweep()

    async def drain(self, timeout_s: float) -> int:
        """Stop: accept nothing, let running requests finish, cancel what is left after `timeout_s`.

        Returns how many requests had to be cancelled. A cancelled handler gets
        `limits.cancel_seconds_max` for its cleanup, then its connection is cut regardless.
        """
        self.is_draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in tuple(self._connections):
            connection.close_if_idle()
        num_cancelled = 0
        if not await self._wait_until_empty(timeout_s):
            num_cancelled = sum(connection.is_busy for connection in self._connections)
            for connection in tuple(self._connections):
                connection.cancel()
            await self._wait_until_empty(self.limits.cancel_seconds_max)
        for connection in tuple(self._connections):
            connection.abort()
        await self._wait_until_empty(_CUT_SECONDS)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        return num_cancelled

    async def _wait_until_empty(self, timeout_s: float) -> bool:
        if self._connections:
            self._all_gone = self.loop.create_future()
            await asyncio.wait((self._all_gone,), timeout=timeout_s)
        return not self._connections

    # --- counters, for metrics ------------------------------------------------------------------

    @property
    def num_connections_open(self) -> int:
        return len(self._connections)

    @property
    def num_active(self) -> int:
        """Connections with a request, begun or running."""
        return len(self._connections) - len(self.idle)

    @property
    def num_requests(self) -> int:
        """Requests handed to the handler since the start."""
        return self._requests_past + sum(connection.num_requests for connection in self._connections)

    @property
    def bytes_received(self) -> int:
        return self._bytes_received_past + sum(c.bytes_received for c in self._connections)

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the sockets since the start."""
        return self._bytes_sent_past + sum(c.bytes_sent for c in self._connections)

    # --- for connections ------------------------------------------------------------------------

    def admit(self, connection: ServerConnection) -> int:
        """Take a new connection into the set. Returns how many are open beyond the most allowed.

        Where that would be too many, the one longest idle is closed instead.
        """
        if len(self._connections) >= self.limits.connections_max:
            self._make_room()
        self._connections.add(connection)
        self.num_connections_total += 1
        return len(self._connections) - self.limits.connections_max

    def _make_room(self) -> None:
        for connection in islice(self.idle, _ROOM_TRIES):
            if not connection.has_output:
                connection.close_if_idle()
                self.forget(connection)  # its socket is closed in the next turn of the loop
                return

    def forget(self, connection: ServerConnection) -> None:
        """The connection is lost and its handler has finished, or it was closed while idle."""
        self.idle.pop(connection, None)
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._requests_past += connection.num_requests
        self._bytes_received_past += connection.bytes_received
        self._bytes_sent_past += connection.bytes_sent
        if not self._connections and self._all_gone is not None and not self._all_gone.done():
            self._all_gone.set_result(None)

    def count_refusal(self) -> None:
        self.num_refusals += 1

    @property
    def head_check(self) -> Callable[[HttpRequest], None] | None:
        """For parsers: raises RequestRefused where the owner's hook refuses. None where there is no hook."""
        return None if self._check_head is None else self._raise_if_refused

    def _raise_if_refused(self, request: HttpRequest) -> None:
        assert self._check_head is not None
        refused: RequestRefused
        try:
            reply = self._check_head(request)
            if reply is None:
                return
            status, headers, body = reply
            refused = HeadRefused(status, render_headers(headers), body)
        except Exception as error:  # noqa: BLE001 - a fault of the hook becomes a reply, like a handler's
            self.loop.call_exception_handler({"message": "check_head failed", "exception": error})
            refused = RequestRefused(500, "internal_error", "The server made a mistake.")
        raise refused

    def report(self, request: HttpRequest, responder: Responder, error: Exception) -> None:
        """Let the caller's hook answer for a handler that failed."""
        self._on_error(request, responder, error)

    def flush_soon(self, connection: ServerConnection) -> None:
        """Send what `connection` has pending at the end of this turn of the loop.

        One call for all connections together, so that a chunk costs a list entry and several writes
        of one turn cost one system call.
        """
        if not self._unflushed:
            self.loop.call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        unflushed = self._unflushed
        self._unflushed = []
        for connection in unflushed:
            connection.flush()

    def _sweep(self) -> None:
        """Once per `sweep_seconds`: the Date line and every connection's limits of time."""
        self._sweep_timer = self.loop.call_later(self.limits.sweep_seconds, self._sweep)
        wall_s = self._clock.wall_us() // 1_000_000
        self.date_line = b"date: %b\r\n" % formatdate(wall_s, usegmt=True).encode("ascii")
        now_s = self._clock.monotonic_us() / 1e6
        for connection in tuple(self._connections):
            connection.check(now_s)


def _not_listening(host: str, port: int, error: OSError) -> SetupError:
    if error.errno == errno.EADDRINUSE:
        return SetupError(
            f"port {port} on {host} is already in use by another program; stop that or choose another port"
        )
    if error.errno == errno.EACCES:
        return SetupError(f"no permission to listen on port {port} (below 1024 needs privileges)")
    return SetupError(f"cannot listen on {host}, port {port}: {error.strerror or error}")
