"""The client against scripted upstreams: pool, repeating, framing, pressure, time limits, departures."""

import asyncio
import ssl

import pytest

from headrace import bounds
from headrace.errors import ConfigError, HeadraceError
from headrace.http import (
    HttpClient,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimedOut,
    UpstreamUnreachable,
)
from tests.http.http_harness import Upstream, eventually, read_request

pytestmark = pytest.mark.asyncio

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


def replying(*replies: bytes, then_close: bool = False):  # type: ignore[no-untyped-def]
    """An upstream that answers each request of a connection with the next reply."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            await read_request(reader)
            writer.write(reply)
            await writer.drain()
        if then_close:
            writer.close()
            await writer.wait_closed()
        else:
            await reader.read()

    return script


async def reply_of(client: HttpClient, *, method: str = "POST", body: bytes = b"{}") -> tuple[int, bytes]:
    with await client.request(method, "/x", b"", body) as response:
        return response.status, await response.read()


async def test_request_as_the_upstream_sees_it() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(OK)

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url + "/v1/")
        with await client.request("POST", "/chat?a=b", [(b"x-one", b"1")], b"body") as response:
            assert (response.status, response.headers) == (200, {b"content-length": b"2"})
            assert await response.read() == b"hi"
        with await client.request("GET", "/models") as response:
            assert await response.read() == b"hi"
        client.close()
    host = b"host: 127.0.0.1:%d\r\n" % upstream.port
    assert seen == [
        (b"POST /v1/chat?a=b HTTP/1.1\r\n%bx-one: 1\r\ncontent-length: 4\r\n\r\n" % host, b"body"),
        (b"GET /v1/models HTTP/1.1\r\n%b\r\n" % host, b""),
    ]


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://", "a:80", "http://user:pw@a", "http://a/?b", "http://a:x", "http://a:99999"]
)
async def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpClient(url)


@pytest.mark.parametrize("path", ["x", "/a b", "/a\r\nx: y", "/ü"])
async def test_bad_paths_are_our_bug(path: str) -> None:
    client = HttpClient("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="target"):
        await client.request("GET", path)
    client.close()


# --- the pool ----------------------------------------------------------------------------------


async def test_connections_are_reused() -> None:
    async with Upstream(replying(*[OK] * 10)) as upstream:
        client = HttpClient(upstream.url)
        for _ in range(5):
            assert await reply_of(client) == (200, b"hi")
        assert (upstream.num_connections, client.num_connections, client.num_idle) == (1, 1, 1)
        assert await asyncio.gather(*[reply_of(client) for _ in range(4)]) == [(200, b"hi")] * 4
        assert upstream.num_connections == 4
        assert client.num_idle == 4
        client.close()
        await eventually(lambda: client.num_connections == 0)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
        OK + b"x",
    ],
)
async def test_doubtful_connections_are_not_reused(reply: bytes) -> None:
    async with Upstream(replying(reply, reply)) as upstream:
        client = HttpClient(upstream.url)
        for n in (1, 2):
            try:
                assert await reply_of(client) == (200, b"hi")
            except UpstreamBroken:
                assert reply.startswith(OK)  # too much came: what is the reply's is not known any more
            assert upstream.num_connections == n
            assert client.num_idle == 0
        client.close()


async def test_bytes_out_of_turn_destroy_an_idle_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        await reader.read()

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url)
        assert await reply_of(client) == (200, b"hi")
        await eventually(lambda: client.num_connections == 0)
        assert await reply_of(client) == (200, b"hi")
        client.close()


async def test_idle_connections_are_closed_after_a_while() -> None:
    async with Upstream(replying(OK)) as upstream:
        client = HttpClient(upstream.url, keep_alive_s=0.05, sweep_seconds=0.02)
        await reply_of(client)
        await eventually(lambda: client.num_connections == 0)
        await eventually(lambda: upstream.num_ended == 1)
        client.close()


async def test_at_most_so_many_connections() -> None:
    release = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            await release.wait()
            writer.write(OK)

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url, connections_max=2)
        requests = [asyncio.create_task(reply_of(client)) for _ in range(8)]
        await eventually(lambda: upstream.num_connections == 2)
        requests[5].cancel()
        release.set()
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert [r == (200, b"hi") for r in results].count(True) == 7
        assert upstream.num_connections == 2
        assert client.num_connections == client.num_idle == 2
        client.close()


async def test_a_place_freed_by_a_broken_connection_goes_to_who_waits() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.sleep(0.02)

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url, connections_max=1)
        results = await asyncio.gather(*[reply_of(client) for _ in range(4)], return_exceptions=True)
        assert [type(r) for r in results] == [UpstreamBroken] * 4
        assert upstream.num_connections == 4
        await eventually(lambda: client.num_connections == 0)
        client.close()


async def test_waiting_for_a_connection_ends() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url, connections_max=1, connect_timeout_s=0.1)
        first = asyncio.create_task(reply_of(client))
        await eventually(lambda: upstream.num_connections == 1)
        with pytest.raises(UpstreamTimedOut, match="all 1 connections"):
            await reply_of(client)
        client.close()
        with pytest.raises(UpstreamError):
            await first


# --- repeating ---------------------------------------------------------------------------------


async def stale_after_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers once; reads the second request and closes without a byte."""
    await read_request(reader)
    writer.write(OK)
    await read_request(reader)


async def test_a_stale_connection_is_replaced_once() -> None:
    async with Upstream(stale_after_one) as upstream:
        client = HttpClient(upstream.url)
        for n in range(1, 5):
            assert await reply_of(client) == (200, b"hi")
            assert upstream.num_connections == n
        client.close()


async def test_no_repeating_where_it_would_do_harm() -> None:
    async with Upstream(stale_after_one) as upstream:
        client = HttpClient(upstream.url)
        await reply_of(client)
        with pytest.raises(UpstreamBroken, match="ended before a reply"):
            await client.request("POST", "/x", b"", b"{}", is_repeatable=False)
        assert upstream.num_connections == 1
        client.close()


async def test_no_repeating_on_a_fresh_connection_nor_inside_a_reply() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if upstream.num_connections > 1:
            writer.write(OK)
            await read_request(reader)
            writer.write(b"H")
            await writer.drain()

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url)
        with pytest.raises(UpstreamBroken):
            await reply_of(client)
        assert upstream.num_connections == 1
        assert await reply_of(client) == (200, b"hi")
        with pytest.raises(UpstreamBroken, match="inside the reply"):
            await reply_of(client)
        assert upstream.num_connections == 2
        client.close()


async def test_what_was_never_sent_is_always_sent_again() -> None:
    async with Upstream(replying(OK, OK)) as upstream:
        client = HttpClient(upstream.url)
        await reply_of(client)
        (idle,) = client._idle
        idle._transport.close()  # seen closing, not yet lost
        with await client.request("POST", "/x", is_repeatable=False) as response:
            assert await response.read() == b"hi"
        assert upstream.num_connections == 2
        client.close()


async def test_closing_while_connecting() -> None:
    async with Upstream(replying(OK)) as upstream:
        client = HttpClient(upstream.url)
        request = asyncio.create_task(reply_of(client))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(UpstreamError):
            await request
        await eventually(lambda: client.num_connections == 0)


async def test_cancelling_while_connecting_gives_the_place_back() -> None:
    async with Upstream(replying(OK)) as upstream:
        client = HttpClient(upstream.url, connections_max=1)
        for turns in range(12):
            request = asyncio.create_task(reply_of(client))
            for _ in range(turns):
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.wait([request])
        await eventually(lambda: client.num_connections == client.num_idle)
        assert await reply_of(client) == (200, b"hi")
        client.close()


# --- framing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (OK, b"hi"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n3;a=b\r\n ho\r\n0\r\nx: y\r\n\r\n",
            b"hi ho",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nup to the end", b"up to the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: a\r\n\r\n" + OK, b"hi"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
async def test_framings(reply: bytes, body: bytes, is_split: bool) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in [reply[i : i + 1] for i in range(len(reply))] if is_split else [reply]:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url)
        with await client.request("POST", "/x") as response:
            assert await response.read() == body
            assert b"link" not in response.headers
        with await client.request("POST", "/x") as response:
            assert b"".join([data async for data in response]) == body
        with await client.request("POST", "/x") as response:
            got: list[bytes] = []
            await response.pump(lambda data: got.append(data) or True, eternity)  # type: ignore[func-returns-value]
            assert b"".join(got) == body
        client.close()


async def eternity() -> None:
    await asyncio.get_running_loop().create_future()


async def test_head_request() -> None:
    async with Upstream(replying(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")) as upstream:
        client = HttpClient(upstream.url)
        with await client.request("HEAD", "/x") as response:
            assert response.headers[b"content-length"] == b"5"
            assert await response.read() == b""
        client.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000,
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"",
    ],
)
async def test_broken_replies(reply: bytes) -> None:
    async with Upstream(replying(reply, then_close=True)) as upstream:
        client = HttpClient(upstream.url)
        with pytest.raises(UpstreamBroken, match=upstream.url):
            await reply_of(client)
        await eventually(lambda: client.num_connections == 0)
        client.close()


async def test_what_came_before_the_break_is_given_first() -> None:
    reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    async with Upstream(replying(reply, then_close=True)) as upstream:
        client = HttpClient(upstream.url)
        with await client.request("POST", "/x") as response:
            assert await response.next_bytes() == b"abc"
            with pytest.raises(UpstreamBroken):
                await response.next_bytes()
        got: list[bytes] = []
        with await client.request("POST", "/x") as response, pytest.raises(UpstreamBroken):
            await response.pump(lambda data: got.append(data) or True, eternity)  # type: ignore[func-returns-value]
        assert got == [b"abc"]
        client.close()


async def test_read_has_a_limit() -> None:
    async with Upstream(
        replying(b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n" + b"a" * 300_000)
    ) as upstream:
        client = HttpClient(upstream.url)
        response = await client.request("POST", "/x")
        with response, pytest.raises(UpstreamBroken, match="over 1000 bytes"):
            await response.read(1000)
        with await client.request("POST", "/x") as response:
            assert len(await response.read(300_000)) == 300_000
        client.close()


# --- reaching it -------------------------------------------------------------------------------


async def test_unreachable() -> None:
    async with Upstream(replying()) as upstream:
        pass
    client = HttpClient(upstream.url)
    with pytest.raises(UpstreamUnreachable, match=upstream.url):
        await reply_of(client)
    assert client.num_connections == 0
    client.close()
    with pytest.raises(UpstreamUnreachable, match="closed"):
        await reply_of(client)


async def test_unknown_host() -> None:
    client = HttpClient("http://no-such-host.invalid")
    with pytest.raises(UpstreamUnreachable, match="no-such-host"):
        await reply_of(client)
    client.close()


async def test_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await eternity()

    client = HttpClient("http://127.0.0.1:1", connect_timeout_s=0.02)
    loop = asyncio.get_running_loop()
    client._loop = _Loop(loop, never)  # type: ignore[assignment]
    with pytest.raises(UpstreamTimedOut, match="no connection"):
        await reply_of(client)
    assert client.num_connections == 0
    client.close()


class _Loop:
    """A loop on which connecting takes for ever."""

    def __init__(self, loop: asyncio.AbstractEventLoop, create_connection: object) -> None:
        self._loop = loop
        self.create_connection = create_connection

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)


async def test_head_timeout() -> None:
    async with Upstream(replying(b"HTTP/1.1 200 OK\r\nx:")) as upstream:
        client = HttpClient(upstream.url, head_timeout_s=0.05, sweep_seconds=0.02)
        with pytest.raises(UpstreamTimedOut, match="no reply"):
            await reply_of(client)
        await eventually(lambda: client.num_connections == 0)
        client.close()


async def test_idle_timeout() -> None:
    reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
    async with Upstream(replying(reply)) as upstream:
        client = HttpClient(upstream.url, idle_timeout_s=0.05, sweep_seconds=0.02)
        with await client.request("POST", "/x") as response:
            assert await response.next_bytes() == b"abc"
            with pytest.raises(UpstreamTimedOut, match="silent"):
                await response.next_bytes()
        client.close()


async def test_https(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    serving, trusting = tls

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await read_request(reader)
                writer.write(OK)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(script, "127.0.0.1", 0, ssl=serving)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = HttpClient(url, ssl_context=trusting)
    for _ in range(3):
        assert await reply_of(client) == (200, b"hi")
    assert client.num_connections_opened == 1
    client.close()
    distrusting = HttpClient(url)
    with pytest.raises(UpstreamUnreachable, match="certificate"):
        await reply_of(distrusting)
    distrusting.close()
    server.close()
    await asyncio.sleep(0.05)


# --- leaving early -----------------------------------------------------------------------------


class Endless:
    """An upstream that streams until it is cut."""

    def __init__(self, chunk: bytes = b"a" * 1000) -> None:
        self._data = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        self.bytes_sent = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(self._data)
            self.bytes_sent += len(self._data)
            await writer.drain()
            await asyncio.sleep(0)


async def test_leaving_a_reply_cuts_the_connection() -> None:
    async with Upstream(Endless()) as upstream:
        client = HttpClient(upstream.url)
        with await client.request("POST", "/x") as response:
            assert await response.next_bytes()
        await eventually(lambda: upstream.num_ended == 1)
        await eventually(lambda: client.num_connections == 0)
        client.close()


@pytest.mark.parametrize("when", ["before the head", "inside the body"])
async def test_cancelling_cuts_the_connection(when: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def consume() -> None:
        with await client.request("POST", "/x") as response:
            await response.pump(lambda data: True, eternity)

    async with Upstream(silent if when == "before the head" else Endless()) as upstream:
        client = HttpClient(upstream.url)
        task = asyncio.create_task(consume())
        await eventually(lambda: upstream.num_connections == 1)
        await asyncio.sleep(0.02)
        task.cancel()
        await eventually(lambda: upstream.num_ended == 1)
        await eventually(lambda: client.num_connections == 0)
        assert task.cancelled()
        client.close()


# --- pressure ----------------------------------------------------------------------------------


async def test_an_unread_reply_stops_the_upstream() -> None:
    endless = Endless(b"a" * 100_000)
    async with Upstream(endless) as upstream:
        client = HttpClient(upstream.url)
        with await client.request("POST", "/x") as response:
            before = -1
            while before != endless.bytes_sent:
                before = endless.bytes_sent
                await asyncio.sleep(0.1)
            assert sum(map(len, response.parts)) < bounds.UPSTREAM_BUFFER_HIGH + 300_000
            for _ in range(50):
                await response.next_bytes()
            assert endless.bytes_sent > before
        client.close()


async def test_a_sink_that_is_behind_stops_the_upstream() -> None:
    endless = Endless(b"a" * 10_000)
    gate = asyncio.Event()
    taken = 0

    def sink(data: bytes) -> bool:
        nonlocal taken
        taken += len(data)
        return False

    async with Upstream(endless) as upstream:
        client = HttpClient(upstream.url)
        with await client.request("POST", "/x") as response:
            pumping = asyncio.create_task(response.pump(sink, gate.wait))
            await eventually(lambda: taken > 0)
            before = -1
            while before != (taken, endless.bytes_sent):
                before = (taken, endless.bytes_sent)
                await asyncio.sleep(0.05)
            assert taken < 600_000
            gate.set()
            await eventually(lambda: taken > 20_000_000)
            pumping.cancel()
        client.close()


async def test_a_sink_that_raises_ends_the_pump() -> None:
    def sink(data: bytes) -> bool:
        raise HeadraceError("no more")

    async with Upstream(Endless()) as upstream:
        client = HttpClient(upstream.url)
        response = await client.request("POST", "/x")
        with response, pytest.raises(HeadraceError, match="no more"):
            await response.pump(sink, eternity)
        await eventually(lambda: upstream.num_ended == 1)
        client.close()
