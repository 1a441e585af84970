"""The core's side of the private socket: answers what the admin process asks.

A Unix socket with mode 0600, made so before it listens. What crosses a bound (frame size, requests under
way, connections) or the protocol ends that one connection; the core and the other connections go on.
"""

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec
import structlog

from headrace.core import messages as m
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.errors import ProtocolError, SetupError
from headrace.framing import FrameSplitter, FrameWriter
from headrace.identity import InvalidKey
from headrace.ledger.records import OperationRecord
from headrace.store.errors import StoreUnavailable

CONNECTIONS_MAX: Final = 16
REQUESTS_UNDER_WAY_MAX: Final = 256
"""For each connection; the admin process has far fewer."""
SOCKET_PATH_BYTES_MAX: Final = 107

_log = structlog.get_logger("headrace.control")
_decoder = msgspec.msgpack.Decoder(m.Envelope)
_encoder = msgspec.msgpack.Encoder()


class ControlServer:
    """Serves the directory, and what the callables do, to the admin process."""

    def __init__(
        self,
        directory: Directory,
        *,
        list_workers: Callable[[], Sequence[m.WorkerView]],
        flush_ledger: Callable[[], Awaitable[None]],
        refund: Callable[[str, str, str], Awaitable[OperationRecord]],
        list_models: Callable[[], list[m.ModelView]],
        list_queues: Callable[[str | None, int], list[m.QueueView]],
        update_model: Callable[[str, m.ModelChanges, str], m.ModelView],
    ) -> None:
        """`refund` gets request id, reason and actor (`core.refunds`), `list_queues` a model or None and how many
        requests of each."""
        self._directory = directory
        self._list_workers = list_workers
        self._flush_ledger = flush_ledger
        self._refund = refund
        self._list_models = list_models
        self._list_queues = list_queues
        self._update_model = update_model
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._connections: set[_Connection] = set()

    async def start(self, path: Path) -> None:
        """Listens on `path`, replacing a socket that a dead process left. Raises `SetupError`."""
        listener = _listener(path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=listener)
        self._path = path

    async def stop(self) -> None:
        """Closes the socket and all connections; requests under way get no answer."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()
        assert self._path is not None
        self._path.unlink(missing_ok=True)
        self._server = None

    def connected(self, connection: "_Connection") -> bool:
        """Whether there is room for one more."""
        if len(self._connections) >= CONNECTIONS_MAX:
            return False
        self._connections.add(connection)
        return True

    def disconnected(self, connection: "_Connection") -> None:
        """The connection is gone."""
        self._connections.discard(connection)

    async def answer(self, request: m.Request, actor: str) -> m.Reply:
        """Carries out one request. What goes wrong on purpose comes back as `Failure`."""
        try:
            match request:
                case m.FlushLedger():
                    await self._flush_ledger()
                    return m.Done()
                case m.RefundOperation(request_id=request_id, reason=reason):
                    return m.OperationReply(await self._refund(request_id, reason, actor))
                case m.ListWorkers():
                    return m.WorkersReply(list(self._list_workers()))
                case m.ListModels():
                    return m.ModelsReply(self._list_models())
                case m.ListQueues(model=wanted, limit=limit):
                    return m.QueuesReply(self._list_queues(wanted, limit))
                case m.UpdateModel(id=model_id, changes=changes):
                    return m.ModelsReply([self._update_model(model_id, changes, actor)])
                case _:
                    return self._ask_directory(request, actor)
        except ControlFailure as failure:
            return failure.as_message()
        except InvalidKey:
            return m.Failure(status=401, code="invalid_key", message="the key is not accepted")
        except StoreUnavailable as error:
            return m.Failure(status=503, code="store_unavailable", message=str(error))

    def _ask_directory(self, request: m.Request, actor: str) -> m.Reply:
        directory = self._directory
        match request:
            case m.CheckAdminKey(jti=jti):
                directory.authorize_admin(jti)
                return m.Done()
            case m.CreateTenant(id=tenant_id, name=name):
                return m.TenantReply(
                    directory.create_tenant(
                        tenant_id,
                        name,
                        cache=request.cache,
                        shared_prefix=request.shared_prefix,
                        sharing=request.sharing,
                        limits=request.limits,
                        levels=request.levels,
                        actor=actor,
                    )
                )
            case m.UpdateTenant(id=tenant_id):
                return m.TenantReply(
                    directory.update_tenant(
                        tenant_id,
                        name=request.name,
                        status=request.status,
                        cache=request.cache,
                        shared_prefix=request.shared_prefix,
                        sharing=request.sharing,
                        limits=request.limits,
                        levels=request.levels,
                        actor=actor,
                    )
                )
            case m.GetTenant(id=tenant_id):
                return m.TenantReply(directory.get_tenant(tenant_id))
            case m.ListTenants(after=after, limit=limit):
                return m.TenantsReply(*directory.list_tenants(after=after, limit=limit))
            case m.CreateKey():
                return m.IssuedKeyReply(directory.create_key(**msgspec.structs.asdict(request), actor=actor))
            case m.RevokeKey(jti=jti):
                return m.KeyReply(directory.revoke_key(jti, actor=actor))
            case m.ListKeys(tenant=tenant, after=after, limit=limit):
                return m.KeysReply(*directory.list_keys(tenant=tenant, after=after, limit=limit))
            case _:
                raise AssertionError(f"no answer for {type(request).__name__}")


class _Connection(asyncio.Protocol):
    """One client. Each request is a task, since a flush waits for the disk and others need not."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._frames = FrameSplitter()
        self._writer = FrameWriter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        if not self._server.connected(self):
            _log.warning("control_connection_refused", limit=CONNECTIONS_MAX)
            self.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._start(_decoder.decode(payload))
        except (ProtocolError, msgspec.DecodeError) as error:
            _log.warning("control_protocol_error", error=str(error))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.disconnected(self)
        for task in self._tasks:
            task.cancel()

    def pause_writing(self) -> None:
        """A client that does not read its answers is asked nothing more until it does."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _start(self, envelope: m.Envelope) -> None:
        if len(self._tasks) >= REQUESTS_UNDER_WAY_MAX:
            raise ProtocolError(f"more than {REQUESTS_UNDER_WAY_MAX} requests under way")
        task = asyncio.get_running_loop().create_task(self._answer(envelope))
        self._tasks.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        """A request that fails in a way nobody foresaw ends the connection, so its client need not wait."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("control_request_failed", exc_info=error)
            self.abort()

    async def _answer(self, envelope: m.Envelope) -> None:
        assert self._transport is not None
        reply = await self._server.answer(envelope.request, envelope.actor)
        if not self._transport.is_closing():
            self._transport.write(
                self._writer.frame(_encoder.encode(m.ReplyEnvelope(envelope.number, reply)))
            )


def _listener(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise SetupError(f"the socket path {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
        listener.bind(os.fspath(path))
        path.chmod(0o600)  # before anybody can connect: that takes listen()
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SetupError(f"cannot listen on {path}: {error}") from error
    return listener
