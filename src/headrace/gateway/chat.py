"""`POST /v1/chat/completions`: a request's whole life.

    decode ─▶ identify ─▶ accept (place in the queue, reservation journalled) ─▶ grant
           ─▶ relay the worker's answer ─▶ settle (record durable) ─▶ the reply's last bytes

Leaving at any point is an exception: a `Refusal` becomes the reply, a cancellation means that the
client is gone. The operation's scope gives everything back and writes the one record either way.
"""

from headrace.api import chat, completion, refusals
from headrace.api.chat import ChatCall
from headrace.caching.slots import CacheOrder
from headrace.clock import Clock
from headrace.config.settings import Settings
from headrace.core.core import Core
from headrace.core.operation import Operation
from headrace.core.replica import Answer, ReplicaBusy, Task
from headrace.gateway.acceptance import Acceptance, action_headers
from headrace.gateway.exchange import Exchange, usage_headers
from headrace.gateway.identify import require_scope
from headrace.identity import Identity


class ChatCompletions:
    """The route's handler."""

    def __init__(self, core: Core, settings: Settings, clock: Clock) -> None:
        self._core = core
        self._acceptance = Acceptance(core, clock)
        self._settings = settings
        self._clock = clock

    async def __call__(self, exchange: Exchange, identity: Identity) -> None:
        require_scope(identity, "chat:read")
        call = chat.decode(_json_body(exchange))
        if call.max_tokens is None and self._settings.require_max_tokens:
            raise refusals.invalid_value("max_tokens", "This server requires a maximum: set max_tokens.")
        if call.is_stream:
            require_scope(identity, "chat:stream")
        exchange.model = call.model
        exchange.is_stream = call.is_stream
        cache = self._cache(identity, call)
        operation, call = await self._acceptance.accept(exchange, identity, call, cache)
        exchange.model = call.model
        exchange.limit_headers = self._core.accounts.headers(operation.entry.accounts)
        exchange.limit_headers += action_headers(call, operation)
        try:
            async with operation:
                if call.is_stream:
                    await self._stream(exchange, operation, call, cache)
                else:
                    await self._complete(exchange, operation, call, cache)
        finally:
            exchange.record = operation.record
            if operation.wait is not None and exchange.wait is None:  # it ended where it waited
                exchange.waited(operation.wait, self._clock.monotonic_us() - operation.accepted_us)

    def _cache(self, identity: Identity, call: ChatCall) -> CacheOrder:
        model = self._core.models.get(call.model)
        if model is None:
            raise refusals.model_not_found(call.model)
        return self._core.cache_orders.of(model, identity, call)

    async def _complete(
        self, exchange: Exchange, operation: Operation, call: ChatCall, cache: CacheOrder
    ) -> None:
        answer = await self._begin(exchange, operation, call, cache)
        body = await answer.complete()
        record = await operation.settle()
        headers = usage_headers(record) + exchange.limit_headers + exchange.queue_headers
        exchange.send_json(body, headers=headers)

    async def _stream(
        self, exchange: Exchange, operation: Operation, call: ChatCall, cache: CacheOrder
    ) -> None:
        answer = await self._begin(exchange, operation, call, cache)
        responder = exchange.responder
        if not responder.has_started:
            exchange.start_stream()
        async for data in answer.stream(quiet_s=self._settings.keep_alive_ms / 1000):
            if not responder.write(data or completion.KEEP_ALIVE):
                await responder.drain()
        await operation.settle()
        responder.write(answer.ending())
        responder.end()

    async def _begin(
        self, exchange: Exchange, operation: Operation, call: ChatCall, cache: CacheOrder
    ) -> Answer:
        """Wait for a replica and start on it; should it be full after all, wait on as the next one."""
        while True:
            if call.is_stream:
                await self._wait_for_grant(exchange, operation)
            else:
                await operation.granted()
            if operation.wait is not None:
                exchange.waited(operation.wait, operation.granted_us - operation.accepted_us)
            answer = operation.start(self._task(exchange, operation, call, cache))
            try:
                await answer.begin()
            except ReplicaBusy as busy:
                operation.put_back(busy)
                continue
            self._core.begun(operation, answer)
            return answer

    async def _wait_for_grant(self, exchange: Exchange, operation: Operation) -> None:
        """Hold the headers back for a while, so that a refusal keeps its status; then keep the client warm."""
        if await operation.granted(self._settings.headers_after_ms / 1000):
            return
        while True:
            if not exchange.responder.has_started:
                if operation.wait is not None:
                    exchange.waited(operation.wait, None)  # the headers leave before the wait has ended
                exchange.start_stream()
            exchange.responder.write(completion.KEEP_ALIVE)
            if await operation.granted(self._settings.keep_alive_ms / 1000):
                return

    def _task(self, exchange: Exchange, operation: Operation, call: ChatCall, cache: CacheOrder) -> Task:
        waited_us = operation.granted_us - operation.accepted_us
        self._core.metrics.handed_over(max(0, self._clock.monotonic_us() - exchange.began_us - waited_us))
        return Task(
            attempt_id=operation.next_attempt_id(),
            tenant_id=operation.reservation.tenant_id,
            completion_id=exchange.completion_id,
            created_s=self._clock.wall_us() // 1_000_000,
            model=call.model,
            call=call,
            max_tokens=operation.size.maximum,
            is_limited=operation.size.is_limited,
            sampling_defaults=operation.model.sampling,
            cache=cache,
            body=exchange.request.body,
            traceparent=exchange.traceparent,
        )


def _json_body(exchange: Exchange) -> bytes:
    """The body, if it claims to be JSON or claims nothing."""
    content_type = exchange.request.headers.get(b"content-type", b"application/json")
    kind = content_type.partition(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise refusals.unsupported_media_type(kind.decode("latin-1")[:80])
    return exchange.request.body
