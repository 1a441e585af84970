"""The catalogue of refusals: every error a client of `/v1` can get, each built in one place.

Bodies follow OpenAI's form, `{"error": {"message", "type", "param", "code"}}`; a 429 carries
`limit_type` and its figures beside them. `x-should-retry: false` stands wherever a repeat cannot
help, because the official clients obey it.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.api.queue_facts import QueueFacts
from headrace.errors import Refusal

NO_RETRY: Final = ("x-should-retry", "false")

_encode = msgspec.json.Encoder().encode


def body(refusal: Refusal) -> bytes:
    """The JSON reply of a refusal."""
    return _encode({"error": error_object(refusal)})


def error_object(refusal: Refusal) -> dict[str, Any]:
    """The `error` object alone, as it also stands in an error event of a stream."""
    error: dict[str, Any] = {
        "message": refusal.message,
        "type": refusal.kind,
        "param": refusal.param,
        "code": refusal.code,
    }
    error.update(refusal.details)
    return error


def _invalid(
    message: str,
    *,
    code: str,
    param: str | None = None,
    status: int = 400,
    details: dict[str, Any] | None = None,
) -> Refusal:
    return Refusal(
        status=status,
        code=code,
        kind="invalid_request_error",
        message=message,
        param=param,
        headers=(NO_RETRY,),
        details=details,
    )


# --- 400: the request has to change ------------------------------------------------------------


def malformed(message: str) -> Refusal:
    """The body is not the JSON this route takes."""
    return _invalid(message, code="invalid_body")


def invalid_value(param: str, message: str) -> Refusal:
    """A known field holds something it must not hold."""
    return _invalid(message, code="invalid_value", param=param)


def unknown_field(param: str, allowed: str) -> Refusal:
    """A field nobody knows: never silently dropped."""
    return _invalid(f"Unknown field '{param}'. Known fields: {allowed}.", code="unknown_field", param=param)


def unsupported_field(param: str, message: str) -> Refusal:
    """A field of OpenAI's API that headrace does not serve (yet)."""
    return _invalid(message, code="unsupported_field", param=param)


def context_length_exceeded(*, prompt_tokens: int, context_tokens: int) -> Refusal:
    """The prompt leaves no room for an answer."""
    return _invalid(
        f"This model's context holds {context_tokens} tokens and at least one must be left for the answer; "
        f"your messages are {prompt_tokens} tokens. Shorten them to at most {context_tokens - 1}.",
        code="context_length_exceeded",
        param="messages",
        details={"prompt_tokens": prompt_tokens, "prompt_tokens_max": context_tokens - 1},
    )


def kv_tokens_exceeded(*, prompt_tokens: int, max_tokens: int, kv_tokens: int) -> Refusal:
    """Prompt and answer together would not fit into a worker's KV memory, even if nothing else ran."""
    room = kv_tokens - prompt_tokens
    return _invalid(
        f"This model's workers hold {kv_tokens} tokens; your messages are {prompt_tokens} tokens and you ask for up to "
        f"{max_tokens} more. Ask for at most {room}, or shorten the messages.",
        code="context_length_exceeded",
        param="max_tokens",
        details={"prompt_tokens": prompt_tokens, "max_tokens_max": room},
    )


def http_refused(status: int, code: str, message: str) -> Refusal:
    """Refused below the routes, by the HTTP layer."""
    if status >= 500:
        return Refusal(status=status, code=code, kind="server_error", message=message)
    return _invalid(message, code=code, status=status)


# --- 401, 403, 404, 405, 413 ---------------------------------------------------------------------


def invalid_key() -> Refusal:
    """No key, a bad one, an expired or a revoked one: one answer for all, so that it tells nothing."""
    return Refusal(
        status=401,
        code="invalid_api_key",
        kind="invalid_request_error",
        message="The API key is missing or not valid. Send 'Authorization: Bearer <key>' with a current key.",
        headers=(("WWW-Authenticate", 'Bearer realm="headrace"'), NO_RETRY),
    )


def missing_scope(scope: str) -> Refusal:
    return Refusal(
        status=403,
        code="missing_scope",
        kind="permission",
        message=f"This key lacks the scope '{scope}' that this request needs.",
        headers=(NO_RETRY,),
    )


def model_not_found(model: str) -> Refusal:
    return _invalid(
        f"The model '{model}' does not exist or this key may not use it. GET /v1/models lists the models.",
        code="model_not_found",
        param="model",
        status=404,
    )


def usage_not_found(request_id: str) -> Refusal:
    return _invalid(
        f"No request '{request_id}' of this tenant is known.", code="request_not_found", status=404
    )


def session_not_found(session_id: str) -> Refusal:
    return _invalid(
        f"There is no session '{session_id}' of this tenant; it may have ended. POST /v1/sessions begins one.",
        code="session_not_found",
        param="session_id",
        status=404,
    )


def no_such_route(method: str, path: str) -> Refusal:
    return _invalid(f"There is no route {method} {path}.", code="route_not_found", status=404)


def method_not_allowed(method: str, path: str, allowed: str) -> Refusal:
    refusal = _invalid(
        f"{path} does not take {method}; it takes {allowed}.", code="method_not_allowed", status=405
    )
    refusal.headers = (*refusal.headers, ("Allow", allowed))
    return refusal


def unsupported_media_type(content_type: str) -> Refusal:
    return _invalid(
        f"The body must be JSON (Content-Type: application/json), not '{content_type}'.",
        code="unsupported_media_type",
        status=415,
    )


# --- 429: later ------------------------------------------------------------------------------------


def _rate_limited(
    limit_type: str, message: str, *, retry_after_s: int, figures: Mapping[str, Any]
) -> Refusal:
    return Refusal(
        status=429,
        code="rate_limit_exceeded",
        kind="requests",
        message=message,
        headers=(
            ("Retry-After", str(retry_after_s)),
            ("X-Governance-Action", "THROTTLED"),
            ("X-RateLimit-Reason", _REASONS.get(limit_type) or limit_type.upper()),
        ),
        details={"limit_type": limit_type, **figures},
    )


def limit_exceeded(
    *,
    limit_type: str,
    level: str,
    limit: float,
    used: float | None,
    held: float | None,
    requested: float,
    retry_after_s: int | None,
    reset_ts: int | None,
) -> Refusal:
    """A limit stands against the request. Without `retry_after_s` it can never pass as it is. Memory is in GB."""
    unit = _UNITS.get(limit_type, limit_type.replace("_", " "))
    whose = _WHOSE.get(level, f"{level}'s limit")
    if retry_after_s is None:
        message = f"This request takes {requested}{_GIVEN_IN.get(limit_type, '')}, more than the {whose} of {limit:g} {unit} ever allows."
    elif limit_type == "memory" and held is not None:
        message = (
            f"The {whose} of {limit:g} {unit} is reached: {held:g} held by requests on workers, {requested:g} more "
            "requested."
        )
    elif used is None:
        message = f"The {whose} of {limit:g} {unit} is reached; {requested} more requested."
    else:
        message = (
            f"The {whose} of {limit:g} {unit} is reached: {used} used, {held} held, "
            f"{requested} more requested."
        )
    figures = {
        "level": level,
        "limit": limit,
        "used": used,
        "held": held,
        "requested": requested,
        "reset_time": reset_ts,
    }
    refusal = _rate_limited(limit_type, message, retry_after_s=retry_after_s or 0, figures=figures)
    refusal.kind = "tokens" if limit_type in ("tpm", "prompt_tokens", "total_tokens") else "requests"
    if retry_after_s is None:
        refusal.headers = (*refusal.headers[1:], NO_RETRY)
    return refusal


_WHOSE: Final = {"tenant_model": "tenant's limit for this model"}
_GIVEN_IN: Final = {"memory": " GB"}
_REASONS: Final = {"memory": "GPU_MEMORY_EXCEEDED"}
_UNITS: Final = {
    "rps": "requests per second",
    "tpm": "tokens per minute",
    "concurrency": "requests at once",
    "streams": "streams at once",
    "prompt_tokens": "tokens in a prompt",
    "total_tokens": "tokens in a request",
    "memory": "GB of GPU memory",
}


def queue_full(*, level: str, bound: str, limit: int, used: int, queue: QueueFacts | None = None) -> Refusal:
    """All places in the queue, or in the tenant's part of it, are taken."""
    whose = "the queue is full" if level == "model" else "this tenant's part of the queue is full"
    refusal = _rate_limited(
        "queue_full",
        f"All workers are busy and {whose} ({used} of {limit} {bound}). Try again shortly.",
        retry_after_s=1,
        figures={"level": level, "limit": limit, "used": used, "held": used, "requested": 1, "unit": bound},
    )
    return _with_queue(refusal, queue)


def queue_displaced(*, queue: QueueFacts | None = None) -> Refusal:
    """The queue was full, this tenant had the most in it, and another tenant came."""
    refusal = _rate_limited(
        "queue_full",
        "The queue is full and this tenant has the most in it, so its newest request made room for another "
        "tenant's. Try again shortly.",
        retry_after_s=1,
        figures={"level": "tenant", "limit": None, "used": None, "held": None, "requested": 1},
    )
    return _with_queue(refusal, queue)


def queue_timeout(*, limit_s: float, queue: QueueFacts | None = None) -> Refusal:
    refusal = _rate_limited(
        "queue_timeout",
        f"No worker became free within {limit_s:g} s.",
        retry_after_s=2,
        figures={"level": "model", "limit": limit_s, "used": limit_s, "requested": 1},
    )
    return _with_queue(refusal, queue)


def _with_queue(refusal: Refusal, queue: QueueFacts | None) -> Refusal:
    """What is known of the queue stands in the body, and in part in headers. Those of a wait are added where it ends."""
    if queue is None:
        return refusal
    refusal.details["queue"] = msgspec.to_builtins(queue)
    refusal.headers = (
        *refusal.headers,
        ("X-Queue-Length", str(queue.length)),
        ("X-Queue-Length-Max", str(queue.length_max)),
    )
    if queue.position is None:
        refusal.headers = (*refusal.headers, ("X-Queue-Share", f"{queue.share:.4f}"))
    return refusal


# --- 5xx: not the client's fault ---------------------------------------------------------------------


def no_worker(model: str, *, retry_after_s: int) -> Refusal:
    return Refusal(
        status=503,
        code="no_healthy_worker",
        kind="server_error",
        message=f"No worker for the model '{model}' is ready.",
        headers=(("Retry-After", str(retry_after_s)),),
    )


def shutting_down() -> Refusal:
    return Refusal(
        status=503,
        code="shutting_down",
        kind="server_error",
        message="This server is shutting down and takes no new requests.",
        headers=(("Retry-After", "5"),),
    )


def store_unavailable() -> Refusal:
    return Refusal(
        status=503,
        code="ledger_unavailable",
        kind="server_error",
        message="The ledger cannot record requests at the moment, so none is served.",
        headers=(("Retry-After", "5"),),
    )


def worker_lost() -> Refusal:
    return Refusal(
        status=502,
        code="worker_lost",
        kind="server_error",
        message="The worker that was answering this request died. What it had generated is on the usage record.",
        headers=(("Retry-After", "2"),),
    )


def lease_expired() -> Refusal:
    return Refusal(
        status=502,
        code="lease_expired",
        kind="server_error",
        message="The worker that was answering this request knows nothing of it any more.",
        headers=(("Retry-After", "2"),),
    )


def worker_fault(message: str) -> Refusal:
    return Refusal(status=500, code="engine_error", kind="server_error", message=message)


def upstream_failed(message: str, *, status: int = 502) -> Refusal:
    return Refusal(status=status, code="upstream_error", kind="server_error", message=message)


def upstream_refused(status: int, message: str) -> Refusal:
    """The upstream found fault with the client's request."""
    return _invalid(
        f"The upstream refused this request: {message or 'it gave no reason.'}",
        code="upstream_refused",
        status=status,
    )


def upstream_unreachable(model: str) -> Refusal:
    refusal = upstream_failed(f"The upstream that serves '{model}' cannot be reached.", status=503)
    refusal.headers = (("Retry-After", "5"),)
    return refusal


def deadline_passed(seconds: float) -> Refusal:
    return Refusal(
        status=504,
        code="deadline_exceeded",
        kind="server_error",
        message=f"The answer was not finished within {seconds:g} s.",
    )


def internal_error() -> Refusal:
    return Refusal(
        status=500,
        code="internal_error",
        kind="server_error",
        message="headrace failed while serving this request; the log has the details under this request id.",
    )
