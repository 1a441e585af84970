"""Real sockets with little ceremony: a server around a handler, a raw client, a scripted upstream."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Self

from headrace.http import CheckHead, Handler, HttpLimits, HttpRequest, HttpServer, Responder

FAST = HttpLimits(
    header_seconds_max=0.1,
    body_seconds_max=0.15,
    keep_alive_seconds=0.2,
    write_stall_seconds_max=0.2,
    linger_seconds_max=0.2,
    cancel_seconds_max=1.0,
    sweep_seconds=0.03,
)
WAIT_S = 5.0
"""How long a test waits for what must happen, before it fails."""


def render_refusal(status: int, code: str, message: str) -> tuple[bytes, bytes]:
    body = b'{"error":{"code":"%b","message":"%b"}}' % (code.encode(), message.replace('"', "'").encode())
    return b"content-type: application/json\r\n", body


async def echo(request: HttpRequest, responder: Responder) -> None:
    body = b"%b %b?%b %b" % (request.method.encode(), request.path.encode(), request.query, request.body)
    responder.send(200, [(b"content-type", b"text/plain")], body)


class Errors:
    """An `on_error` hook that remembers, and answers 500 like a gateway would."""

    def __init__(self) -> None:
        self.seen: list[Exception] = []

    def __call__(self, request: HttpRequest, responder: Responder, error: Exception) -> None:
        self.seen.append(error)
        if responder.has_started:
            responder.abort()
        else:
            responder.send(500, b"", str(error).encode())


@contextlib.asynccontextmanager
async def serving(
    handler: Handler = echo,
    *,
    limits: HttpLimits | None = None,
    on_error: Errors | None = None,
    check_head: CheckHead | None = None,
) -> AsyncIterator[HttpServer]:
    """A server on a free port, drained at the end."""
    server = HttpServer(
        handler,
        render_refusal=render_refusal,
        on_error=on_error or Errors(),
        check_head=check_head,
        limits=limits or HttpLimits(),
    )
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.drain(0)


class RawClient:
    """Bytes to a server and back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_reply(self, *, has_body: bool = True) -> tuple[int, dict[bytes, bytes], bytes]:
        """One reply: status, headers, body (chunks joined, or up to EOF)."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = head[:-4].split(b"\r\n")
            headers = dict(line.split(b": ", 1) for line in lines[1:])
            status = int(lines[0].split(b" ")[1])
            if not has_body or status in (100, 204, 304):
                return status, headers, b""
            if b"content-length" in headers:
                body = await self.reader.readexactly(int(headers[b"content-length"]))
            elif headers.get(b"transfer-encoding") == b"chunked":
                body = await self._read_chunks()
            else:
                body = await self.reader.read()
            return status, headers, body

    async def _read_chunks(self) -> bytes:
        body = b""
        while size := int((await self.reader.readline()).strip(), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return body

    async def read_to_end(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(port: int, *, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
    except BaseException:
        sock.close()
        raise
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        client.reset()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def exchange(port: int, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send bytes on a fresh connection, return the first reply."""
    async with connected(port) as client:
        await client.send(data)
        return await client.read_reply()


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Upstream:
    """A model server played by `script`, called once per connection."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_connections = 0
        self.num_ended = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            await self._script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.num_ended += 1
            writer.transport.abort()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next request an upstream gets."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")), 0
    )
    return head, await reader.readexactly(length)


def post(body: bytes, *, path: bytes = b"/x", extra: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n%b" % (path, extra, len(body), body)


def get(path: bytes = b"/x", *, extra: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: a\r\n%b\r\n" % (path, extra)
