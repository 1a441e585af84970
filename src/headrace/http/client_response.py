"""The reply of a model server, taken whole (`read`), by hand (`next_bytes`) or relayed (`pump`).

The connection delivers once per socket read. Whoever is behind stops the reading of that one
connection, so that the model server feels the pressure and no reply piles up here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace import bounds
from headrace.http.errors import UpstreamBroken, UpstreamError

if TYPE_CHECKING:
    from headrace.http.client_connection import UpstreamConnection

_PARTS_MAX = 1024
"""Pieces kept for a consumer that is behind, however small they are."""

Sink = Callable[[bytes], bool]
"""Takes body bytes at once; False means: no more until drained. `Responder.write` is one."""
Drain = Callable[[], Awaitable[None]]
"""Waits until the sink's consumer has caught up. `Responder.drain` is one."""


class ClientResponse:
    """A reply whose head has come. `headers` has lower-case names, repeated ones joined with `, `.

    Use it in a `with` block: leaving before the end closes the connection, which is how the model
    server learns that nobody wants the rest. After the end there is nothing to give back.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_is_behind",
        "_sink",
        "_sink_error",
        "_waiter",
        "has_head",
        "headers",
        "is_complete",
        "parts",
        "status",
    )

    def __init__(self, connection: "UpstreamConnection") -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.has_head = False
        self.is_complete = False
        """Whether the whole body has come; it may still wait here to be read."""
        self._connection = connection
        self.parts: list[bytes] = []
        """Body bytes not taken yet; the connection's parser appends, `deliver` follows."""
        self._error: UpstreamError | None = None
        self._sink: Sink | None = None
        self._sink_error: Exception | None = None
        self._is_behind = False
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Want no more. Before the end of the reply this cuts the connection."""
        self.parts.clear()
        if not self.is_complete:
            self._connection.destroy()

    # --- the consumer's side --------------------------------------------------------------------

    async def read(self, limit: int = bounds.UPSTREAM_REPLY_BYTES_MAX) -> bytes:
        """The rest of the body. Raises UpstreamBroken where it is over `limit` bytes; see `next_bytes`."""
        if self.is_complete and self._error is None and sum(map(len, self.parts)) <= limit:
            return self._take()
        parts: list[bytes] = []
        size = 0
        while data := await self.next_bytes():
            size += len(data)
            if size > limit:
                self.close()
                raise UpstreamBroken(f"{self._connection.name}: the reply is over {limit} bytes")
            parts.append(data)
        return b"".join(parts)

    async def next_bytes(self) -> bytes:
        """What came since the last call, at least one byte; `b""` at the end.

        Raises UpstreamTimedOut or UpstreamBroken, after everything that came before has been given.
        """
        while not self.parts:
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            self._connection.resume()
            await self.wait()
        return self._take()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.next_bytes():
            yield data

    async def pump(self, sink: Sink, drain: Drain) -> None:
        """Relay the body: `sink` gets each socket read's bytes, straight from the read, without a task
        switch; when it says False, reading stops until `drain` is done. Returns at the end of the body.

        What the last read brought is given from this task, so that what the caller writes next leaves
        in the same system call. Raises like `next_bytes`, and whatever `sink` or `drain` raise.
        """
        try:
            while True:
                if self.parts and not sink(self._take()):
                    self._is_behind = True
                if self._sink_error is not None:
                    raise self._sink_error
                if self._error is not None:
                    raise self._error
                if self.is_complete:
                    return
                if self._is_behind:
                    self._is_behind = False
                    await drain()
                if self.parts or self.is_complete or self._error is not None:
                    continue
                self._sink = sink
                self._connection.resume()
                await self.wait()
                self._sink = None
        finally:
            self._sink = None

    # --- the connection's side --------------------------------------------------------------------

    def deliver(self) -> None:
        """A socket read has been parsed and the reply goes on."""
        sink = self._sink
        if sink is None:
            if len(self.parts) > _PARTS_MAX or sum(map(len, self.parts)) > bounds.UPSTREAM_BUFFER_HIGH:
                self._connection.pause()
            self._wake()
            return
        if not self.parts:
            return
        try:
            keeps_up = sink(self._take())
        except Exception as error:  # noqa: BLE001 - carried to the task in `pump`, like a Future does
            self._sink_error = error
            keeps_up = False
        if not keeps_up:
            self._is_behind = True
            self._sink = None
            self._connection.pause()
            self._wake()

    def finish(self) -> None:
        """The whole reply has come."""
        self.is_complete = True
        self._wake()

    def fail(self, error: UpstreamError) -> None:
        """Nothing more will come."""
        if not self.is_complete and self._error is None:
            self._error = error
            self._wake()

    async def wait(self) -> None:
        """Until the connection has something to say. Before the head, raises what it failed with."""
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self.has_head:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        parts = self.parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return data
