"""The gateway: routes, and the boundary at which every error becomes a reply and every request a log line."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from headrace.api import completion, refusals
from headrace.clock import Clock
from headrace.config.settings import Settings
from headrace.core.core import Core
from headrace.errors import Refusal
from headrace.gateway.chat import ChatCompletions
from headrace.gateway.exchange import Exchange, id_headers, refusal_headers
from headrace.gateway.identify import Identifier
from headrace.gateway.ids import IdSource
from headrace.gateway.reads import Reads
from headrace.gateway.sessions import SessionRoutes
from headrace.http import HttpRequest, Responder
from headrace.identity import Identity
from headrace.telemetry.request_log import RequestLog

Route = Callable[[Exchange, Identity], Awaitable[None]]

_CLIENT_CLOSED_STATUS: Final = 499
HEALTH: Final = "/healthz"
_log = structlog.get_logger()


class Gateway:
    """Answers HTTP requests. `handle` is the handler of `headrace.http.HttpServer`."""

    def __init__(
        self, core: Core, identifier: Identifier, settings: Settings, clock: Clock, log: RequestLog
    ) -> None:
        self._core = core
        self._identifier = identifier
        self._clock = clock
        self._ids = IdSource(clock)
        self._request_log = log
        self._reads = Reads(core)
        chat = ChatCompletions(core, settings, clock)
        sessions = SessionRoutes(core)
        # Exact paths first, then prefixes: {path: {method: handler}}.
        self._exact: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": chat},
            "/v1/models": {"GET": self._reads.models},
            "/v1/limits": {"GET": self._reads.limits},
            "/v1/queue": {"GET": self._reads.queue},
            "/v1/sessions": {"POST": sessions.begin},
        }
        self._prefixes: dict[str, dict[str, Route]] = {
            "/v1/models/": {"GET": self._reads.model},
            "/v1/usage/": {"GET": self._reads.usage},
            "/v1/sessions/": {"GET": sessions.show, "DELETE": sessions.end},
        }

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        exchange = Exchange(request, responder, self._ids, self._clock.monotonic_us())
        try:
            await self._route(exchange)
        except Refusal as refusal:
            self._refuse(exchange, refusal)
        except asyncio.CancelledError:
            exchange.status = _CLIENT_CLOSED_STATUS
            raise
        except Exception:  # noqa: BLE001
            # The one place that catches everything: the client gets an answer, the log the whole story.
            _log.exception("request_failed", request_id=exchange.request_id)
            self._refuse(exchange, refusals.internal_error())
        finally:
            self._core.metrics.replied(exchange.route, exchange.status)
            if exchange.route != HEALTH:  # probes would drown everything else
                self._request_log.write(exchange.log_fields(self._clock.monotonic_us()))

    def check_head(self, request: HttpRequest) -> tuple[int, bytes, bytes] | None:
        """Refuse a request without a valid key before its body is read: strangers cost no memory."""
        headers = request.headers
        if request.path == HEALTH or not (b"content-length" in headers or b"transfer-encoding" in headers):
            return None
        try:
            self._identifier.identify(request)
        except Refusal as refusal:
            route, _ = self._find(request.path)
            hex_id, trace_id = self._ids.hex_id(), self._ids.trace_id()
            self._core.metrics.replied(route, refusal.status)
            self._request_log.write(
                {
                    "request_id": f"req_{hex_id}",
                    "trace_id": trace_id,
                    "method": request.method,
                    "route": route,
                    "status": refusal.status,
                    "client": request.client_address,
                }
            )
            return (
                refusal.status,
                id_headers(hex_id, trace_id) + refusal_headers(refusal),
                refusals.body(refusal),
            )
        return None

    def render_refusal(self, status: int, code: str, message: str) -> tuple[bytes, bytes]:
        """(headers, body) of what the HTTP layer refuses before a request exists."""
        self._core.metrics.replied("http", status)
        refusal = refusals.http_refused(status, code, message)
        headers = id_headers(self._ids.hex_id(), self._ids.trace_id()) + refusal_headers(refusal)
        return headers, refusals.body(refusal)

    def on_error(self, request: HttpRequest, responder: Responder, error: Exception) -> None:
        """Called by the HTTP layer if `handle` itself failed, which is a bug."""
        _log.error("handler_failed", error=repr(error), method=request.method, path=request.path)
        if not responder.has_started:
            responder.send(
                500, b"content-type: application/json\r\n", refusals.body(refusals.internal_error())
            )
        elif not responder.is_closed:
            responder.abort()

    async def _route(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.path == HEALTH and request.method in ("GET", "HEAD"):
            exchange.route = HEALTH
            await self._reads.health(exchange)
            return
        exchange.route, methods = self._find(request.path)
        exchange.identity = self._identifier.identify(request)
        if methods is None:
            raise refusals.no_such_route(request.method[:20], request.path[:200])
        method = "GET" if request.method == "HEAD" else request.method
        route = methods.get(method)
        if route is None:
            raise refusals.method_not_allowed(request.method[:20], request.path[:200], ", ".join(methods))
        await route(exchange, exchange.identity)

    def _find(self, path: str) -> tuple[str, dict[str, Route] | None]:
        """The route's name for logs and metrics, and its handlers by method."""
        methods = self._exact.get(path)
        if methods is not None:
            return path, methods
        for prefix, handlers in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return prefix + "{id}", handlers
        return "unknown", None

    def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """A refusal as a reply or, in a stream that has begun, as its last event: never a clean end."""
        responder = exchange.responder
        if not responder.has_started:
            exchange.refuse(refusal)
            return
        exchange.status = refusal.status
        if not responder.is_closed:
            responder.write(completion.error_event(refusals.error_object(refusal)))
            responder.end()
