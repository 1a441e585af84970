"""The admin process: starts, ends with its parent, lives without the core and dies without harm."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.admin.admin_world import AdminWorld


@pytest.fixture
def own(tmp_path: Path) -> Iterator[AdminWorld]:
    """A world of its own, to be damaged."""
    with AdminWorld(tmp_path) as world:
        yield world


def test_it_ends_with_its_parent(world: AdminWorld) -> None:
    process, port = world.start_admin()
    assert httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).status_code == 200
    assert world.stop_admin(process) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)


def test_it_ends_on_sigterm(world: AdminWorld) -> None:
    process, port = world.start_admin()
    assert port > 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) in (0, -signal.SIGTERM)
    world.stop_admin(process)


def test_a_port_in_use_is_said(world: AdminWorld) -> None:
    process, port = world.start_admin(port=world.port)
    assert port == 0
    assert world.stop_admin(process) == 2
    assert f"port {world.port}" in world.answer["error"]
    assert "--admin-port" in world.answer["error"]


def test_bad_public_keys_are_said(world: AdminWorld) -> None:
    process, port = world.start_admin(public_keys={"a": "junk"})
    assert port == 0
    assert world.stop_admin(process) == 2


def test_without_the_core_it_says_503_and_recovers(own: AdminWorld) -> None:
    assert own.http.get("/admin/v1/tenants").status_code == 200

    async def stop() -> None:
        await own.server.stop()

    async def start() -> None:
        await own.server.start(own.socket)

    own.on_core(stop)
    response = own.http.get("/admin/v1/tenants")
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == "1"
    assert response.json()["code"] == "core_unavailable"
    assert own.http.get("/healthz").status_code == 200
    own.on_core(start)
    assert own.http.get("/admin/v1/tenants").status_code == 200


def test_killed_it_leaves_the_core_as_it_was(own: AdminWorld) -> None:
    own.http.post("/admin/v1/tenants", json={"id": "demo"})
    os.kill(own.process.pid, signal.SIGKILL)
    own.stop_admin(own.process)
    own.process, port = own.start_admin()
    reply = httpx.get(
        f"http://127.0.0.1:{port}/admin/v1/tenants/demo",
        headers={"authorization": f"Bearer {own.key}"},
        trust_env=False,
    )
    assert reply.json()["id"] == "demo"


def test_a_client_that_leaves_in_the_middle_of_a_body_harms_nobody(own: AdminWorld) -> None:
    with socket.create_connection(("127.0.0.1", own.port), timeout=10) as connection:
        head = f"POST /admin/v1/tenants HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {own.key}\r\n"
        connection.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
    assert own.http.get("/admin/v1/tenants").json()["data"] == []
