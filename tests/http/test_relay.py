"""Server and client together, as a gateway uses them: relayed whole, fair, and cut when nobody listens."""

import asyncio

import pytest

from headrace.http import HttpClient, HttpRequest, Responder
from tests.http.http_harness import FAST, Errors, Upstream, connected, eventually, get, read_request, serving

pytestmark = pytest.mark.asyncio

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
NUM_FLOOD_CHUNKS = 2000
NUM_SLOW = 15


def relaying(client: HttpClient):  # type: ignore[no-untyped-def]
    async def handler(request: HttpRequest, responder: Responder) -> None:
        with await client.request("GET", request.path) as response:
            responder.start(response.status, [(b"content-type", response.headers[b"content-type"])])
            await response.pump(responder.write, responder.drain)
            responder.end()

    return handler


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """`/flood`: 2000 chunks at once, again and again; `/slow`: 20 chunks, one every 5 ms."""
    while True:
        head, _ = await read_request(reader)
        writer.write(HEAD)
        if b"/flood" in head:
            for _ in range(20):
                writer.write(chunk(b"data: " + b"x" * 220 + b"\n\n") * (NUM_FLOOD_CHUNKS // 20))
                await writer.drain()
        else:
            for n in range(20):
                writer.write(chunk(b"data: %d\n\n" % n))
                await writer.drain()
                await asyncio.sleep(0.005)
        writer.write(b"0\r\n\r\n")


async def test_a_relayed_stream_arrives_whole_and_the_connection_is_reused() -> None:
    async with Upstream(streams) as upstream:
        client = HttpClient(upstream.url)
        async with serving(relaying(client)) as server, connected(server.port) as reader:
            for path in (b"/slow", b"/flood", b"/slow"):
                await reader.send(get(path))
                status, headers, body = await reader.read_reply()
                assert status == 200
                assert headers[b"transfer-encoding"] == b"chunked"
                assert body.count(b"data: ") == (NUM_FLOOD_CHUNKS if path == b"/flood" else 20)
        assert upstream.num_connections == 1
        client.close()


async def test_a_flood_starves_nobody() -> None:
    """One stream floods for as long as the test runs; 15 slow ones must all get through meanwhile."""
    is_over = False
    num_floods = 0

    async def flood(port: int) -> None:
        nonlocal num_floods
        async with connected(port) as reader:
            while not is_over:
                await reader.send(get(b"/flood"))
                assert (await reader.read_reply())[2].count(b"data: ") == NUM_FLOOD_CHUNKS
                num_floods += 1

    async def slow(port: int) -> None:
        async with connected(port) as reader:
            await reader.send(get(b"/slow"))
            assert (await reader.read_reply())[2].count(b"data: ") == 20

    async with Upstream(streams) as upstream:
        client = HttpClient(upstream.url)
        async with serving(relaying(client)) as server:
            flooding = asyncio.create_task(flood(server.port))
            await eventually(lambda: num_floods > 0)
            async with asyncio.timeout(10):
                await asyncio.gather(*[slow(server.port) for _ in range(NUM_SLOW)])
            is_over = True
            await flooding
        client.close()


async def test_one_read_per_turn_for_a_flooding_stream() -> None:
    """What fairness rests on: between two big reads of one connection the loop runs everything else."""
    turns = 0
    reads: list[int] = []

    def sink(data: bytes) -> bool:
        if len(data) > 100_000:
            reads.append(turns)
        return True

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(b"x" * 30_000_000) + b"0\r\n\r\n")
        await writer.drain()
        await reader.read()

    loop = asyncio.get_running_loop()
    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url)
        with await client.request("GET", "/") as response:
            loop.call_soon(turn)
            await response.pump(sink, asyncio.Event().wait)
        assert len(reads) > 3
        assert len(reads) == len(set(reads))
        client.close()
        turns_done = turns
        assert turns_done >= len(reads)


async def test_a_client_that_does_not_read_stops_the_upstream_and_is_cut() -> None:
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(HEAD)
        data = chunk(b"x" * 10_000)
        while not writer.is_closing():
            writer.write(data)
            sent += len(data)
            await writer.drain()
            await asyncio.sleep(0)

    async with Upstream(endless) as upstream:
        client = HttpClient(upstream.url)
        async with (
            serving(relaying(client), limits=FAST) as server,
            connected(server.port, receive_buffer=4096) as reader,
        ):
            reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await reader.send(get())
            await eventually(lambda: upstream.num_ended == 1)  # after write_stall_seconds_max
            assert sent < 20_000_000  # what four socket buffers hold
            await eventually(lambda: server.num_connections_open == 0)
            await eventually(lambda: client.num_connections == 0)
        client.close()


async def test_a_client_that_leaves_cuts_the_upstream() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(b"first"))
        await reader.read()

    async with Upstream(endless) as upstream:
        client = HttpClient(upstream.url)
        async with serving(relaying(client)) as server:
            async with connected(server.port) as reader:
                await reader.send(get())
                await reader.reader.readuntil(b"first")
            await eventually(lambda: upstream.num_ended == 1)
            await eventually(lambda: client.num_connections == 0)
        client.close()


async def test_an_upstream_that_breaks_is_never_a_clean_end() -> None:
    async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(b"first"))
        await writer.drain()

    errors = Errors()
    async with Upstream(breaking) as upstream:
        client = HttpClient(upstream.url)
        async with serving(relaying(client), on_error=errors) as server, connected(server.port) as reader:
            await reader.send(get())
            try:
                data = await reader.reader.read()
            except ConnectionError:
                data = b""
            assert b"0\r\n\r\n" not in data
        client.close()
    assert "the connection ended inside the reply" in str(errors.seen[0])
