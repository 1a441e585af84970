"""The private socket between core and admin process: real sockets, good and bad peers."""

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bounds import FRAME_BYTES_MAX
from headrace.clock import SystemClock
from headrace.config.limits import LevelChanges, Limits
from headrace.core import control
from headrace.core import messages as m
from headrace.core.client import CoreClient, CoreUnavailable
from headrace.core.control import ControlServer
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.errors import SetupError
from headrace.framing import FrameSplitter, FrameWriter
from headrace.ledger.records import OperationRecord
from headrace.store.errors import StoreUnavailable
from tests.admin.admin_world import no_model

pytestmark = pytest.mark.asyncio

WORKER = m.WorkerView(
    id="w0", model="smol", kind="embedded", status="ready", address="x", slots=4, running=1, restarts=0
)


async def no_operation(request_id: str, reason: str, actor: str) -> OperationRecord:
    raise ControlFailure(404, "operation_not_found", f"{request_id}: {reason} ({actor})")


def no_queues(model_id: str | None, limit: int) -> list[m.QueueView]:
    """There is no core behind this server, so nobody waits."""
    if model_id is not None:
        raise ControlFailure(404, "model_not_found", f"there is no model {model_id!r} with {limit} requests")
    return []


class World:
    """A directory behind a server on a real socket."""

    def __init__(self, folder: Path) -> None:
        self.directory = Directory.open(folder / "data", SystemClock())
        self.path = folder / "core.sock"
        self.flushed = 0
        self.flush: Callable[[], Any] = self._flush
        self.server = ControlServer(
            self.directory,
            list_workers=lambda: [WORKER],
            flush_ledger=lambda: self.flush(),
            refund=no_operation,
            list_models=list,
            update_model=no_model,
            list_queues=no_queues,
        )
        self.client = CoreClient(self.path, timeout_s=5)

    async def _flush(self) -> None:
        self.flushed += 1


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.server.start(world.path)
    yield world
    await world.client.close()
    await world.server.stop()
    world.directory.close()


async def refusal(client: CoreClient, request: m.Request) -> ControlFailure:
    with pytest.raises(ControlFailure) as failure:
        await client.call(request, m.Done)
    return failure.value


async def test_every_request_is_answered(world: World) -> None:
    call = world.client.call
    made = await call(m.CreateTenant(id="demo", name="Demo"), m.TenantReply, actor="key_a")
    assert made.tenant.name == "Demo"
    updated = await call(m.UpdateTenant(id="demo", status="disabled"), m.TenantReply)
    assert (updated.tenant.name, updated.tenant.status) == ("Demo", "disabled")
    assert (await call(m.UpdateTenant(id="demo", name=None), m.TenantReply)).tenant.name is None
    assert (await call(m.GetTenant(id="demo"), m.TenantReply)).tenant.version == 3
    assert [tenant.id for tenant in (await call(m.ListTenants(), m.TenantsReply)).tenants] == ["demo"]
    levels = LevelChanges(departments={"sales": {"tpm": 5}}, user_limits={"rps": 1.5})
    updated = await call(m.UpdateTenant(id="demo", levels=levels), m.TenantReply)
    assert updated.tenant.departments == {"sales": Limits(tpm=5)}
    assert updated.tenant.user_limits == Limits(rps=1.5)
    update = m.UpdateTenant(id="demo", cache="prefix_only", shared_prefix="house")
    updated = await call(update, m.TenantReply)
    assert (updated.tenant.cache, updated.tenant.shared_prefix) == ("prefix_only", "house")
    updated = await call(m.UpdateTenant(id="demo", shared_prefix=None), m.TenantReply)
    assert (updated.tenant.cache, updated.tenant.shared_prefix) == ("prefix_only", None)
    cached = await call(m.CreateTenant(id="cached", cache="off", shared_prefix="house"), m.TenantReply)
    assert (cached.tenant.cache, cached.tenant.shared_prefix) == ("off", "house")
    assert world.directory.cache_of("cached") == ("off", "house")
    create = m.CreateKey(tenant="demo", department="sales", scopes=("chat:read",))
    issued = (await call(create, m.IssuedKeyReply)).issued
    assert (issued.view.scopes, issued.view.department) == (("chat:read",), "sales")
    assert (await call(m.ListKeys(tenant="demo"), m.KeysReply)).keys == [issued.view]
    revoked = await call(m.RevokeKey(jti=issued.view.jti), m.KeyReply)
    assert revoked.key.revoked_ts is not None
    admin = world.directory.create_admin_key(actor="me").view.jti
    assert await call(m.CheckAdminKey(jti=admin), m.Done) == m.Done()
    assert (await call(m.ListWorkers(), m.WorkersReply)).workers == [WORKER]
    assert (await call(m.ListQueues(), m.QueuesReply)).queues == []
    with pytest.raises(ControlFailure, match="'x' with 7"):
        await call(m.ListQueues(model="x", limit=7), m.QueuesReply)
    assert await call(m.FlushLedger(), m.Done) == m.Done()
    assert world.flushed == 1
    assert world.directory._store.changes()[1][1].actor == "key_a"


async def test_the_largest_tenant_passes(world: World) -> None:
    call = world.client.call
    world.directory._store._connection.execute("PRAGMA synchronous=OFF")
    everything: Any = dict.fromkeys(("rps", "concurrency", "streams"), 1_000_000)
    everything |= dict.fromkeys(("tpm", "max_prompt_tokens", "max_total_tokens"), 10**12)
    everything["gpu_memory_gb"] = 999_999.123456789
    levels = LevelChanges(
        departments={f"{number:0128}": everything for number in range(1000)},
        users={f"{number:0256}": everything for number in range(10_000)},
        model_limits={f"{number:0256}": everything for number in range(256)},
    )
    for tenant in ("a", "b"):
        made = (await call(m.CreateTenant(id=tenant, levels=levels), m.TenantReply)).tenant
    assert (len(made.departments), len(made.users), len(made.model_limits)) == (1000, 10_000, 256)
    page = await call(m.ListTenants(), m.TenantsReply)
    assert ([tenant.id for tenant in page.tenants], page.has_more) == (["a"], True)
    update = m.UpdateTenant(id="a", levels=LevelChanges(users={f"{9_999:0256}": None}))
    assert len((await call(update, m.TenantReply)).tenant.users) == 9_999


async def test_what_cannot_be_done_comes_back_as_a_failure(world: World) -> None:
    refused = await refusal(world.client, m.GetTenant(id="x"))
    assert (refused.status, refused.code) == (404, "tenant_not_found")
    refused = await refusal(world.client, m.RefundOperation(request_id="x", reason="y"))
    assert (refused.status, refused.message) == (404, "x: y ()")
    refused = await refusal(world.client, m.CheckAdminKey(jti="x"))
    assert (refused.status, refused.code) == (401, "invalid_key")

    async def full() -> None:
        raise StoreUnavailable("the disk is full")

    world.flush = full
    refused = await refusal(world.client, m.FlushLedger())
    assert (refused.status, refused.code) == (503, "store_unavailable")


async def test_answers_come_in_any_order(world: World) -> None:
    go_on = asyncio.Event()

    async def slow() -> None:
        await go_on.wait()

    world.flush = slow
    flushing = asyncio.create_task(world.client.call(m.FlushLedger(), m.Done))
    await asyncio.sleep(0)
    replies = await asyncio.gather(
        *(world.client.call(m.CreateTenant(id=f"t{i}"), m.TenantReply) for i in range(50))
    )
    assert [reply.tenant.id for reply in replies] == [f"t{i}" for i in range(50)]
    assert not flushing.done()
    go_on.set()
    assert await flushing == m.Done()


async def test_only_the_owner_can_connect(world: World) -> None:
    assert stat.S_IMODE(os.stat(world.path).st_mode) == 0o600


async def raw(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(world.path))


BAD = {
    "oversized frame": struct.pack(">II", FRAME_BYTES_MAX + 1, 0),
    "no msgpack": FrameWriter().frame(b"\xc1"),
    "no envelope": FrameWriter().frame(msgspec.msgpack.encode({"a": 1})),
    "unknown request": FrameWriter().frame(msgspec.msgpack.encode([1, {"type": "DropEverything"}, ""])),
    "wrong types": FrameWriter().frame(msgspec.msgpack.encode([1, {"type": "GetTenant", "id": 5}, ""])),
    "a frame is missing": struct.pack(">II", 1, 1) + b"x",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_frame_ends_that_connection_only(world: World, name: str) -> None:
    await world.client.call(m.ListTenants(), m.TenantsReply)
    reader, writer = await raw(world)
    writer.write(BAD[name])
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    assert (await world.client.call(m.ListTenants(), m.TenantsReply)).tenants == []


async def test_frames_may_come_in_any_pieces(world: World) -> None:
    reader, writer = await raw(world)
    frames_out = FrameWriter()
    requests = b"".join(
        frames_out.frame(msgspec.msgpack.encode(m.Envelope(number, m.ListTenants()))) for number in (1, 2)
    )
    for position in range(len(requests)):
        writer.write(requests[position : position + 1])
        await asyncio.sleep(0)
    frames = FrameSplitter()
    payloads: list[bytes] = []
    while len(payloads) < 2:
        payloads += frames.feed(await reader.read(10))
    assert {msgspec.msgpack.decode(payload)[0] for payload in payloads} == {1, 2}
    writer.close()
    await writer.wait_closed()


async def test_requests_under_way_and_connections_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "REQUESTS_UNDER_WAY_MAX", 3)
    never = asyncio.Event()
    world.flush = never.wait
    reader, writer = await raw(world)
    frames = FrameWriter()
    writer.write(
        b"".join(frames.frame(msgspec.msgpack.encode(m.Envelope(n, m.FlushLedger()))) for n in range(4))
    )
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    monkeypatch.setattr(control, "CONNECTIONS_MAX", 1)
    await world.client.call(m.ListTenants(), m.TenantsReply)
    reader, writer = await raw(world)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    assert (await world.client.call(m.ListTenants(), m.TenantsReply)).tenants == []


async def test_an_unforeseen_error_ends_the_connection_not_the_core(world: World) -> None:
    async def broken() -> None:
        raise RuntimeError("a bug")

    world.flush = broken
    with pytest.raises(CoreUnavailable):
        await world.client.call(m.FlushLedger(), m.Done)
    assert (await world.client.call(m.ListTenants(), m.TenantsReply)).tenants == []


async def test_the_client_waits_no_longer_than_it_was_told(world: World) -> None:
    never = asyncio.Event()
    world.flush = never.wait
    client = CoreClient(world.path, timeout_s=0.05)
    with pytest.raises(CoreUnavailable):
        await client.call(m.FlushLedger(), m.Done)
    assert (await client.call(m.ListTenants(), m.TenantsReply)).tenants == []
    await client.close()


async def test_the_client_connects_again_when_the_core_is_back(world: World) -> None:
    await world.client.call(m.CreateTenant(id="demo"), m.TenantReply)
    never = asyncio.Event()
    world.flush = never.wait
    under_way = asyncio.create_task(world.client.call(m.FlushLedger(), m.Done))
    await asyncio.sleep(0.01)
    await world.server.stop()
    with pytest.raises(CoreUnavailable):
        await under_way
    with pytest.raises(CoreUnavailable):
        await world.client.call(m.ListTenants(), m.TenantsReply)
    await world.server.start(world.path)
    assert (await world.client.call(m.GetTenant(id="demo"), m.TenantReply)).tenant.id == "demo"


async def test_a_reply_of_another_type_is_no_answer(world: World) -> None:
    with pytest.raises(CoreUnavailable, match="TenantsReply"):
        await world.client.call(m.ListTenants(), m.Done)


async def test_a_socket_left_by_a_dead_process_is_replaced(world: World, tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with contextlib.closing(__import__("socket").socket(1, 1)) as left:
        left.bind(str(path))
    server = ControlServer(
        world.directory,
        list_workers=list,
        flush_ledger=world._flush,
        refund=no_operation,
        list_models=list,
        update_model=no_model,
        list_queues=no_queues,
    )
    await server.start(path)
    client = CoreClient(path)
    assert (await client.call(m.ListWorkers(), m.WorkersReply)).workers == []
    await client.close()
    await server.stop()
    assert not path.exists()


async def test_what_is_no_socket_is_left_alone(world: World, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    server = ControlServer(
        world.directory,
        list_workers=list,
        flush_ledger=world._flush,
        refund=no_operation,
        list_models=list,
        update_model=no_model,
        list_queues=no_queues,
    )
    with pytest.raises(SetupError, match="cannot listen"):
        await server.start(path)
    assert path.read_text() == "data"
    with pytest.raises(SetupError, match="107"):
        await server.start(tmp_path / ("x" * 100))
