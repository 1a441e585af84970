"""Messages that are known by their heads: they mean what the parser would have said, however they come."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.http import HttpClient, HttpLimits, HttpRequest, UpstreamBroken
from headrace.http.errors import RequestRefused
from headrace.http.request_parser import BodyBudget, RequestParser
from tests.http.http_harness import Upstream, read_request

HEADS = (
    b"POST /chat HTTP/1.1\r\nhost: a\r\nContent-Length: %d\r\nx-a: 1\r\n\r\n",
    b"POST /chat HTTP/1.1\r\nhost: a\r\nContent-Length: %d\r\nx-a: 2\r\n\r\n",
    b"POST /chat?q HTTP/1.1\r\nhost: a\r\nx-a: 1\r\ncontent-length:%d\r\n\r\n",
    b"PUT /chat HTTP/1.1\r\nhost: a\r\nx-b: content-length: 7\r\ncontent-length:   %d\r\n\r\n",
)
BARE = b"GET /models HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = b"POST /chat HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
LOOKS_LIKE_ONE = HEADS[0] % 3 + b"abc"
BODIES = st.one_of(st.binary(max_size=40), st.just(LOOKS_LIKE_ONE), st.binary(min_size=5000, max_size=5001))

Parsed = tuple[str, str, bytes, bytes, bytes | None]


class Counting(RequestParser):
    """Counts the requests that the C parser has seen the beginning of."""

    __slots__ = ("num_parsed",)

    def __init__(self, limits: HttpLimits | None = None, budget: BodyBudget | None = None) -> None:
        super().__init__(limits or HttpLimits(), "127.0.0.1", budget=budget)
        self.num_parsed = 0

    def on_url(self, url: bytes) -> None:
        self.num_parsed += 1
        super().on_url(url)

    def take(self, data: bytes) -> list[HttpRequest]:
        """All requests in `data`, taken out as a connection would."""
        taken = []
        while data:
            data = self.feed(data)
            while self.ready:
                taken.append(self.ready.popleft())
            if self.refusal is not None:
                break
        return taken


def fields(request: HttpRequest) -> Parsed:
    return request.method, request.path, request.query, request.body, request.headers.get(b"x-a")


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, Parsed]:
    body = draw(BODIES)
    kind = draw(st.sampled_from(("known", "known", "known", "bare", "chunked")))
    if kind == "bare":
        return BARE, ("GET", "/models", b"", b"", None)
    if kind == "chunked":
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return CHUNKED + chunk + b"0\r\n\r\n", ("POST", "/chat", b"", body, None)
    number = draw(st.integers(0, len(HEADS) - 1))
    method = "PUT" if number == 3 else "POST"
    x_a = (b"1", b"2", b"1", None)[number]
    data = HEADS[number] % len(body) + body
    return data, (method, "/chat", b"q" if number == 2 else b"", body, x_a)


@settings(max_examples=300, deadline=None)
@given(st.lists(messages(), min_size=1, max_size=8), st.data())
def test_any_sequence_cut_anywhere_is_what_was_sent(
    sent: list[tuple[bytes, Parsed]], data: st.DataObject
) -> None:
    whole = b"".join(message for message, _ in sent)
    if data.draw(st.booleans()):  # one at a time, as a client does that waits for its replies
        ends = [sum(len(message) for message, _ in sent[:number]) for number in range(1, len(sent))]
        cuts = set(ends) | set(data.draw(st.lists(st.integers(1, len(whole)), max_size=2)))
    else:
        cuts = set(data.draw(st.lists(st.integers(1, len(whole)), max_size=6)))
    places = [0, *sorted(cuts), len(whole)]
    parser = Counting()
    taken = [
        fields(request)
        for start, end in itertools.pairwise(places)
        for request in parser.take(whole[start:end])
    ]
    assert parser.refusal is None
    assert taken == [expected for _, expected in sent]


@pytest.mark.parametrize("cut", [None, 30, 70, 100])
def test_the_next_request_is_not_parsed(cut: int | None) -> None:
    parser = Counting()
    for size in (100, 0, 20_000, 3):
        data = HEADS[0] % size + b"b" * size
        pieces = [data] if cut is None else [data[:cut], data[cut:]]
        taken = [request for piece in pieces for request in parser.take(piece)]
        assert [(one.body, one.headers[b"content-length"]) for one in taken] == [(b"b" * size, b"%d" % size)]
    # A head that comes in pieces has to be parsed; where it is cut behind the head it need not be.
    assert parser.num_parsed == (4 if cut == 30 else 1)


@pytest.mark.parametrize("length", [b"+3", b"3 ", b"0x3", b"-3", b"3_0", b"", b"9999999999999"])
def test_a_length_that_is_none_goes_to_the_parser(length: bytes) -> None:
    parser = Counting()
    parser.take(LOOKS_LIKE_ONE)
    head = HEADS[0].replace(b"%d", length)
    fresh = Counting()
    expected = [fields(request) for request in fresh.take(head + b"abc")]
    assert [fields(request) for request in parser.take(head + b"abc")] == expected
    assert parser.num_parsed == 2
    assert (parser.refusal and parser.refusal.status) == (fresh.refusal and fresh.refusal.status)


def test_bounds_hold_for_known_requests() -> None:
    budget = BodyBudget(100)
    parser = Counting(HttpLimits(body_bytes_max=200), budget)
    parser.take(LOOKS_LIKE_ONE)
    parser.take(HEADS[0] % 150 + b"a" * 90)
    assert (parser.refusal, budget.bytes_held) == (None, 90)
    parser.take(b"a" * 60)
    assert isinstance(parser.refusal, RequestRefused)
    assert (parser.refusal.code, budget.bytes_held) == ("too_many_bodies", 0)
    large = Counting(HttpLimits(body_bytes_max=200))
    large.take(LOOKS_LIKE_ONE)
    large.take(HEADS[0] % 201)
    assert large.refusal is not None and large.refusal.status == 413


def test_the_owner_sees_every_head() -> None:
    seen: list[bytes] = []

    def check(request: HttpRequest) -> None:
        assert request.body == b""
        seen.append(request.headers[b"content-length"])
        if len(seen) == 3:
            raise RequestRefused(401, "no", "no")

    parser = RequestParser(HttpLimits(), "127.0.0.1", check_head=check)
    for size in (3, 4, 5, 6):
        parser.feed(HEADS[0] % size + b"a" * size)
        parser.ready.clear()
    assert seen == [b"3", b"4", b"5"], "nothing is read behind a refusal"
    assert parser.refusal is not None and parser.refusal.status == 401


REPLY = b"HTTP/1.1 200 OK\r\nserver: s\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", [0, 5, 40, 48, 51])
async def test_replies_with_a_known_head(cut: int) -> None:
    bodies = [b"a", b"bb" * 300, b"", b"c" * 70_000, REPLY % 2 + b"hi", b"d"]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in bodies:
            await read_request(reader)
            data = REPLY % len(body) + body
            writer.write(data[:cut])
            await asyncio.sleep(0.01 if cut else 0)
            writer.write(data[cut:])
        await read_request(reader)
        writer.write(REPLY.replace(b"200 OK", b"500 NO") % 1 + b"x")
        await read_request(reader)
        writer.write(REPLY % 1 + b"xyz")

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url)
        for body in bodies:
            with await client.request("POST", "/x") as response:
                assert (response.status, await response.read()) == (200, body)
                assert response.headers == {b"server": b"s", b"content-length": b"%d" % len(body)}
        with await client.request("POST", "/x") as response:
            assert (response.status, await response.read()) == (500, b"x")
        assert client.num_connections_opened == 1
        with pytest.raises(UpstreamBroken), await client.request("POST", "/x") as response:
            await response.read()
        client.close()


@pytest.mark.asyncio
async def test_requests_of_one_turn_all_arrive_and_none_is_sent_after_the_end() -> None:
    seen: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append((await read_request(reader))[1])
            writer.write(REPLY % 1 + b"x")

    async with Upstream(script) as upstream:
        client = HttpClient(upstream.url)

        async def ask(body: bytes) -> bytes:
            with await client.request("POST", "/x", b"", body) as response:
                return await response.read()

        await asyncio.gather(*(ask(b"warm%d" % number) for number in range(4)))
        seen.clear()
        assert await asyncio.gather(*(ask(b"%d" % number) for number in range(4))) == [b"x"] * 4
        assert sorted(seen) == [b"0", b"1", b"2", b"3"]
        seen.clear()
        tasks = [asyncio.create_task(ask(b"%d" % number)) for number in range(4)]
        await asyncio.sleep(0)  # all have been begun; what was kept for the end of the turn is dropped
        client.close()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, UpstreamBroken) for one in done)
        assert len(seen) <= 1, "only the first one was alone when it was sent"
