"""`POST /v1/chat/completions`: a request's whole life.

    decode ─▶ identify ─▶ accept (place in the queue, reservation journalled) ─▶ grant
           ─▶ relay the worker's answer ─▶ settle (record durable) ─▶ the reply's last bytes

Leaving at any point is an exception: a `Refusal` becomes the reply, a cancellation means that the
client is gone. The operation's scope gives everything back and writes the one record either way.
"""

import asyncio
import secrets

from headrace import bounds
from headrace.api import chat, completion, refusals
from headrace.api.chat import ChatCall
from headrace.clock import Clock
from headrace.config.settings import Settings
from headrace.core.core import Core
from headrace.core.operation import Operation
from headrace.core.replica import Answer, Task
from headrace.errors import Refusal
from headrace.gateway.exchange import Exchange, usage_headers
from headrace.gateway.identify import require_scope
from headrace.identity import Identity
from headrace.ledger.records import Reservation
from headrace.request.sampling import Sampling

_MESSAGE_OVERHEAD_TOKENS = 16
"""What a chat template adds to a message, at most, in the estimate."""


class ChatCompletions:
    """The route's handler."""

    def __init__(self, core: Core, settings: Settings, clock: Clock) -> None:
        self._core = core
        self._settings = settings
        self._clock = clock

    async def __call__(self, exchange: Exchange, identity: Identity) -> None:
        require_scope(identity, "chat:read")
        call = chat.decode(_json_body(exchange))
        if call.is_stream:
            require_scope(identity, "chat:stream")
        exchange.model = call.model
        exchange.is_stream = call.is_stream
        operation = self._core.accept(self._reservation(exchange, identity, call))
        try:
            async with operation:
                await self._within_deadline(exchange, operation, call)
        finally:
            exchange.record = operation.record

    async def _within_deadline(self, exchange: Exchange, operation: Operation, call: ChatCall) -> None:
        """Answer; the deadline is set once a worker is granted, waiting has a limit of its own."""
        try:
            async with asyncio.timeout(None) as deadline:
                if call.is_stream:
                    await self._stream(exchange, operation, call, deadline)
                else:
                    await self._complete(exchange, operation, call, deadline)
        except TimeoutError:
            raise refusals.deadline_passed(self._settings.request_timeout_s) from None

    async def _complete(
        self, exchange: Exchange, operation: Operation, call: ChatCall, deadline: asyncio.Timeout
    ) -> None:
        if not await operation.granted(self._settings.queue.timeout_s):
            raise self._queue_timeout()
        answer = self._start(exchange, operation, call, deadline)
        await answer.begin()
        body = await answer.complete()
        record = await operation.settle()
        exchange.send_json(body, headers=usage_headers(record))

    async def _stream(
        self, exchange: Exchange, operation: Operation, call: ChatCall, deadline: asyncio.Timeout
    ) -> None:
        await self._wait_for_grant(exchange, operation)
        answer = self._start(exchange, operation, call, deadline)
        await answer.begin()
        responder = exchange.responder
        if not responder.has_started:
            exchange.start_stream()
        async for data in answer.stream(quiet_s=self._settings.keep_alive_ms / 1000):
            if not responder.write(data or completion.KEEP_ALIVE):
                await responder.drain()
        await operation.settle()
        responder.write(answer.ending())
        responder.end()

    async def _wait_for_grant(self, exchange: Exchange, operation: Operation) -> None:
        """Hold the headers back for a while, so that a refusal keeps its status; then keep the client warm."""
        settings = self._settings
        limit_s = settings.queue.timeout_s
        waited_s = min(settings.headers_after_ms / 1000, limit_s)
        if await operation.granted(waited_s):
            return
        while waited_s < limit_s:
            if not exchange.responder.has_started:
                exchange.start_stream()
            exchange.responder.write(completion.KEEP_ALIVE)
            pause_s = min(settings.keep_alive_ms / 1000, limit_s - waited_s)
            if await operation.granted(pause_s):
                return
            waited_s += pause_s
        raise self._queue_timeout()

    def _start(
        self, exchange: Exchange, operation: Operation, call: ChatCall, deadline: asyncio.Timeout
    ) -> Answer:
        deadline.reschedule(asyncio.get_running_loop().time() + self._settings.request_timeout_s)
        waited_us = operation.granted_us - operation.accepted_us
        self._core.metrics.overhead.observe(
            max(0, self._clock.monotonic_us() - exchange.began_us - waited_us) / 1e6
        )
        return operation.start(
            Task(
                attempt_id=operation.attempt_id,
                tenant_id=operation.reservation.tenant_id,
                completion_id=exchange.completion_id,
                created_s=self._clock.wall_us() // 1_000_000,
                model=call.model,
                call=call,
                sampling=call.sampling(self._defaults(operation)),
                body=exchange.request.body,
                traceparent=exchange.traceparent,
            )
        )

    def _defaults(self, operation: Operation) -> Sampling:
        model = operation.model.sampling
        return Sampling(
            temperature=model.temperature,
            top_p=model.top_p,
            top_k=model.top_k,
            seed=secrets.randbits(32),
        )

    def _reservation(self, exchange: Exchange, identity: Identity, call: ChatCall) -> Reservation:
        # A token stands for at least one byte, so the bytes of a prompt bound its tokens from above.
        estimated = sum(len(message.content.encode()) for message in call.messages)
        estimated += _MESSAGE_OVERHEAD_TOKENS * (len(call.messages) + 1)
        return Reservation(
            request_id=exchange.request_id,
            tenant_id=identity.tenant,
            api_key_id=identity.jti,
            user_id=call.user or identity.user,
            model=call.model,
            mode="stream" if call.is_stream else "complete",
            prompt_tokens_estimated=estimated,
            reserved_tokens=estimated + self._maximum(call),
            queue_enter_ts=self._clock.wall_us(),
            trace_id=exchange.trace_id,
        )

    def _maximum(self, call: ChatCall) -> int:
        model = self._core.models.get(call.model)
        context = model.context_tokens if model else None
        return min(call.max_tokens or bounds.MAX_TOKENS_MAX, context or bounds.RESERVED_TOKENS_DEFAULT)

    def _queue_timeout(self) -> Refusal:
        limit_s = self._settings.queue.timeout_s
        return refusals.queue_timeout(waited_s=limit_s, limit_s=limit_s)


def _json_body(exchange: Exchange) -> bytes:
    """The body, if it claims to be JSON or claims nothing."""
    content_type = exchange.request.headers.get(b"content-type", b"application/json")
    kind = content_type.partition(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise refusals.unsupported_media_type(kind.decode("latin-1")[:80])
    return exchange.request.body
