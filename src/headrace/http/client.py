"""HTTP/1.1 client for one model server: a keep-alive pool and the requests through it.

Connections are reused last in, first out, so that a quiet pool shrinks. Idle ones are closed after
`keep_alive_s`, which stays under the 5 s of uvicorn (vLLM, SGLang) so that we close first.
"""

import asyncio
import ssl
from collections import deque
from typing import NamedTuple
from urllib.parse import urlsplit

from headrace.clock import Clock, SystemClock
from headrace.errors import ConfigError
from headrace.http.client_connection import StaleConnection, UpstreamConnection
from headrace.http.client_response import ClientResponse
from headrace.http.errors import UpstreamTimedOut, UpstreamUnreachable
from headrace.http.head_memory import KnownReply
from headrace.http.message import Headers, render_headers

_REQUEST_LINES_MAX = 256


class _Address(NamedTuple):
    origin: str
    host: str
    port: int
    is_tls: bool
    authority: bytes
    path: str


def _parse_address(base_url: str) -> _Address:
    try:
        parts = urlsplit(base_url)
        port = parts.port
        authority = parts.netloc.encode("ascii" if parts.netloc.isascii() else "idna")
    except ValueError as error:
        raise ConfigError(f"{base_url!r} is not an address: {error}") from None
    is_plain = parts.hostname and not parts.username and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not is_plain:
        raise ConfigError(f"{base_url!r} is not an address like http://host:8000 or https://host/v1")
    is_tls = parts.scheme == "https"
    return _Address(
        f"{parts.scheme}://{parts.netloc}",
        parts.hostname or "",
        port or (443 if is_tls else 80),
        is_tls,
        authority,
        parts.path.rstrip("/"),
    )


class HttpClient:
    """Build once per model server; use inside a running loop; `close` at the end.

    `base_url` may have a path (`http://host:8000/v1`), which goes before each request's. Times are in
    seconds, kept to within one `sweep_seconds`, except connecting, which is exact.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_s: float = 5.0,
        head_timeout_s: float = 600.0,
        idle_timeout_s: float = 60.0,
        keep_alive_s: float = 4.0,
        connections_max: int = 1024,
        ssl_context: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        sweep_seconds: float = 1.0,
    ) -> None:
        address = _parse_address(base_url)
        self.name = address.origin
        self.now_s = 0.0
        """Monotonic time of the last sweep."""
        self.num_connections = 0
        """Places taken: connections open or being opened."""
        self.num_connections_opened = 0
        """Connections made since the start."""
        self._host = address.host
        self._port = address.port
        self._ssl = (ssl_context or ssl.create_default_context()) if address.is_tls else None
        self._host_line = b"host: %b\r\n" % address.authority
        self._prefix = address.path
        self._connect_timeout_s = connect_timeout_s
        self._head_timeout_s = head_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._keep_alive_s = keep_alive_s
        self._connections_max = connections_max
        self._clock = clock or SystemClock()
        self._sweep_seconds = sweep_seconds
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._connections: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []
        self._unflushed: list[UpstreamConnection] = []
        self.known_reply: KnownReply | None = None
        """For connections: the head of the server's last short reply."""
        self._waiters: deque[asyncio.Future[UpstreamConnection | None]] = deque()
        self._request_lines: dict[tuple[str, str], bytes] = {}
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    @property
    def num_idle(self) -> int:
        """Connections waiting in the pool."""
        return len(self._idle)

    @property
    def num_busy(self) -> int:
        """Connections in an exchange, or being opened."""
        return self.num_connections - len(self._idle)

    async def request(
        self,
        method: str,
        path: str,
        headers: Headers = b"",
        body: bytes = b"",
        *,
        is_repeatable: bool = True,
    ) -> ClientResponse:
        """Send a request and return its reply as soon as the head has come.

        `headers` as for `Responder.send`; `host` and `content-length` are added here. Use the reply in
        a `with` block. Raises UpstreamUnreachable, UpstreamTimedOut or UpstreamBroken.

        Repeating: where a reused connection turns out to have ended before any byte of the reply, the
        server has most likely closed it while it was idle and never read the request, so it is sent
        once more on a fresh connection. It cannot be proven that the server had not begun, so set
        `is_repeatable=False` where a second execution would do harm; generating text has no effect
        but the work. Nothing else is ever repeated.
        """
        data = self._render(method, path, headers, body)
        is_head = method == "HEAD"
        connection = self._idle.pop() if self._idle else await self._acquire()
        try:
            return await connection.exchange(data, is_head_request=is_head)
        except StaleConnection as stale:
            if stale.was_sent and not is_repeatable:
                raise
        for idle in tuple(self._idle):  # the server closes connections: the others are in doubt too
            idle.destroy()
        self._idle.clear()
        connection = await self._acquire()
        return await connection.exchange(data, is_head_request=is_head)

    def close(self) -> None:
        """Cut every connection; replies still read fail with UpstreamBroken."""
        self._is_closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in tuple(self._connections):
            connection.destroy()
        self._idle.clear()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(UpstreamUnreachable(f"{self.name}: the client is closed"))

    def flush_soon(self, connection: UpstreamConnection) -> None:
        """Send what `connection` keeps at the end of this turn of the loop.

        Requests that leave together wake a server on this machine once, and its replies come together.
        """
        if not self._unflushed:
            self.loop.call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for connection in unflushed:
            connection.flush()

    # --- the pool -----------------------------------------------------------------------------

    async def _acquire(self) -> UpstreamConnection:
        """A connection to use: a new one, or one given back when `connections_max` are open."""
        if self._is_closed:
            raise UpstreamUnreachable(f"{self.name}: the client is closed")
        if self._sweep_timer is None:
            self._sweep()
        if self.num_connections < self._connections_max:
            self.num_connections += 1
            return await self._open()
        return await self._wait_for_turn() or await self._open()

    async def _open(self) -> UpstreamConnection:
        """Connect. The caller has taken a place, which the connection keeps from being made until lost."""
        connection = UpstreamConnection(self)
        is_ready = False
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self.loop.create_connection(lambda: connection, self._host, self._port, ssl=self._ssl)
            is_ready = not self._is_closed
        except TimeoutError:
            text = f"{self.name}: no connection within {self._connect_timeout_s:g} s"
            raise UpstreamTimedOut(text) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name no resolver takes
            reason = getattr(error, "strerror", None) or error
            raise UpstreamUnreachable(f"{self.name}: cannot connect ({reason})") from error
        finally:
            if not is_ready:
                self._undo_open(connection)
        if not is_ready:
            raise UpstreamUnreachable(f"{self.name}: the client is closed")
        return connection

    def _undo_open(self, connection: UpstreamConnection) -> None:
        """Nobody wants the connection. uvloop may still make it, or may never report it lost."""
        connection.abandon()
        if connection in self._connections:
            self.forget(connection)
        else:
            self._free_place()

    async def _wait_for_turn(self) -> UpstreamConnection | None:
        """Wait for a connection, or (None) for a place to open one, already taken."""
        waiter: asyncio.Future[UpstreamConnection | None] = self.loop.create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await waiter
        except BaseException as error:
            # Something may have been handed over in the same turn: pass it on before leaving.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                given = waiter.result()
                self.release(given) if given is not None else self._free_place()
            if isinstance(error, TimeoutError):
                text = f"{self.name}: all {self._connections_max} connections stayed in use"
                raise UpstreamTimedOut(text) from None
            raise

    def release(self, connection: UpstreamConnection) -> None:
        """A connection ended an exchange well: hand it to whoever waits, or keep it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        connection.idle_since_s = self.now_s
        self._idle.append(connection)

    def opened(self, connection: UpstreamConnection) -> None:
        """The connection is made."""
        self._connections.add(connection)
        self.num_connections_opened += 1

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection is lost: its place is free."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._free_place()

    def _free_place(self) -> None:
        """Give a place to whoever waits for one, or count it free."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.num_connections -= 1

    def _sweep(self) -> None:
        """Once per `sweep_seconds`: limits of time, and idle connections past their age."""
        self.now_s = now_s = self._clock.monotonic_us() / 1e6
        for connection in tuple(self._connections):
            connection.check(now_s, head_timeout_s=self._head_timeout_s, idle_timeout_s=self._idle_timeout_s)
        for connection in tuple(self._idle):
            if now_s - connection.idle_since_s > self._keep_alive_s:
                self._idle.remove(connection)
                connection.destroy()
        self._sweep_timer = self.loop.call_later(self._sweep_seconds, self._sweep)

    # --- requests -----------------------------------------------------------------------------

    def _render(self, method: str, path: str, headers: Headers, body: bytes) -> bytes:
        line = self._request_lines.get((method, path)) or self._request_line(method, path)
        if not body and method in ("GET", "HEAD"):
            return b"%b%b\r\n" % (line, render_headers(headers))
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (line, render_headers(headers), len(body), body)

    def _request_line(self, method: str, path: str) -> bytes:
        target = self._prefix + path
        if not (method.isalpha() and path.startswith("/") and target.isascii() and target.isprintable()):
            raise ValueError(f"not a request target: {method!r} {path!r}")
        if " " in target:
            raise ValueError(f"a request target has no spaces: {path!r}")
        line = f"{method} {target} HTTP/1.1\r\n".encode("ascii") + self._host_line
        if len(self._request_lines) < _REQUEST_LINES_MAX:
            self._request_lines[method, path] = line
        return line
