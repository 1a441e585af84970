"""Has a chat accepted by the core: on the model it asks for or, where that is allowed, on less.

A request that would be refused can be served with less instead, if its tenant allows that and the request does not
forbid it: with a shorter answer where a limit of tokens stands against it, by the model named in `degrade_to` where its
own has no place. The reply says so.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from headrace.admission.controller import NeedsCount, NeedsTrim
from headrace.api.chat import ChatCall
from headrace.caching.slots import CacheOrder
from headrace.clock import Clock
from headrace.core.core import Core, TurnedAway
from headrace.core.operation import Operation
from headrace.errors import Refusal
from headrace.gateway.exchange import Exchange
from headrace.identity import Identity
from headrace.ledger.records import Reservation
from headrace.request.messages import Message

MESSAGE_OVERHEAD_TOKENS: Final = 16
"""What a chat template adds to a message, at most, in the bound."""
ACCEPT_TRIES_MAX: Final = 4
"""A request that would be refused for a bound is judged anew once what is behind the bound is counted."""


class Acceptance:
    """Belongs to the chat route."""

    def __init__(self, core: Core, clock: Clock) -> None:
        self._core = core
        self._clock = clock

    async def accept(
        self, exchange: Exchange, identity: Identity, call: ChatCall, cache: CacheOrder
    ) -> tuple[Operation, ChatCall]:
        """The operation, and the call as it is going to be served. `cache` says what workers may keep of it.
        Raises `Refusal`.
        """
        may_degrade = call.may_degrade and self._core.directory.sharing_of(identity.tenant).allow_degrade
        if not may_degrade:
            return await self._accept(exchange, identity, call, cache), call
        first: TurnedAway | None = None
        for instead in self._with_less(call):
            try:
                return await self._accept(exchange, identity, instead, cache, may_degrade=True), instead
            except TurnedAway as turned_away:
                first = first or turned_away
                if not _may_others_serve(turned_away.refusal):
                    break
        assert first is not None
        self._core.turn_away(first.reservation, first.refusal)
        raise first.refusal

    def _with_less(self, call: ChatCall) -> Iterator[ChatCall]:
        """The call itself, then by the models that may stand in."""
        yield call
        model = self._core.models[call.model]
        while model.degrade_to is not None:
            model = self._core.models[model.degrade_to]
            yield msgspec.structs.replace(call, model=model.model_id, is_renamed=True)

    async def _accept(
        self,
        exchange: Exchange,
        identity: Identity,
        call: ChatCall,
        cache: CacheOrder,
        *,
        may_degrade: bool = False,
    ) -> Operation:
        """Accept with a proven upper bound of the prompt; where bounds would refuse it, with exact counts."""
        prompt_tokens, is_exact = _bound(call, exchange.request.body), False
        for tries_left in reversed(range(ACCEPT_TRIES_MAX)):
            reservation = self._reservation(exchange, identity, call, prompt_tokens=prompt_tokens)
            try:
                return self._core.accept(
                    reservation,
                    call.messages,
                    max_tokens=call.max_tokens,
                    priority=call.priority,
                    is_exact=is_exact,
                    is_final=not tries_left,
                    may_degrade=may_degrade,
                    cache=cache,
                )
            except NeedsCount:
                exact = await self._core.count_prompt(call.model, call.messages)
                prompt_tokens, is_exact = prompt_tokens if exact is None else min(exact, prompt_tokens), True
            except NeedsTrim as needs:
                await self._core.count_held(needs.entries)
        raise AssertionError("the last try asks for nothing")

    def _reservation(
        self, exchange: Exchange, identity: Identity, call: ChatCall, *, prompt_tokens: int
    ) -> Reservation:
        return Reservation(
            request_id=exchange.request_id,
            tenant_id=identity.tenant,
            api_key_id=identity.jti,
            department=self._core.directory.department_of(identity.jti),
            user_id=identity.user or call.user,  # a key bound to a user speaks for no other
            model=call.model,
            mode="stream" if call.is_stream else "complete",
            prompt_tokens_estimated=prompt_tokens,
            reserved_tokens=0,  # the core decides how much is held
            priority=self._core.service_class(identity.tenant, call.latency_sla),
            queue_enter_ts=self._clock.wall_us(),
            trace_id=exchange.trace_id,
        )


def action_headers(call: ChatCall, operation: Operation) -> bytes:
    """What was decided in the client's place: nothing, nearly always. `call` is as it is served."""
    size = operation.size
    if not (size.is_clamped or size.is_shortened or call.is_renamed):
        return b""
    actions, lines = [], ""
    if call.is_renamed:
        actions.append("DEGRADED_MODEL")
        lines += f"x-model: {call.model}\r\n"
    if size.is_clamped or size.is_shortened:
        actions.append("DEGRADED_MAX_TOKENS" if size.is_shortened else "CLAMPED_MAX_TOKENS")
        lines += f"x-max-tokens: {size.maximum}\r\n"
    return f"x-governance-action: {', '.join(actions)}\r\n{lines}".encode()


def _bound(call: ChatCall, body: bytes) -> int:
    """A token stands for at least one byte, so the bytes of a prompt bound its tokens from above."""
    return _bytes_max(call.messages, body) + MESSAGE_OVERHEAD_TOKENS * (len(call.messages) + 1)


def _bytes_max(messages: list[Message], body: bytes) -> int:
    """No fewer than the bytes of these messages' text, which came in `body`; hardly more."""
    characters, is_ascii = 0, True
    for message in messages:
        characters += len(message.content)
        is_ascii = is_ascii and message.content.isascii()
    if is_ascii:
        return characters
    # JSON is never shorter than the text it stands for. Where it is at most an eighth longer, that will do:
    # to encode a long text only to learn its length costs as much as to decode it.
    if len(body) * 8 <= characters * 9:
        return len(body)
    return sum([len(message.content.encode()) for message in messages])


def _may_others_serve(refusal: Refusal) -> bool:
    """Whether it was this model that had no place, or the caller that has had enough."""
    details = refusal.details
    return (
        refusal.code == "no_healthy_worker"
        or details.get("limit_type") == "queue_full"
        or details.get("level") in ("model", "tenant_model")
    )
