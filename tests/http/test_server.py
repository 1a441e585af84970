"""The server over real sockets: answers, refusals, order, time limits, departures, shutdown."""

import asyncio
import contextlib
import dataclasses
import socket
import ssl

import pytest

from headrace.errors import SetupError
from headrace.http import HandlerFault, HttpLimits, HttpRequest, HttpServer, RefusalReply, Responder
from tests.http.http_harness import (
    FAST,
    Errors,
    RawClient,
    connected,
    echo,
    eventually,
    exchange,
    get,
    post,
    render_refusal,
    serving,
)

pytestmark = pytest.mark.asyncio


async def stream(request: HttpRequest, responder: Responder) -> None:
    responder.start(200, [(b"content-type", b"text/event-stream")])
    for n in range(3):
        responder.write(b"part %d\n" % n)
        responder.write(b"")
        await responder.drain()
        await asyncio.sleep(0)
    responder.end()


class Hanging:
    """A handler that never answers and notes how it ends."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.cleaned = asyncio.Event()

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        self.begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.set()
            await asyncio.sleep(0.01)  # cleaning up may take a while
            self.cleaned.set()
            raise


# --- answers ------------------------------------------------------------------------------------


async def test_whole_reply_and_keep_alive() -> None:
    async with serving() as server, connected(server.port) as client:
        for n in range(3):
            await client.send(post(b"%d" % n))
            status, headers, body = await client.read_reply()
            assert (status, body) == (200, b"POST /x? %d" % n)
            assert set(headers) == {b"date", b"content-type", b"content-length"}
            assert headers[b"date"].endswith(b" GMT")
        assert server.num_requests == 3
        assert server.num_connections_open == server.num_connections_total == 1
        assert server.bytes_received == 3 * len(post(b"0"))
        assert server.bytes_sent > 300


async def test_byte_by_byte() -> None:
    async with serving() as server, connected(server.port) as client:
        for byte in post(b"abc", path=b"/a?b"):
            await client.send(bytes((byte,)))
            await asyncio.sleep(0)
        assert (await client.read_reply())[2] == b"POST /a?b abc"


async def test_large_body_both_ways() -> None:
    async def mirror(request: HttpRequest, responder: Responder) -> None:
        responder.send(200, b"", request.body)

    body = bytes(range(256)) * 12_000
    async with serving(mirror) as server, connected(server.port) as client:
        sending = asyncio.create_task(client.send(post(body)))
        assert (await client.read_reply())[2] == body
        await sending


async def test_chunked_stream() -> None:
    async with serving(stream) as server, connected(server.port) as client:
        for _ in range(2):
            await client.send(get())
            status, headers, body = await client.read_reply()
            assert (status, body) == (200, b"part 0\npart 1\npart 2\n")
            assert headers[b"transfer-encoding"] == b"chunked"
            assert b"content-length" not in headers


async def test_http_1_0_stream_ends_with_the_connection() -> None:
    async with serving(stream) as server, connected(server.port) as client:
        await client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        _, headers, body = await client.read_reply()
        assert body == b"part 0\npart 1\npart 2\n"
        assert b"transfer-encoding" not in headers
        assert headers[b"connection"] == b"close"


async def test_http_1_0_keep_alive() -> None:
    async with serving() as server, connected(server.port) as client:
        await client.send(b"GET /1 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.read_reply())[1][b"connection"] == b"keep-alive"
        await client.send(b"GET /2 HTTP/1.0\r\n\r\n")
        _, headers, body = await client.read_reply()
        assert headers[b"connection"] == b"close"
        assert body == b"GET /2? "
        assert await client.read_to_end() == b""


async def test_connection_close() -> None:
    async with serving() as server, connected(server.port) as client:
        await client.send(get(extra=b"Connection: close\r\n") + get(b"/smuggled"))
        _, headers, _ = await client.read_reply()
        assert headers[b"connection"] == b"close"
        assert await client.read_to_end() == b""
        assert server.num_requests == 1


@pytest.mark.parametrize("handler", [echo, stream])
async def test_head_has_no_body(handler) -> None:  # type: ignore[no-untyped-def]
    async with serving(handler) as server, connected(server.port) as client:
        await client.send(b"HEAD /x HTTP/1.1\r\nhost: a\r\n\r\n")
        status, headers, _ = await client.read_reply(has_body=False)
        assert status == 200
        assert headers.get(b"content-length", b"9") == b"9"
        await client.send(b"HEAD /x HTTP/1.1\r\nhost: a\r\n\r\n" + get())
        assert (await client.read_reply(has_body=False))[0] == 200
        assert (await client.read_reply())[0] == 200


async def test_no_content() -> None:
    async def nothing(request: HttpRequest, responder: Responder) -> None:
        responder.send(204, b"", b"")

    async with serving(nothing) as server, connected(server.port) as client:
        await client.send(get() + get())
        for _ in range(2):
            status, headers, _ = await client.read_reply()
            assert status == 204
            assert b"content-length" not in headers


async def test_several_writes_of_one_turn_are_one_packet() -> None:
    async def burst(request: HttpRequest, responder: Responder) -> None:
        responder.start(200, b"")
        for _ in range(20):
            responder.write(b"x")
        responder.end()

    async with serving(burst) as server, connected(server.port) as client:
        await client.send(get())
        data = await client.reader.read(65536)
        assert data.count(b"1\r\nx\r\n") == 20
        assert data.endswith(b"0\r\n\r\n")


async def test_expect_continue() -> None:
    async with serving() as server, connected(server.port) as client:
        head, _, body = post(b"abc", extra=b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
        for _ in range(2):
            await client.send(head + b"\r\n\r\n")
            assert (await client.read_reply())[0] == 100
            await client.send(body)
            assert (await client.read_reply())[2] == b"POST /x? abc"
        await client.send(head + b"\r\n\r\n" + body)  # did not wait: no 100 needed
        assert (await client.read_reply())[0] == 200


async def test_expect_continue_of_a_pipelined_request_waits_its_turn() -> None:
    async with serving() as server, connected(server.port) as client:
        head, _, body = post(b"abc", extra=b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
        await client.send(get(b"/first") + head + b"\r\n\r\n")
        assert (await client.read_reply())[2] == b"GET /first? "
        assert (await client.read_reply())[0] == 100
        await client.send(body)
        assert (await client.read_reply())[2] == b"POST /x? abc"


async def test_client_address() -> None:
    seen: list[str] = []

    async def handler(request: HttpRequest, responder: Responder) -> None:
        seen.append(request.client_address)
        responder.send(200, b"", b"")

    async with serving(handler) as server:
        await exchange(server.port, get())
    assert seen == ["127.0.0.1"]


async def test_small_packets_are_not_held_back() -> None:
    async with serving() as server, connected(server.port) as client:
        await client.send(get())
        await client.read_reply()
        (connection,) = server._connections
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
async def test_a_reply_header_cannot_break_its_line(value: bytes) -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        responder.send(200, [(b"x", value)], b"") if not responder.has_started else None

    errors = Errors()

    async with serving(handler, on_error=errors) as server, connected(server.port) as client:
        await client.send(get())
        assert await client.read_to_end() == b""  # nothing of it was sent
    assert isinstance(errors.seen[0], ValueError)


# --- order -----------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def uneven(request: HttpRequest, responder: Responder) -> None:
        for _ in range(len(request.body) % 3):
            await asyncio.sleep(0)
        await echo(request, responder)

    async with serving(uneven) as server, connected(server.port) as client:
        requests = [post(b"a" * n, path=b"/%d" % n) for n in range(300)]
        sending = asyncio.create_task(client.send(b"".join(requests)))
        for n in range(300):
            assert (await client.read_reply())[2] == b"POST /%d? " % n + b"a" * n
        await sending


async def test_a_refusal_comes_after_the_answers_before_it() -> None:
    async with serving() as server, connected(server.port) as client:
        await client.send(get(b"/1") + get(b"/2") + b"BAD\r\n\r\n" + get(b"/smuggled"))
        assert (await client.read_reply())[2] == b"GET /1? "
        assert (await client.read_reply())[2] == b"GET /2? "
        status, headers, body = await client.read_reply()
        assert status == 400
        assert b'"malformed_request"' in body
        assert headers[b"connection"] == b"close"
        assert await client.read_to_end() == b""
        assert (server.num_requests, server.num_refusals) == (2, 1)


async def test_read_ahead_is_bounded() -> None:
    hanging = Hanging()
    async with serving(hanging) as server, connected(server.port) as client:
        await client.send(get())
        await hanging.begun.wait()
        (connection,) = server._connections
        client.writer.write(get() * 400_000)
        await eventually(lambda: server.bytes_received > 10_000_000)  # read, or a departure stays unseen
        assert len(connection._backlog) <= HttpLimits().pipelined_bytes_max
        client.reset()
        async with asyncio.timeout(2):
            await hanging.cancelled.wait()


async def test_what_is_thrown_away_behind_a_request_is_bounded() -> None:
    hanging = Hanging()
    limits = HttpLimits(linger_bytes_max=1_000_000)
    async with serving(hanging, limits=limits) as server, connected(server.port) as client:
        with pytest.raises(ConnectionError):
            await client.send(get())
            for _ in range(1000):
                await client.send(get() * 4000)
        await eventually(lambda: server.num_connections_open == 0)
        assert hanging.cancelled.is_set()


async def test_too_much_read_ahead_makes_the_running_reply_the_last() -> None:
    release = asyncio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await release.wait()
        responder.send(200, b"", b"x" * 100)

    async with serving(handler) as server, connected(server.port) as client:
        await client.send(get())
        await eventually(lambda: server.num_requests == 1)
        await client.send(get() * 10_000)
        await eventually(lambda: server.bytes_received == 10_001 * len(get()))
        release.set()
        status, headers, _ = await client.read_reply()
        assert (status, headers[b"connection"]) == (200, b"close")
        assert await client.read_to_end() == b""
        assert server.num_requests == 1


async def test_pipelining_without_reading_begins_no_more_requests() -> None:
    async def large(request: HttpRequest, responder: Responder) -> None:
        responder.send(200, b"", b"x" * 30_000)

    async with serving(large) as server, connected(server.port, receive_buffer=4096) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(get() * 2000)
        before = -1
        while before != server.num_requests:
            before = server.num_requests
            await asyncio.sleep(0.1)
        assert server.num_requests < 500  # what the kernel takes; all of them would be 60 MB
        (connection,) = server._connections
        assert connection._transport.get_write_buffer_size() <= HttpLimits().write_buffer_high + 31_000
        assert not connection._transport.is_reading()
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(2000):
            assert len((await client.read_reply())[2]) == 30_000
        await client.send(get())
        assert (await client.read_reply())[0] == 200


@pytest.mark.parametrize("is_trickling", [False, True])
async def test_pipelining_without_reading_is_cut(is_trickling: bool) -> None:
    async def large(request: HttpRequest, responder: Responder) -> None:
        responder.send(200, b"", b"x" * 30_000)

    limits = dataclasses.replace(FAST, write_stall_bytes_min=100_000_000)
    async with serving(large, limits=limits) as server, connected(server.port, receive_buffer=4096) as client:
        transport = client.writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(get() * 2000)
        await eventually(lambda: any(connection._is_held for connection in server._connections))
        if is_trickling:
            transport.resume_reading()  # type: ignore[attr-defined]
            with contextlib.suppress(ConnectionError):
                while await client.reader.read(100):
                    await asyncio.sleep(0.001)
        await eventually(lambda: server.num_connections_open == 0)
        assert server.num_requests < 2000


async def test_drain_closes_a_connection_that_is_held() -> None:
    async def large(request: HttpRequest, responder: Responder) -> None:
        responder.send(200, b"", b"x" * 30_000)

    async with serving(large) as server, connected(server.port, receive_buffer=4096) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(get() * 2000)
        await eventually(lambda: any(connection._is_held for connection in server._connections))
        draining = asyncio.create_task(server.drain(5))
        await asyncio.sleep(0.02)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        data = await client.read_to_end()
        assert data.count(b"HTTP/1.1 200") == server.num_requests
        assert data.endswith(b"x" * 30_000)
        client.close()
        await draining


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400, b"malformed_request"),
        (b"GET / HTTP/3.0\r\nhost: a\r\n\r\n", 505, b"http_version_not_supported"),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505, b"http_version_not_supported"),
        (get(b"/" + b"a" * 9000), 414, b"request_line_too_long"),
        (get(extra=b"x: " + b"a" * 40_000 + b"\r\n"), 431, b"headers_too_large"),
        (get(extra=b"expect: x\r\n"), 417, b"expectation_failed"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5000000\r\n\r\n", 413, b"body_too_large"),
    ],
)
async def test_refusals_carry_the_caller_s_body(data: bytes, status: int, code: bytes) -> None:
    async with serving() as server, connected(server.port) as client:
        await client.send(data)
        got, headers, body = await client.read_reply()
        assert got == status
        assert code in body
        assert headers[b"content-type"] == b"application/json"
        assert headers[b"connection"] == b"close"
        assert await client.read_to_end() == b""
        assert server.num_refusals == 1


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_client_with_10_mb_in_flight_sees_the_413(is_chunked: bool) -> None:
    body = b"a" * 10_000_000
    data = post(body)
    if is_chunked:
        data = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
            len(body),
            body,
        )

    def blocking_client(port: int) -> bytes:
        """Like most: sends everything, then reads."""
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(data)
            return sock.recv(65536)

    async with serving() as server:
        reply = await asyncio.to_thread(blocking_client, server.port)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in reply


async def test_bodies_of_all_connections_are_bounded_together() -> None:
    limits = HttpLimits(body_bytes_max=100_000, bodies_bytes_max=150_000)
    async with serving(limits=limits) as server, connected(server.port) as one:
        data = post(b"a" * 100_000)
        await one.send(data[:-1])
        await eventually(lambda: server.body_budget.bytes_held == 99_999)
        async with connected(server.port) as two:
            await two.send(data)
            status, headers, body = await two.read_reply()
            assert (status, headers[b"connection"]) == (503, b"close")
            assert b"too_many_bodies" in body
            assert server.body_budget.bytes_held == 99_999
        await one.send(data[-1:])
        assert (await one.read_reply())[0] == 200
        assert server.body_budget.bytes_held == 0
        await one.send(data[:-1])
        await eventually(lambda: server.body_budget.bytes_held == 99_999)
        one.reset()
        await eventually(lambda: server.body_budget.bytes_held == 0)


async def test_a_body_that_took_too_long_is_let_go() -> None:
    async with serving(limits=FAST) as server, connected(server.port) as client:
        await client.send(post(b"a" * 1000)[:-1])
        assert (await client.read_reply())[0] == 408
        assert server.body_budget.bytes_held == 0


def no_key(request: HttpRequest) -> RefusalReply | None:
    assert request.body == b""
    if b"authorization" in request.headers:
        return None
    return 401, [(b"www-authenticate", b"Bearer")], b"no key for %b" % request.path.encode()


async def test_check_head_refuses_before_the_body() -> None:
    async with serving(check_head=no_key) as server, connected(server.port) as client:
        good = post(b"abc", extra=b"authorization: a\r\n")
        await client.send(good)
        assert (await client.read_reply())[2] == b"POST /x? abc"
        await client.send(good + post(b"a" * 1_000_000, path=b"/y", extra=b"expect: 100-continue\r\n"))
        assert (await client.read_reply())[0] == 200
        status, headers, body = await client.read_reply()
        assert (status, body) == (401, b"no key for /y")
        assert headers[b"www-authenticate"] == b"Bearer"
        assert headers[b"connection"] == b"close"
        assert server.body_budget.bytes_held == 0
        assert await client.read_to_end() == b""
        assert (server.num_requests, server.num_refusals) == (2, 1)


@pytest.mark.parametrize("reply", [None, (401, [(b"x", b"a\r\nb")], b"")])
async def test_a_faulty_check_head_is_a_500(reply: RefusalReply | None) -> None:
    def faulty(request: HttpRequest) -> RefusalReply:
        if reply is None:
            raise KeyError("boom")
        return reply

    seen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
    async with serving(check_head=faulty) as server:
        status, _, body = await exchange(server.port, post(b"abc"))
        assert status == 500
        assert b"internal_error" in body
    assert len(seen) == 1


async def test_linger_is_bounded_in_bytes() -> None:
    limits = HttpLimits(linger_bytes_max=1_000_000)
    async with serving(limits=limits) as server, connected(server.port) as client:
        with pytest.raises(ConnectionError):
            await client.send(b"BAD\r\n\r\n")
            for _ in range(1000):
                await client.send(b"a" * 100_000)
        await eventually(lambda: server.num_connections_open == 0)


async def test_linger_is_bounded_in_time() -> None:
    async with serving(limits=FAST) as server, connected(server.port) as client:
        await client.send(b"BAD\r\n\r\n")
        assert (await client.read_reply())[0] == 400
        await eventually(lambda: server.num_connections_open == 0)  # although we do not close


async def test_too_many_connections() -> None:
    limits = HttpLimits(connections_max=2, connections_surplus_max=1)
    async with serving(limits=limits) as server:
        async with connected(server.port) as one, connected(server.port) as two:
            for client in (one, two):
                await client.send(get())
                assert (await client.read_reply())[0] == 200
                await client.send(b"GET")  # a request begun: this one is not closed to make room
            await eventually(lambda: not server.idle)
            async with connected(server.port) as three:
                await three.send(get())
                status, _, body = await three.read_reply()
                assert status == 503
                assert b"too_many_connections" in body
                async with connected(server.port) as four:
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await four.send(get())
                        await four.read_reply()
        await eventually(lambda: server.num_connections_open == 0)
        assert (await exchange(server.port, get()))[0] == 200


async def test_the_longest_idle_connection_makes_room() -> None:
    limits = HttpLimits(connections_max=3, connections_surplus_max=1)
    async with (
        serving(limits=limits) as server,
        connected(server.port) as one,
        connected(server.port) as silent,
        connected(server.port) as begun,
    ):
        await begun.send(b"GET")
        await one.send(get())
        assert (await one.read_reply())[0] == 200  # idle from now on, so later than `silent`
        await eventually(lambda: len(server.idle) == 2)
        for _ in range(2):
            assert (await exchange(server.port, get()))[0] == 200
            assert await silent.read_to_end() == b""
        await one.send(get())
        assert (await one.read_reply())[0] == 200
        await begun.send(get()[3:])
        assert (await begun.read_reply())[0] == 200
        assert server.num_refusals == 0


async def test_a_connection_that_never_sends_is_closed_early() -> None:
    limits = dataclasses.replace(FAST, keep_alive_seconds=60)
    async with (
        serving(limits=limits) as server,
        connected(server.port) as used,
        connected(server.port) as new,
    ):
        await used.send(get())
        assert (await used.read_reply())[0] == 200
        assert await new.read_to_end() == b""
        await used.send(get())
        assert (await used.read_reply())[0] == 200


# --- time ------------------------------------------------------------------------------------


async def trickle(client, data: bytes) -> None:  # type: ignore[no-untyped-def]
    """One byte at a time, for ever."""
    try:
        while True:
            for byte in data:
                client.writer.write(bytes((byte,)))
                await asyncio.sleep(0.01)
            data = b"x"
    except ConnectionError:
        pass


@pytest.mark.parametrize(
    "begin",
    [b"GET / HTTP/1.1\r\nx: ", b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9999\r\n\r\n", b"GET /"],
)
async def test_slow_requests_are_cut(begin: bytes) -> None:
    async with serving(limits=FAST) as server, connected(server.port) as client:
        await client.send(begin)
        trickling = asyncio.create_task(trickle(client, b"x"))
        status, _, body = await client.read_reply()
        assert status == 408
        assert b"request_timeout" in body
        await eventually(lambda: server.num_connections_open == 0)
        trickling.cancel()


async def test_a_body_that_keeps_the_rate_gets_the_time_it_needs() -> None:
    limits = dataclasses.replace(FAST, body_rate_min=100)
    async with serving(limits=limits) as server, connected(server.port) as client:
        data = post(b"abcdefgh" * 10)
        await client.send(data[:-80])
        for n in range(10):  # 0.5 s in all, more than body_seconds_max
            await asyncio.sleep(0.05)
            await client.send(data[len(data) - 80 + 8 * n :][:8])
        assert (await client.read_reply())[0] == 200


@pytest.mark.parametrize("before", [b"", get()])
async def test_idle_connections_are_closed_quietly(before: bytes) -> None:
    async with serving(limits=FAST) as server, connected(server.port) as client:
        await client.send(before)
        if before:
            assert (await client.read_reply())[0] == 200
        assert await client.read_to_end() == b""
        await eventually(lambda: server.num_connections_open == 0)


async def test_a_running_handler_has_no_deadline_here() -> None:
    async def slow(request: HttpRequest, responder: Responder) -> None:
        await asyncio.sleep(0.4)
        await echo(request, responder)

    async with serving(slow, limits=FAST) as server:
        assert (await exchange(server.port, get()))[0] == 200


# --- a client that does not read ---------------------------------------------------------------


class Flood:
    """A handler that writes as fast as it is let."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.ended = asyncio.Event()

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        responder.start(200, b"")
        try:
            while True:
                if not responder.write(b"x" * 10_000):
                    assert not responder.is_writable
                    await responder.drain()
                self.num_writes += 1
        finally:
            self.ended.set()


async def test_backpressure_then_write_stall() -> None:
    flood = Flood()
    async with serving(flood, limits=FAST) as server, connected(server.port, receive_buffer=4096) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(get())
        async with asyncio.timeout(5):
            await flood.ended.wait()
        # What the kernel took, plus at most the high mark: nothing near what a second would produce.
        assert server.bytes_sent < 8_000_000
        await eventually(lambda: server.num_connections_open == 0)


async def test_backpressure_lets_go_on() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        responder.start(200, b"")
        for n in range(400):
            responder.write(b"%07d\n" % n * 1250)
            await responder.drain()
        responder.end()

    async with serving(handler) as server, connected(server.port, receive_buffer=4096) as client:
        await client.send(get())
        _, _, body = await client.read_reply()
        assert len(body) == 4_000_000
        assert body[::10_000] == b"".join(b"%07d\n" % n * 1250 for n in range(400))[::10_000]


# --- departures --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_a_client_that_leaves_cancels_its_handler(how: str) -> None:
    hanging = Hanging()
    async with serving(hanging) as server, connected(server.port) as client:
        await client.send(get())
        await hanging.begun.wait()
        if how == "close":
            client.close()
        elif how == "reset":
            client.reset()
        else:
            client.writer.write_eof()
        async with asyncio.timeout(2):
            await hanging.cancelled.wait()
        assert server.num_connections_open == 1  # kept until the handler has finished
        await eventually(lambda: server.num_connections_open == 0)
        assert hanging.cleaned.is_set()


async def test_leaving_inside_a_stream_cancels() -> None:
    cancelled = asyncio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        responder.start(200, b"")
        responder.write(b"x")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            assert responder.is_closed
            responder.write(b"into the void")
            responder.end()
            cancelled.set()

    async with serving(handler) as server:
        async with connected(server.port) as client:
            await client.send(get())
            await client.reader.readuntil(b"x\r\n")
        async with asyncio.timeout(2):
            await cancelled.wait()
        await eventually(lambda: server.num_connections_open == 0)


async def test_leaving_before_the_handler_began() -> None:
    """A task cancelled before its first step never runs: the connection must not leak."""
    async with serving() as server:
        for _ in range(50):
            async with connected(server.port) as client:
                client.writer.write(get())
                client.writer.write_eof()
        await eventually(lambda: server.num_connections_open == 0)


async def test_bookkeeping_after_the_reply_is_left_alone() -> None:
    settled = asyncio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await echo(request, responder)
        await asyncio.sleep(0.05)
        settled.set()

    async with serving(handler) as server:
        assert (await exchange(server.port, get()))[0] == 200
        async with asyncio.timeout(2):
            await settled.wait()


async def test_a_handler_that_only_writes_meets_its_cancellation() -> None:
    """Writing to a client that is gone must not become a loop nothing can interrupt."""
    ended = asyncio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        responder.start(200, b"")
        responder.write(b"x")
        with contextlib.suppress(asyncio.CancelledError):  # a handler may want to write a last word
            await asyncio.sleep(30)
        await responder.drain()  # nobody listens: goes on at once
        try:
            for _ in range(10_000):
                if not responder.write(b"last word"):
                    await responder.drain()
        finally:
            ended.set()

    async with serving(handler) as server:
        async with connected(server.port) as client:
            await client.send(get())
            await client.reader.readuntil(b"x\r\n")
        async with asyncio.timeout(5):
            await ended.wait()


# --- faults ------------------------------------------------------------------------------------


async def test_a_fault_before_the_reply_is_answered_by_the_hook() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        raise KeyError("boom")

    errors = Errors()
    async with serving(handler, on_error=errors) as server, connected(server.port) as client:
        for _ in range(2):
            await client.send(get())
            assert (await client.read_reply())[0] == 500
    assert [type(e) for e in errors.seen] == [KeyError, KeyError]


async def test_a_fault_inside_a_stream_never_looks_like_its_end() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        responder.start(200, b"")
        responder.write(b"x")
        await asyncio.sleep(0.02)
        raise KeyError("boom")

    async with serving(handler) as server, connected(server.port) as client:
        await client.send(get())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
            await client.read_reply()


async def no_reply(request: HttpRequest, responder: Responder) -> None:
    pass


async def cancels_itself(request: HttpRequest, responder: Responder) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize("handler", [no_reply, cancels_itself])
async def test_a_handler_without_a_reply_is_our_fault(handler) -> None:  # type: ignore[no-untyped-def]
    errors = Errors()
    async with serving(handler, on_error=errors) as server:
        assert (await exchange(server.port, get()))[0] == 500
    assert isinstance(errors.seen[0], HandlerFault)


async def test_an_unended_stream_is_cut() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        responder.start(200, b"")
        responder.write(b"x")

    errors = Errors()
    async with serving(handler, on_error=errors) as server, connected(server.port) as client:
        await client.send(get())
        assert b"0\r\n\r\n" not in await client.reader.read()
    assert isinstance(errors.seen[0], HandlerFault)


# --- TLS -----------------------------------------------------------------------------------


async def test_tls(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    serving_context, trusting = tls
    server = HttpServer(
        stream, render_refusal=render_refusal, on_error=Errors(), limits=HttpLimits(sweep_seconds=0.05)
    )
    await server.start("127.0.0.1", 0, ssl_context=serving_context)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting)
    client = RawClient(reader, writer)
    for _ in range(2):
        await client.send(get())
        assert (await client.read_reply())[2] == b"part 0\npart 1\npart 2\n"
    await client.send(post(b"a" * 5_000_000))
    assert (await client.read_reply())[0] == 413
    client.close()
    await eventually(lambda: server.num_connections_open == 0)
    await server.drain(0)


# --- start and stop ----------------------------------------------------------------------------


async def test_port_in_use_is_said_clearly() -> None:
    async with serving() as server:
        other = HttpServer(echo, render_refusal=server.render_refusal, on_error=Errors())
        with pytest.raises(SetupError, match=rf"port {server.port} .*already in use"):
            await other.start("127.0.0.1", server.port)


async def test_no_such_address_is_said_clearly() -> None:
    server = HttpServer(echo, render_refusal=lambda s, c, m: (b"", b""), on_error=Errors())
    with pytest.raises(SetupError, match=r"cannot listen on 192\.0\.2\.1"):
        await server.start("192.0.2.1", 0)


async def test_drain_finishes_what_runs() -> None:
    release = asyncio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await release.wait()
        await echo(request, responder)

    async with serving(handler) as server, connected(server.port) as busy, connected(server.port) as idle:
        await busy.send(get())
        await eventually(lambda: server.num_requests == 1)
        draining = asyncio.create_task(server.drain(5))
        assert await idle.read_to_end() == b""
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", server.port)
        release.set()
        status, headers, _ = await busy.read_reply()
        assert (status, headers[b"connection"]) == (200, b"close")
        assert await busy.read_to_end() == b""
        assert await draining == 0


async def test_drain_cancels_what_is_left() -> None:
    hanging = Hanging()
    async with serving(hanging) as server, connected(server.port) as client:
        await client.send(get())
        await hanging.begun.wait()
        assert await server.drain(0.05) == 1
        assert hanging.cleaned.is_set()
        assert server.num_connections_open == 0


async def test_drain_does_not_wait_for_ever_for_a_stubborn_handler() -> None:
    async def stubborn(request: HttpRequest, responder: Responder) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)

    limits = dataclasses.replace(FAST, cancel_seconds_max=0.05)
    async with serving(stubborn, limits=limits) as server, connected(server.port) as client:
        await client.send(get())
        await eventually(lambda: server.num_requests == 1)
        await server.drain(0.01)
        assert await client.read_to_end() == b""
        await eventually(lambda: server.num_connections_open == 0)
