"""What every request of the admin API passes, present routes and future ones: size, time, identity.

Outside of FastAPI, so that nothing is parsed for a caller without a key. `GET /healthz` alone needs none.
"""

import asyncio
import contextlib
import secrets
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace import bounds
from headrace.admin.problems import Problem
from headrace.clock import Clock
from headrace.core.client import CoreClient, CoreUnavailable
from headrace.core.failure import ControlFailure
from headrace.core.messages import CheckAdminKey, Done
from headrace.identity import InvalidKey, KeyVerifier

BODY_BYTES_MAX: Final = 64 * 1024
BODY_SECONDS_MAX: Final = 10.0
DISCARDED_BYTES_MAX: Final = 16 * bounds.MIB
DISCARD_SECONDS_MAX: Final = 2.0
"""What is still read of a body that is refused as too large."""
OPEN_PATHS: Final = frozenset({"/healthz"})
ADMIN_SCOPE: Final = "admin:*"

_log = structlog.get_logger("headrace.admin")


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, verifier: KeyVerifier, core: CoreClient, clock: Clock) -> None:
        self._app = app
        self._verifier = verifier
        self._core = core
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request pass or answers it. The state gets `request_id` and `actor` (the key's `jti`)."""
        assert scope["type"] == "http", "neither lifespan nor websocket are turned on in the server"
        request_id = f"adm_{secrets.token_hex(12)}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        begun_us = self._clock.monotonic_us()

        async def send_and_log(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["cache-control"] = "no-store"
                _log.info(
                    "admin_request",
                    request_id=request_id,
                    method=scope["method"],
                    path=scope["path"],
                    status=message["status"],
                    actor=state.get("actor"),
                    duration_us=self._clock.monotonic_us() - begun_us,
                )
            await send(message)

        try:
            _check_head(scope)
            if scope["path"] not in OPEN_PATHS:
                state["actor"] = await self._authorize(Headers(scope=scope))
            receive = await _whole_body(Headers(scope=scope), receive)
        except Problem as problem:
            await problem.response(request_id)(scope, receive, send_and_log)
            return
        await self._app(scope, receive, send_and_log)

    async def _authorize(self, headers: Headers) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise _not_accepted()
        try:
            identity = self._verifier.verify(key.strip(), self._clock.wall_us())
            await self._core.call(CheckAdminKey(jti=identity.jti), Done)
        except InvalidKey as error:
            _log.warning("admin_key_refused", reason=error.reason)
            raise _not_accepted() from None
        except ControlFailure as failure:
            _log.warning("admin_key_refused", reason=failure.code, jti=identity.jti)
            raise _not_accepted() from None
        except CoreUnavailable as error:
            raise core_unavailable() from error
        if ADMIN_SCOPE not in identity.scopes:
            raise Problem(403, "missing_scope", f"this needs a key with the scope {ADMIN_SCOPE}")
        return identity.jti


def _check_head(scope: Scope) -> None:
    """The server bounds what it buffers, not a head that arrives in one piece."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > bounds.HEADER_BYTES_MAX:
        raise Problem(431, "headers_too_large", f"a head has at most {bounds.HEADER_BYTES_MAX} bytes")


def core_unavailable() -> Problem:
    """The same for every route. Nothing is said about why; the log knows."""
    return Problem(
        503,
        "core_unavailable",
        "the core does not answer; a change may or may not have been made",
        headers={"retry-after": "1"},
    )


def _not_accepted() -> Problem:
    """One text for all reasons: it must not tell whether a key exists."""
    return Problem(
        401,
        "invalid_key",
        "send an admin key as `Authorization: Bearer hr_admin_...`; this one is missing or not accepted",
        headers={"www-authenticate": "Bearer", "x-should-retry": "false"},
    )


async def _whole_body(headers: Headers, receive: Receive) -> Receive:
    """Reads the body, bounded in size and time, and returns a `receive` that gives it at once."""
    body = bytearray()
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise _too_large()
    if int(length[:16]) > BODY_BYTES_MAX:
        await _discard(receive)
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            has_more = True
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    break
                body += message.get("body", b"")
                has_more = message.get("more_body", False)
                if len(body) > BODY_BYTES_MAX:
                    await _discard(receive)
                    raise _too_large()
    except TimeoutError as error:
        raise Problem(
            408, "body_too_slow", f"a body has to arrive within {BODY_SECONDS_MAX:.0f} s"
        ) from error
    pending: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def _discard(receive: Receive) -> None:
    """Read on for a while and drop it: a client that is cut off while it sends may never see the answer."""
    left = DISCARDED_BYTES_MAX
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS_MAX):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large() -> Problem:
    return Problem(
        413, "body_too_large", f"a body has at most {BODY_BYTES_MAX} bytes", headers={"connection": "close"}
    )
