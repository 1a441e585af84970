"""`POST /v1/chat/completions`: what a client may send, checked field by field.

Decoding is strict: a field nobody knows is a 400 that names it, and so is a field of OpenAI's API
that headrace does not serve yet, unless it holds the value that changes nothing (`n: 1`). What is
accepted without an effect is listed in `NO_OPS` and in the documentation.
"""

import re
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec

from headrace import bounds
from headrace.api import refusals
from headrace.errors import Refusal
from headrace.request.latency import LatencySla
from headrace.request.messages import Message
from headrace.request.sampling import Sampling


class ChatCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A checked request. Nothing behind it looks at the body again, except to relay it."""

    model: str
    messages: list[Message]
    is_stream: bool
    is_usage_wanted: bool
    """`stream_options.include_usage`: the client wants the usage chunk."""
    max_tokens: int | None
    """The effective maximum; None where the client set none."""
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: list[str]
    user: str | None
    is_plain: bool
    """The body has neither `max_new_tokens` nor `stream_options`, however they are spelt: a foreign server can
    have it nearly as it is."""
    session_id: str | None = None
    """A session that `POST /v1/sessions` has issued."""
    conversation_id: str | None = None
    """The client's own name of a conversation."""
    latency_sla: LatencySla = "normal"
    """How soon the client wants its answer: `low` latency, or `throughput` where it can wait."""
    priority: int = 0
    """Higher is sooner; how much of it counts is the tenant's to say."""
    may_degrade: bool = True
    """Rather less than a refusal, where the tenant allows it too."""
    is_renamed: bool = False
    """Served by another model than the one that the body names."""

    def sampling(self, defaults: Sampling) -> Sampling:
        """What the client asked for, completed by the model's defaults and the seed drawn for it."""
        return Sampling(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            seed=(defaults.seed if self.seed is None else self.seed) & 0xFFFF_FFFF,
        )


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Marks the end of a prefix that is worth keeping."""

    type: Literal["ephemeral"]


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | msgspec.UnsetType = msgspec.UNSET
    cache_control: "_CacheControl | msgspec.UnsetType | None" = msgspec.UNSET
    image_url: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input_audio: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    file: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    refusal: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    annotations: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_calls: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_call_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    function_call: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cache_control: "_CacheControl | msgspec.UnsetType | None" = msgspec.UNSET


_Raw = msgspec.Raw | msgspec.UnsetType
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=bounds.MAX_TOKENS_MAX)] | None
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=bounds.MODEL_NAME_BYTES_MAX)]


_ConversationName = Annotated[str, msgspec.Meta(min_length=1, max_length=bounds.CONVERSATION_NAME_MAX)] | None


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: _Name
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1, max_length=bounds.MESSAGES_MAX)]
    stream: bool | None = None
    stream_options: _StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: _Tokens = None
    max_completion_tokens: _Tokens = None
    max_new_tokens: _Tokens | msgspec.UnsetType = msgspec.UNSET
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    user: Annotated[str, msgspec.Meta(max_length=bounds.USER_BYTES_MAX)] | None = None
    session_id: _ConversationName | msgspec.UnsetType = msgspec.UNSET
    conversation_id: _ConversationName | msgspec.UnsetType = msgspec.UNSET
    latency_sla: LatencySla | msgspec.UnsetType | None = msgspec.UNSET
    priority: Annotated[int, msgspec.Meta(ge=0, le=bounds.PRIORITY_MAX)] | msgspec.UnsetType | None = (
        msgspec.UNSET
    )
    allow_degrade: bool | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    # Accepted without an effect (`NO_OPS`).
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    # Known, not served yet: only their neutral values pass (`NEUTRAL`).
    audio: _Raw = msgspec.UNSET
    cost_priority: _Raw = msgspec.UNSET
    feature: _Raw = msgspec.UNSET
    frequency_penalty: _Raw = msgspec.UNSET
    function_call: _Raw = msgspec.UNSET
    functions: _Raw = msgspec.UNSET
    logit_bias: _Raw = msgspec.UNSET
    logprobs: _Raw = msgspec.UNSET
    min_p: _Raw = msgspec.UNSET
    modalities: _Raw = msgspec.UNSET
    n: _Raw = msgspec.UNSET
    parallel_tool_calls: _Raw = msgspec.UNSET
    prediction: _Raw = msgspec.UNSET
    presence_penalty: _Raw = msgspec.UNSET
    prompt_cache_key: _Raw = msgspec.UNSET
    prompt_cache_retention: _Raw = msgspec.UNSET
    reasoning_effort: _Raw = msgspec.UNSET
    repetition_penalty: _Raw = msgspec.UNSET
    response_format: _Raw = msgspec.UNSET
    tool_choice: _Raw = msgspec.UNSET
    tools: _Raw = msgspec.UNSET
    top_logprobs: _Raw = msgspec.UNSET
    verbosity: _Raw = msgspec.UNSET
    web_search_options: _Raw = msgspec.UNSET


NO_OPS: Final = {
    "metadata": "kept for routing rules to come; nothing reads it yet",
    "safety_identifier": "OpenAI's replacement of `user` for abuse reports; headrace has no such reports",
    "store": "headrace never stores content",
    "messages[].name": "the models served have no use for a speaker's name",
    "messages[].refusal": "part of an assistant message sent back; carries no text for the model",
    "messages[].annotations": "part of an assistant message sent back; carries no text for the model",
    "stream_options.include_obfuscation": "headrace adds no padding to its chunks",
}
"""Fields that are accepted and change nothing, with the reason."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""For fields that are not served: the values that ask for nothing. `null` always does."""

UNSERVED: Final = tuple(name for name, annotation in _Body.__annotations__.items() if annotation == _Raw)
"""Known fields that answer 400 unless they hold a neutral value."""

_unserved_of: Final = attrgetter(*UNSERVED)
_NONE_OF_THEM: Final = (msgspec.UNSET,) * len(UNSERVED)
"""Nearly all requests: told in one comparison instead of one for each field."""

_OWN: Final = (
    "max_new_tokens",
    "stream_options",
    "session_id",
    "conversation_id",
    "latency_sla",
    "priority",
    "allow_degrade",
)
_own_of: Final = attrgetter(*_OWN)
_NONE_OF_OURS: Final = (msgspec.UNSET,) * len(_OWN)
"""Fields that a foreign server gets otherwise than they came, or not at all."""

SERVED: Final = tuple(name for name in _Body.__struct_fields__ if name not in UNSERVED)

_MESSAGE_UNSERVED: Final = ("audio", "tool_calls", "tool_call_id", "function_call")
_message_unserved_of: Final = attrgetter(*_MESSAGE_UNSERVED)
_message_special_of: Final = attrgetter(*_MESSAGE_UNSERVED, "cache_control")
_NOTHING_SPECIAL: Final = (msgspec.UNSET,) * (len(_MESSAGE_UNSERVED) + 1)
"""Nearly all messages: nothing to check, nothing to flatten."""

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_decode_body = msgspec.json.Decoder(_Body).decode
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?")
_LOCATION: Final = re.compile(r" - at `\$\.?([^`]*)`$")


def decode(body: bytes) -> ChatCall:
    """The checked request. Raises `Refusal` (400) that says what is wrong, where, and what is allowed."""
    try:
        raw = _decode_body(body)
    except msgspec.ValidationError as error:
        raise _validation_refusal(str(error)) from None
    except msgspec.DecodeError as error:
        raise refusals.malformed(
            f"The body must be a JSON object with 'model' and 'messages'; it is not JSON: {error}"
        ) from None
    except RecursionError:
        raise refusals.malformed("The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise refusals.malformed(f"The body is not valid UTF-8 (byte {error.start}).") from None
    _refuse_unserved(raw)
    if raw.session_id and raw.conversation_id:
        raise refusals.invalid_value("conversation_id", "Give 'session_id' or 'conversation_id', not both.")
    return ChatCall(
        model=raw.model,
        messages=[
            Message(role, message.content)
            if type(message.content) is str
            and (role := _ROLES.get(message.role))
            and _message_special_of(message) == _NOTHING_SPECIAL
            else _flatten(index, message)
            for index, message in enumerate(raw.messages)
        ],
        is_stream=bool(raw.stream),
        is_usage_wanted=_usage_wanted(raw),
        max_tokens=_effective_maximum(raw),
        temperature=raw.temperature,
        top_p=raw.top_p,
        top_k=raw.top_k,
        seed=raw.seed,
        stop=_stop_strings(raw.stop),
        user=_user(raw.user),
        is_plain=_is_plain(raw),
        session_id=raw.session_id or None,
        conversation_id=raw.conversation_id or None,
        latency_sla=_latency_sla(raw),
        priority=raw.priority or 0,
        may_degrade=raw.allow_degrade is not False,
    )


def _validation_refusal(text: str) -> Refusal:
    unknown = _UNKNOWN_FIELD.search(text)
    if unknown:
        name, parent = unknown.groups()
        if parent:
            return refusals.unknown_field(f"{parent}.{name}", "see the API reference for this object")
        return refusals.unknown_field(name, ", ".join(sorted(SERVED)))
    location = _LOCATION.search(text)
    if location:
        return refusals.invalid_value(
            location.group(1), text[: location.start()] + f" (at {location.group(1)})"
        )
    if "required field" in text:
        name = text.rsplit("`", 2)[1]
        return refusals.invalid_value(name, f"The field '{name}' is required.")
    return refusals.malformed(f"The body must be a JSON object with 'model' and 'messages': {text}")


def _refuse_unserved(raw: _Body) -> None:
    if _unserved_of(raw) == _NONE_OF_THEM:
        return
    for name in UNSERVED:
        value = getattr(raw, name)
        if value is msgspec.UNSET:
            continue
        try:
            plain = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise refusals.invalid_value(name, f"'{name}' is not a usable JSON value: {error}.") from None
        neutral = NEUTRAL.get(name, ())
        if plain is None or any(_is_same(plain, allowed) for allowed in neutral):
            continue
        hint = f" Only {' or '.join(map(_show, neutral))} is accepted." if neutral else " Leave it out."
        raise refusals.unsupported_field(name, f"'{name}' is not supported yet.{hint}")


def _is_same(value: Any, other: Any) -> bool:
    """Equality of JSON values: `true` is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _show(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_plain(raw: _Body) -> bool:
    """Whether the body holds nothing that a foreign server must not get."""
    if _own_of(raw) != _NONE_OF_OURS:
        return False
    for message in raw.messages:
        if message.cache_control is not msgspec.UNSET or isinstance(message.content, list):
            return False
    return True


def _flatten(index: int, message: _Message) -> Message:
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        if message.role in ("tool", "function"):
            raise refusals.unsupported_field(f"{where}.role", "Tool messages are not supported yet.")
        raise refusals.invalid_value(
            f"{where}.role", f"'{message.role[:40]}' is not a role. Allowed: {', '.join(_ROLES)}."
        )
    for name, value in zip(_MESSAGE_UNSERVED, _message_unserved_of(message), strict=True):
        if value is not msgspec.UNSET and bytes(value) not in (b"null", b"[]"):
            raise refusals.unsupported_field(
                f"{where}.{name}", f"'{name}' is not supported yet. Leave it out."
            )
    is_cache_end = bool(message.cache_control)
    if isinstance(message.content, str):
        return Message(role, message.content, is_cache_end)
    if message.content is None:
        raise refusals.invalid_value(f"{where}.content", "'content' must be a text or a list of text parts.")
    text = "".join(_part_text(where, position, part) for position, part in enumerate(message.content))
    is_cache_end = is_cache_end or any(bool(part.cache_control) for part in message.content)
    return Message(role, text, is_cache_end)


def _part_text(where: str, position: int, part: _TextPart) -> str:
    here = f"{where}.content[{position}]"
    if part.type != "text":
        raise refusals.unsupported_field(
            f"{here}.type", f"Content of type '{part.type[:40]}' is not supported; only 'text' is."
        )
    if not isinstance(part.text, str):
        raise refusals.invalid_value(f"{here}.text", "A text part needs 'text'.")
    return part.text


def _user(user: str | None) -> str | None:
    if not user:
        return None
    if not user.isprintable() or len(user.encode("utf-8", "replace")) > bounds.USER_BYTES_MAX:
        raise refusals.invalid_value(
            "user", f"'user' may be {bounds.USER_BYTES_MAX} bytes long and has no control characters."
        )
    return user


def _latency_sla(raw: _Body) -> LatencySla:
    """What the client says itself, or what its `service_tier` stands for."""
    tier = raw.service_tier
    if tier is None:
        return raw.latency_sla or "normal"
    of_tier: LatencySla = "throughput" if tier == "flex" else "low" if tier == "priority" else "normal"
    given = raw.latency_sla or of_tier
    if of_tier not in ("normal", given):
        raise refusals.invalid_value(
            "latency_sla",
            f"'service_tier' {tier!r} means {of_tier!r}; give one of them, or the same in both.",
        )
    return given


def _usage_wanted(raw: _Body) -> bool:
    if raw.stream_options is None or raw.stream_options is msgspec.UNSET:
        return False
    if not raw.stream:
        raise refusals.invalid_value(
            "stream_options", "'stream_options' is only allowed with 'stream': true."
        )
    return raw.stream_options.include_usage


def _effective_maximum(raw: _Body) -> int | None:
    if raw.max_completion_tokens is None and (
        raw.max_new_tokens is msgspec.UNSET or raw.max_new_tokens is None
    ):
        return raw.max_tokens
    given = {
        name: value
        for name, value in (
            ("max_completion_tokens", raw.max_completion_tokens),
            ("max_tokens", raw.max_tokens),
            ("max_new_tokens", raw.max_new_tokens),
        )
        if value is not None and value is not msgspec.UNSET
    }
    if len(set(given.values())) > 1:
        raise refusals.invalid_value(
            next(iter(given)), f"These are names of one limit and must agree or be one: {', '.join(given)}."
        )
    return next(iter(given.values()), None)


def _stop_strings(stop: str | list[str] | None) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > bounds.STOP_STRINGS_MAX:
        raise refusals.invalid_value("stop", f"At most {bounds.STOP_STRINGS_MAX} stop strings are allowed.")
    for string in strings:
        if not string:
            raise refusals.invalid_value("stop", "A stop string must not be empty.")
        if len(string.encode()) > bounds.STOP_STRING_BYTES_MAX:
            raise refusals.invalid_value(
                "stop", f"A stop string may be {bounds.STOP_STRING_BYTES_MAX} bytes long at most."
            )
    return strings
