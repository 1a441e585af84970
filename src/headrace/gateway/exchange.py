"""One request and its reply at the gateway: ids, headers, and what the log line will say."""

import re
from typing import Any, Final

from headrace.api import refusals
from headrace.errors import Refusal
from headrace.gateway.ids import IdSource
from headrace.http import HttpRequest, Responder
from headrace.identity import Identity
from headrace.ledger.records import OperationRecord
from headrace.scheduling.explain import Explanation

_TRACEPARENT: Final = re.compile(rb"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")

EXPOSED: Final = (
    "X-Request-ID",
    "X-Trace-ID",
    "X-Usage-Token-In",
    "X-Usage-Token-Out",
    "X-Usage-GPU-Memory",
    "X-Queue-Wait-Ms",
    "X-Queue-Position",
    "X-Queue-Position-Min",
    "X-Queue-Reason",
    "X-Queue-Share",
    "X-Queue-Length",
    "X-Queue-Length-Max",
    "X-Governance-Action",
    "X-RateLimit-Reason",
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "RateLimit",
    "RateLimit-Policy",
    "X-Max-Tokens",
    "X-Model",
    "Retry-After",
    "x-should-retry",
)
"""Reply headers that a browser's script may read."""

_COMMON: Final = b"access-control-expose-headers: " + ", ".join(EXPOSED).encode() + b"\r\n"
_JSON: Final = b"content-type: application/json\r\n"
_STREAM: Final = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)


class Exchange:
    """What a request carries with it through the gateway."""

    __slots__ = (
        "began_us",
        "hex_id",
        "identity",
        "is_stream",
        "limit_headers",
        "model",
        "queue_headers",
        "record",
        "request",
        "responder",
        "route",
        "status",
        "trace_id",
        "wait",
    )

    def __init__(self, request: HttpRequest, responder: Responder, ids: IdSource, began_us: int) -> None:
        self.request = request
        self.responder = responder
        self.began_us = began_us
        self.hex_id = ids.hex_id()
        self.trace_id = _trace_id(request.headers.get(b"traceparent")) or ids.trace_id()
        self.route = "unknown"
        self.status = 0
        self.identity: Identity | None = None
        self.model: str | None = None
        self.is_stream = False
        self.record: OperationRecord | None = None
        self.limit_headers = b""
        """What the caller's limits leave it, where there are any."""
        self.wait: Explanation | None = None
        self.queue_headers = b""
        """Of a request that had to wait: how long, and why."""

    @property
    def request_id(self) -> str:
        return f"req_{self.hex_id}"

    @property
    def completion_id(self) -> str:
        return f"chatcmpl-{self.hex_id}"

    @property
    def traceparent(self) -> str:
        """For the next hop: the same trace, a span of its own."""
        return f"00-{self.trace_id}-{self.hex_id[-16:]}-00"

    def send_json(self, body: bytes, *, status: int = 200, headers: bytes = b"") -> None:
        self.status = status
        self.responder.send(status, id_headers(self.hex_id, self.trace_id) + _JSON + headers, body)

    def start_stream(self) -> None:
        self.status = 200
        self.is_stream = True
        headers = id_headers(self.hex_id, self.trace_id) + _STREAM + self.limit_headers + self.queue_headers
        self.responder.start(200, headers)

    def refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal that still has its status."""
        self.status = refusal.status
        self.responder.send(
            refusal.status,
            id_headers(self.hex_id, self.trace_id) + refusal_headers(refusal) + self.queue_headers,
            refusals.body(refusal),
        )

    def waited(self, wait: Explanation, waited_us: int | None) -> None:
        """The request had to wait, by now for so long; None as long as it still does."""
        self.wait = wait
        self.queue_headers = queue_headers(wait, waited_us)

    def log_fields(self, now_us: int) -> dict[str, Any]:
        """The fields of the one log line."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "method": self.request.method,
            "route": self.route,
            "status": self.status,
            "client": self.request.client_address,
            "bytes_in": len(self.request.body),
            "bytes_out": self.responder.body_bytes_sent,
            "duration_ms": (now_us - self.began_us) // 1000,
        }
        if self.identity is not None:
            fields["tenant"] = self.identity.tenant
            fields["key"] = self.identity.jti
        if self.model is not None:
            fields["model"] = self.model
            fields["stream"] = self.is_stream
        wait = self.wait
        if wait is not None:
            fields["queue_position" if wait.is_exact else "queue_position_min"] = wait.position
            fields["queue_reason"] = wait.reason
            fields["queue_share"] = round(wait.tenant_share, 4)
        record = self.record
        if record is not None:
            fields["outcome"] = record.outcome
            fields["worker"] = record.worker_id
            fields["prompt_tokens"] = record.prompt_tokens
            fields["completion_tokens"] = record.completion_tokens
            fields["finish_reason"] = record.finish_reason
            if record.start_ts is not None:
                fields["queue_ms"] = max(0, record.start_ts - record.queue_enter_ts) // 1000
            if record.first_token_ts is not None:
                fields["first_token_ms"] = max(0, record.first_token_ts - record.queue_enter_ts) // 1000
        return fields


def id_headers(hex_id: str, trace_id: str) -> bytes:
    """The headers that every reply has."""
    return b"x-request-id: req_%b\r\nx-trace-id: %b\r\n%b" % (hex_id.encode(), trace_id.encode(), _COMMON)


def refusal_headers(refusal: Refusal) -> bytes:
    """A refusal's own headers."""
    return _JSON + "".join(f"{name}: {value}\r\n" for name, value in refusal.headers).encode()


def queue_headers(wait: Explanation, waited_us: int | None) -> bytes:
    """Where a request stood when it began to wait, why, and how long that took if it is known."""
    position = b"x-queue-position" if wait.is_exact else b"x-queue-position-min"
    headers = b"%b: %d\r\nx-queue-reason: %b\r\nx-queue-share: %.4f\r\n" % (
        position,
        wait.position,
        wait.reason.encode(),
        wait.tenant_share,
    )
    return headers if waited_us is None else headers + b"x-queue-wait-ms: %d\r\n" % (waited_us // 1000)


def usage_headers(record: OperationRecord) -> bytes:
    """What the request took, for replies that are sent when it is known."""
    return b"x-usage-token-in: %d\r\nx-usage-token-out: %d\r\nx-usage-gpu-memory: %.2f\r\n" % (
        record.prompt_tokens,
        record.completion_tokens,
        record.gpu_memory_mb / 1024,
    )


def _trace_id(traceparent: bytes | None) -> str | None:
    """The caller's trace id, if the header is well formed (W3C trace context)."""
    if traceparent is None:
        return None
    match = _TRACEPARENT.match(traceparent)
    if match is None:
        return None
    version, trace_id, span_id, _, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return trace_id.decode()
