"""The admin process's side of the private socket: one connection, many requests under way.

Connects when first needed and again after a loss. A request that was under way when the connection broke
is not repeated: whether it was carried out is not known, and the caller has to hear that.
"""

import asyncio
from itertools import count
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec

from headrace.core import messages as m
from headrace.core.failure import ControlFailure
from headrace.errors import HeadraceError, ProtocolError
from headrace.framing import FrameSplitter, FrameWriter

REQUEST_SECONDS_MAX: Final = 10.0
REQUESTS_UNDER_WAY_MAX: Final = 128

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(m.ReplyEnvelope)

R = TypeVar("R", bound=m.Reply)


class CoreUnavailable(HeadraceError):
    """The core did not answer: it is down, restarting or stuck."""


class CoreClient:
    """Asks the core. Belongs to one event loop."""

    def __init__(self, path: Path, *, timeout_s: float = REQUEST_SECONDS_MAX) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._numbers = count(1)
        self._connection: _ClientConnection | None = None
        self._connecting = asyncio.Lock()

    async def call(self, request: m.Request, expected: type[R], *, actor: str = "") -> R:
        """The reply, which has to be of the type `expected`.

        Raises `ControlFailure` for a `Failure`, `CoreUnavailable` without an answer in `timeout_s`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connected()
                reply = await connection.ask(m.Envelope(next(self._numbers), request, actor))
        except (OSError, TimeoutError) as error:
            raise CoreUnavailable(f"the core does not answer: {error or 'too slow'}") from error
        if isinstance(reply, m.Failure):
            raise ControlFailure(reply.status, reply.code, reply.message, reply.param)
        if not isinstance(reply, expected):
            raise CoreUnavailable(f"the core answered with {type(reply).__name__}")
        return reply

    async def close(self) -> None:
        """Closes the connection; requests under way fail."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _connected(self) -> "_ClientConnection":
        async with self._connecting:
            if self._connection is None or self._connection.is_lost:
                loop = asyncio.get_running_loop()
                _, self._connection = await loop.create_unix_connection(
                    _ClientConnection, path=str(self._path)
                )
            return self._connection


class _ClientConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self._frames = FrameSplitter()
        self._writer = FrameWriter()
        self._waiting: dict[int, asyncio.Future[m.Reply]] = {}
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    async def ask(self, envelope: m.Envelope) -> m.Reply:
        """Raises `OSError` when the connection is lost, `CoreUnavailable` when too much is under way."""
        assert self._transport is not None
        if len(self._waiting) >= REQUESTS_UNDER_WAY_MAX:
            raise CoreUnavailable(f"{REQUESTS_UNDER_WAY_MAX} requests to the core are under way already")
        if self.is_lost:
            raise ConnectionResetError("the connection to the core was lost")
        reply: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[envelope.number] = reply
        try:
            self._transport.write(self._writer.frame(_encoder.encode(envelope)))
            return await reply
        finally:
            self._waiting.pop(envelope.number, None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            for payload in self._frames.feed(data):
                envelope = _decoder.decode(payload)
                reply = self._waiting.get(envelope.number)
                if reply is not None and not reply.done():
                    reply.set_result(envelope.reply)
        except (ProtocolError, msgspec.DecodeError):
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(ConnectionResetError("the connection to the core was lost"))
