"""Thousands of chats at the same moment, each on a connection of its own."""

import asyncio
import json
import resource
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CONNECTING_MAX = 100
"""Connections being made at once; the server's backlog is no part of what is tried."""
SPARE_FILES = 300
SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Heard:
    """A reply, to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_answered(self) -> bool:
        """A whole body, or a stream with its end mark."""
        is_stream = self.headers["content-type"].startswith("text/event-stream")
        return self.status == 200 and (b"data: [DONE]" in self.body if is_stream else b"usage" in self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def allow_files(number: int) -> None:
    """Let this process, and the servers that it starts from now on, have so many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + SPARE_FILES
    if soft < wanted:
        assert hard == resource.RLIM_INFINITY or hard >= wanted, f"needs `ulimit -Hn {wanted}`, is {hard}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def crowd(url: str, *, key: str, number: int, body: dict[str, Any]) -> list[Heard]:
    """Connect so many clients, then let all send the same chat at once."""
    return asyncio.run(_crowd(url, key, number, json.dumps(body).encode()))


async def _crowd(url: str, key: str, number: int, body: bytes) -> list[Heard]:
    address = urlsplit(url)
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    connecting = asyncio.Semaphore(CONNECTING_MAX)
    gate = asyncio.Barrier(number)

    async def one() -> Heard:
        async with connecting:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
        await gate.wait()
        writer.write(request)
        try:
            return _heard(await reader.read(-1))
        finally:
            writer.close()

    async with asyncio.timeout(SECONDS_MAX):
        return list(await asyncio.gather(*(one() for _ in range(number))))


def _heard(data: bytes) -> Heard:
    head, _, body = data.partition(b"\r\n\r\n")
    line, *fields = head.decode().split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields)
    return Heard(int(line.split()[1]), {name.lower(): value for name, value in headers.items()}, body)
