"""The parser alone: what is understood, what is refused, and that splitting changes nothing."""

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import bounds
from headrace.http import HttpLimits, HttpRequest
from headrace.http.request_parser import RequestParser
from tests.http.http_harness import get, post

HOST = b"host: a\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def fields(request: HttpRequest) -> tuple[object, ...]:
    return (
        request.method,
        request.path,
        request.query,
        tuple(request.headers.items()),
        request.body,
        request.is_keep_alive,
        request.is_http_1_0,
    )


def parse(pieces: list[bytes], limits: HttpLimits | None = None) -> tuple[list[tuple[object, ...]], int]:
    """Everything parsed from `pieces`, taking requests out as a connection would, and the refusal's status."""
    parser = RequestParser(limits or HttpLimits(), "127.0.0.1")
    requests = []
    for piece in pieces:
        rest = piece
        while rest:
            rest = parser.feed(rest)
            while parser.ready:
                requests.append(fields(parser.ready.popleft()))
            if parser.refusal is not None:
                return requests, parser.refusal.status
    return requests, 0


REFUSED = {
    "not http": (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", 400),
    "unknown method": (b"FOO / HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "lower-case method": (b"get / HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "no version": (b"GET /\r\nhost: a\r\n\r\n", 505),
    "0.9": (b"GET / HTTP/0.9\r\nhost: a\r\n\r\n", 505),
    "1.2": (b"GET / HTTP/1.2\r\nhost: a\r\n\r\n", 505),
    "2.0": (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
    "h2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n", 400),
    "two authorizations": (get(extra=b"authorization: a\r\nAuthorization: b\r\n"), 400),
    "two expects": (get(extra=b"expect: 100-continue\r\nexpect: 100-continue\r\n"), 400),
    "other expectation": (get(extra=b"expect: tea\r\n"), 417),
    "length and chunked": (
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunked and length": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        400,
    ),
    "two lengths": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc", 400),
    "gzip, chunked": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunked, identity": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        400,
    ),
    "two codings": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "identity": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\n\r\nabc", 400),
    "xchunked": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "vtab chunked": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "chunked in 1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "folded header": (b"GET / HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\n\r\n", 400),
    "space first": (b"GET / HTTP/1.1\r\n host: a\r\n\r\n", 400),
    "bare lf in head": (b"GET / HTTP/1.1\r\nhost: a\n\r\n", 400),
    "bare lf line": (b"GET / HTTP/1.1\nhost: a\n\n", 400),
    "bare cr": (b"GET / HTTP/1.1\r\nhost: a\rb: c\r\n\r\n", 400),
    "nul in value": (b"GET / HTTP/1.1\r\nhost: a\x00b\r\n\r\n", 400),
    "control in value": (b"GET / HTTP/1.1\r\nhost: a\x01b\r\n\r\n", 400),
    "del in value": (b"GET / HTTP/1.1\r\nhost: a\x7fb\r\n\r\n", 400),
    "space before colon": (b"GET / HTTP/1.1\r\nhost : a\r\n\r\n", 400),
    "empty name": (b"GET / HTTP/1.1\r\n: a\r\n\r\n", 400),
    "no colon": (b"GET / HTTP/1.1\r\nhost\r\n\r\n", 400),
    "bad name": (b"GET / HTTP/1.1\r\nho(st: a\r\n\r\n", 400),
    "name not ascii": (b"GET / HTTP/1.1\r\nh\x80st: a\r\n\r\n", 400),
    "target not a path": (b"GET x HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "target with fragment": (get(b"/a#b"), 400),
    "target with space": (get(b"/a b"), 400),
    "target with nul": (get(b"/a%00b"), 400),
    "target not utf-8": (get(b"/a%ff"), 400),
    "dot dot": (get(b"/v1/../admin"), 400),
    "dot dot encoded": (get(b"/v1/%2e%2E/admin"), 400),
    "dot dot behind slash encoded": (get(b"/v1%2f..%2fadmin"), 400),
    "chunk size 0x": (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
    "chunk size negative": (CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n", 400),
    "chunk size overflow": (CHUNKED + b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n", 400),
    "chunk size space": (CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n", 400),
    "chunk bare lf": (CHUNKED + b"3\nabc\n0\n\n", 400),
    "chunk too long": (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "chunk extension lf": (CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n", 400),
    "length in trailer": (CHUNKED + b"3\r\nabc\r\n0\r\ncontent-length: 5\r\n\r\n", 400),
    "url too long": (get(b"/" + b"a" * bounds.REQUEST_LINE_BYTES_MAX), 414),
    "url never ends": (b"GET /" + b"a" * 20_000, 414),
    "header too large": (get(extra=b"x: " + b"a" * bounds.HEADER_BYTES_MAX + b"\r\n"), 431),
    "header never ends": (b"GET / HTTP/1.1\r\nx: " + b"a" * 60_000, 431),
    "blank lines never end": (b"\r\n" * 30_000, 431),
    "too many headers": (get(extra=b"".join(b"x%d: a\r\n" % n for n in range(101))), 431),
    "too many headers of one name": (get(extra=b"x:\r\n" * 5000), 431),
    "body too large": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4194305\r\n\r\n", 413),
    "chunks too large": (CHUNKED + b"400001\r\n" + b"a" * 0x400001, 413),
    "mostly chunk framing": (CHUNKED + b"1;%b\r\na\r\n" % (b"x" * 100_000), 400),
    "endless trailers": (CHUNKED + b"1\r\na\r\n0\r\n" + b"x: y\r\n" * 20_000, 400),
}
for _bad in (b"+3", b"-3", b"3,3", b"3 4", b"0x3", b"", b"9" * 30, b"\xb23", b"3_0"):
    REFUSED[f"content-length {_bad!r}"] = (
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %b\r\n\r\nabc" % _bad,
        400,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_smuggled(name: str) -> None:
    data, status = REFUSED[name]
    smuggled = get(b"/smuggled")
    assert parse([data + smuggled]) == ([], status)
    # Byte by byte, of the long ones the ends: where a refusal comes must not depend on packets.
    pieces = [data[i : i + 1] for i in range(len(data))] if len(data) < 2000 else [data[:500], data[500:]]
    assert parse([*pieces, smuggled]) == ([], status)


def test_a_plain_request() -> None:
    data = (
        b"POST /v1/chat?a=%20b HTTP/1.1\r\nHost: a\r\nX-One:  1 \t\r\nx-one: 2\r\nContent-Length: 2\r\n\r\n{}"
    )
    headers = ((b"host", b"a"), (b"x-one", b"1, 2"), (b"content-length", b"2"))
    expected = ("POST", "/v1/chat", b"a=%20b", headers, b"{}", True, False)
    assert parse([data]) == ([expected], 0)
    assert parse([data[i : i + 1] for i in range(len(data))]) == ([expected], 0)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/", "/"),
        (b"//v1///models", "/v1/models"),
        (b"/v1/models/", "/v1/models/"),
        (b"/v1/models/org%2Fname", "/v1/models/org/name"),
        (b"/m%C3%BCller", "/müller"),
        (b"/a.b/..c/.d", "/a.b/..c/.d"),
        (b"http://host:1/v1?x", "/v1"),
        (b"http://host", "/"),
        (b"//", "/"),
    ],
)
def test_paths(target: bytes, path: str) -> None:
    requests, status = parse([get(target)])
    assert status == 0
    assert requests[0][1] == path


def test_options_star() -> None:
    requests, _ = parse([b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n"])
    assert requests[0][:2] == ("OPTIONS", "*")


@pytest.mark.parametrize(
    "data",
    [
        b"POST /x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nabc",
        b"POST /x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: h2c\r\n"
        b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_upgrade_is_ignored_and_the_body_kept(data: bytes) -> None:
    """Java's client asks for h2c on every POST in clear; its body must not be lost."""
    for pieces in ([data + get(b"/next")], [data[i : i + 1] for i in range(len(data))] + [get(b"/next")]):
        requests, status = parse(pieces)
        assert status == 0
        assert [(r[0], r[1], r[4], r[5]) for r in requests] == [
            ("POST", "/x", b"abc", True),
            ("GET", "/next", b"", True),
        ]
    assert b"h2c" in dict(requests[0][3])[b"upgrade"]  # type: ignore[arg-type, call-overload]


def test_nothing_after_connection_close() -> None:
    requests, status = parse([get(extra=b"connection: close\r\n") + get(b"/smuggled"), get(b"/later")])
    assert status == 0
    assert [r[1] for r in requests] == ["/x"]


def test_a_refusal_waits_behind_the_good_request_before_it() -> None:
    parser = RequestParser(HttpLimits(), "")
    parser.feed(get() + b"BAD\r\n\r\n")
    assert len(parser.ready) == 1
    assert parser.refusal is not None
    assert parser.refusal.status == 400


def test_pipelining_makes_few_objects_at_a_time() -> None:
    parser = RequestParser(HttpLimits(), "")
    data = get(b"/") * 10_000
    rest = parser.feed(data)
    assert len(parser.ready) < 200
    assert len(rest) > len(data) - 2 * bounds.PARSE_BYTES_PER_STEP


def test_headers_up_to_the_bound_are_taken() -> None:
    limits = HttpLimits(header_bytes_max=2000)
    name_and_host = len(b"host") + len(b"a") + len(b"x") + 8
    for size, status in ((2000 - name_and_host, 0), (2000 - name_and_host + 1, 431)):
        data = get(extra=b"x: " + b"a" * size + b"\r\n")
        assert parse([data], limits)[1] == status
        assert parse([data[i : i + 1] for i in range(len(data))], limits)[1] == status


def test_a_body_in_tiny_chunks_takes_about_its_size() -> None:
    parser = RequestParser(HttpLimits(), "")
    parser.feed(CHUNKED)
    tracemalloc.start()
    try:
        for _ in range(100):
            parser.feed(b"2\r\nab\r\n" * 2500)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 1_000_000
    parser.feed(b"0\r\n\r\n")
    assert parser.ready[0].body == b"ab" * 250_000


MESSAGES = st.lists(
    st.sampled_from(
        [
            get(),
            get(b"/a%20b?c=d"),
            get(b"/old", extra=b"connection: keep-alive\r\n"),
            post(b""),
            post(b"x" * 5000),
            post(b"abc", extra=b"expect: 100-continue\r\n"),
            CHUNKED + b"3\r\nabc\r\n10;e=f\r\n0123456789abcdef\r\n0\r\nx: y\r\n\r\n",
            b"POST /u HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nabc",
            b"GET /1.0 HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
            b"\r\n" + get(b"/after-blank"),
            get(extra=b"connection: close\r\n"),
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        ]
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 30_000), max_size=30))
def test_any_chunking_parses_the_same(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(messages)
    at = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(at)]
    assert parse(pieces) == parse([data])
