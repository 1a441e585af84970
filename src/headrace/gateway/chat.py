"""`POST /v1/chat/completions`: a request's whole life.

    decode ─▶ identify ─▶ accept (place in the queue, reservation journalled) ─▶ grant
           ─▶ relay the worker's answer ─▶ settle (record durable) ─▶ the reply's last bytes

Leaving at any point is an exception: a `Refusal` becomes the reply, a cancellation means that the
client is gone. The operation's scope gives everything back and writes the one record either way.
"""

import asyncio
import secrets
from typing import Final

from headrace.api import chat, completion, refusals
from headrace.api.chat import ChatCall
from headrace.clock import Clock
from headrace.config.settings import Settings
from headrace.core.core import Core, NeedsCount
from headrace.core.operation import Operation
from headrace.core.replica import Answer, Task
from headrace.errors import Refusal
from headrace.gateway.exchange import Exchange, usage_headers
from headrace.gateway.identify import require_scope
from headrace.identity import Identity
from headrace.ledger.records import Reservation
from headrace.request.sampling import Sampling

MESSAGE_OVERHEAD_TOKENS: Final = 16
"""What a chat template adds to a message, at most, in the bound."""
CLAMPED: Final = b"x-governance-action: CLAMPED_MAX_TOKENS\r\nx-max-tokens: %d\r\n"
"""Says how long the answer may be where a limit decided it and not the client."""


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
        operation = await self._accept(exchange, identity, call)
        exchange.limit_headers = self._core.admission.headers(operation.accounts)
        if operation.size.is_clamped:
            exchange.limit_headers += CLAMPED % operation.size.maximum
        try:
            async with operation:
                await self._within_deadline(exchange, operation, call)
        finally:
            exchange.record = operation.record

    async def _accept(self, exchange: Exchange, identity: Identity, call: ChatCall) -> Operation:
        """Accept with a proven upper bound of the prompt; where that would be refused, with its exact count."""
        # A token stands for at least one byte, so the bytes of a prompt bound its tokens from above.
        bound = sum(len(message.content.encode()) for message in call.messages)
        bound += MESSAGE_OVERHEAD_TOKENS * (len(call.messages) + 1)
        reservation = self._reservation(exchange, identity, call, prompt_tokens=bound)
        try:
            return self._core.accept(reservation, max_tokens=call.max_tokens, is_exact=False)
        except NeedsCount:
            exact = await self._core.count_prompt(call.model, call.messages)
        if exact is not None:
            reservation = self._reservation(exchange, identity, call, prompt_tokens=min(exact, bound))
        return self._core.accept(reservation, max_tokens=call.max_tokens, is_exact=True)

    async def _within_deadline(self, exchange: Exchange, operation: Operation, call: ChatCall) -> None:
        """Answer; the deadline is set once a worker is granted, waiting has a limit of its own.

        It ends with the answer: an operation that is being settled as completed is told so, however long
        the ledger takes.
        """
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
        answer = await self._begin(exchange, operation, call, deadline)
        body = await answer.complete()
        deadline.reschedule(None)
        record = await operation.settle()
        exchange.send_json(body, headers=usage_headers(record) + exchange.limit_headers)

    async def _stream(
        self, exchange: Exchange, operation: Operation, call: ChatCall, deadline: asyncio.Timeout
    ) -> None:
        await self._wait_for_grant(exchange, operation)
        answer = await self._begin(exchange, operation, call, deadline)
        responder = exchange.responder
        if not responder.has_started:
            exchange.start_stream()
        async for data in answer.stream(quiet_s=self._settings.keep_alive_ms / 1000):
            if not responder.write(data or completion.KEEP_ALIVE):
                await responder.drain()
        deadline.reschedule(None)
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

    async def _begin(
        self, exchange: Exchange, operation: Operation, call: ChatCall, deadline: asyncio.Timeout
    ) -> Answer:
        """Start on the granted replica, until it has taken the prompt and said how long it is."""
        deadline.reschedule(asyncio.get_running_loop().time() + self._settings.request_timeout_s)
        waited_us = operation.granted_us - operation.accepted_us
        self._core.metrics.overhead.observe(
            max(0, self._clock.monotonic_us() - exchange.began_us - waited_us) / 1e6
        )
        answer = operation.start(
            Task(
                attempt_id=operation.attempt_id,
                tenant_id=operation.reservation.tenant_id,
                completion_id=exchange.completion_id,
                created_s=self._clock.wall_us() // 1_000_000,
                model=call.model,
                call=call,
                max_tokens=operation.size.maximum,
                is_limited=operation.size.is_limited,
                sampling=call.sampling(self._defaults(operation)),
                body=exchange.request.body,
                traceparent=exchange.traceparent,
            )
        )
        await answer.begin()
        if answer.exact_total is not None:
            operation.trim(answer.exact_total)
        return answer

    def _defaults(self, operation: Operation) -> Sampling:
        model = operation.model.sampling
        return Sampling(
            temperature=model.temperature,
            top_p=model.top_p,
            top_k=model.top_k,
            seed=secrets.randbits(32),
        )

    def _reservation(
        self, exchange: Exchange, identity: Identity, call: ChatCall, *, prompt_tokens: int
    ) -> Reservation:
        return Reservation(
            request_id=exchange.request_id,
            tenant_id=identity.tenant,
            api_key_id=identity.jti,
            user_id=identity.user or call.user,  # a key bound to a user speaks for no other
            model=call.model,
            mode="stream" if call.is_stream else "complete",
            prompt_tokens_estimated=prompt_tokens,
            reserved_tokens=0,  # the core decides how much is held
            queue_enter_ts=self._clock.wall_us(),
            trace_id=exchange.trace_id,
        )

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
