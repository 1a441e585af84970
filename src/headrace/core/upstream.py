"""A replica that is a foreign OpenAI-compatible server.

Its bytes are relayed as they come; only the usage chunk and the end are looked into. Usage is always
asked for, because the ledger needs it, and taken out again for clients that did not ask.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
import structlog

from headrace.api import refusals
from headrace.api.completion import DONE
from headrace.clock import Clock
from headrace.core.replica import ReplicaBusy, Task
from headrace.errors import ProtocolError, Refusal
from headrace.http import (
    ClientResponse,
    HttpClient,
    SseSplitter,
    UpstreamError,
    UpstreamTimedOut,
    UpstreamUnreachable,
    data_of,
)
from headrace.ledger.closing import Counts
from headrace.ledger.records import CountSource
from headrace.request.controls import Controls
from headrace.request.messages import Message

_PATH: Final = "/chat/completions"
_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_HAS_CONTENT: Final = re.compile(rb'"content"\s*:\s*"[^"]')
_ERROR: Final = re.compile(rb'^data:\s*\{\s*"error"\s*:')
_INCLUDE_USAGE: Final = b',"stream_options":{"include_usage":true}}'
_CLIENT_ERRORS: Final = frozenset({400, 404, 413, 415, 422})
"""Statuses that say something about the client's request; all others are the upstream's own trouble."""
_BUSY: Final = frozenset({429, 503})
"""Statuses by which a server says that it takes no more at the moment."""
_ERROR_BYTES_MAX: Final = 64 * 1024


_log = structlog.get_logger()


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_decode_usage = msgspec.json.Decoder(_WithUsage).decode


class UpstreamReplica:
    """A foreign server. `key` is sent as a bearer token and never logged."""

    context_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    can_count = False

    def __init__(
        self,
        *,
        replica_id: str,
        client: HttpClient,
        upstream_model: str | None,
        key: str | None,
        clock: Clock,
    ) -> None:
        self.replica_id = replica_id
        self.worker_id = replica_id
        self.client = client
        self.clock = clock
        self.upstream_model = upstream_model
        self.last_error: str | None = None
        """Why the last connection failed; None once one has worked again."""
        self._headers = b"content-type: application/json\r\n"
        if key is not None:
            self._headers += b"authorization: Bearer " + key.encode("ascii") + b"\r\n"

    async def count_prompt(self, messages: list[Message]) -> int | None:
        """Not without its tokenizer: the bound stands until its usage arrives."""
        return None

    def adjust(self, controls: Controls) -> None:
        """How a foreign server computes is not ours to say."""

    def end_session(self, session: str) -> None:
        """A foreign server knows no sessions of ours."""

    def start(self, task: Task) -> "UpstreamAnswer":
        return UpstreamAnswer(self, task)

    def note(self, error: str | None) -> None:
        """Remember and log when the upstream stops or begins to answer."""
        if (error is None) != (self.last_error is None):
            if error is None:
                _log.info("upstream_answers_again", upstream=self.client.name)
            else:
                _log.warning("upstream_does_not_answer", upstream=self.client.name, error=error)
        self.last_error = error

    def request_headers(self, task: Task) -> bytes:
        return self._headers + b"traceparent: " + task.traceparent.encode() + b"\r\n"


class UpstreamAnswer:
    """A relayed answer."""

    exact_total: int | None = None
    prompt_tokens: int | None = None
    is_recorded = False
    can_preempt = False
    heard_us: int | None = None
    """The HTTP client has time limits of its own."""

    def __init__(self, replica: UpstreamReplica, task: Task) -> None:
        self._replica = replica
        self._task = task
        self._response: ClientResponse | None = None
        self._usage: _Usage | None = None
        self._usage_event = b""
        self._num_chunks = 0
        self._start_ts: int | None = None
        self._first_token_ts: int | None = None
        self._end_ts = 0
        self._is_done = False
        self._failure: Refusal | None = None
        """What a read brought besides good events; those are passed on first."""

    def preempt(self, on_stopped: Callable[[int], None]) -> None:
        raise NotImplementedError("a foreign server cannot be told to pause a request")

    def resume(self) -> None:
        raise NotImplementedError("a foreign server cannot be told to pause a request")

    async def begin(self) -> None:
        task = self._task
        self._start_ts = self._replica.clock.wall_us()
        try:
            response = await self._replica.client.request(
                "POST",
                _PATH,
                self._replica.request_headers(task),
                upstream_body(
                    task.body,
                    is_stream=task.call.is_stream,
                    model=self._replica.upstream_model or (task.model if task.call.is_renamed else None),
                    max_tokens=task.max_tokens if _has_own_maximum(task) else None,
                    is_plain=task.call.is_plain,
                ),
            )
            self._response = response
            self._replica.note(None)
            if response.status in _BUSY:
                retry_after_s = _seconds(response.headers.get(b"retry-after"))
                response.close()
                raise ReplicaBusy(retry_after_s=retry_after_s)
            if response.status != 200:
                raise _status_refusal(response.status, await response.read(_ERROR_BYTES_MAX))
        except UpstreamError as error:
            self._replica.note(str(error))
            raise _translated(error, task.model) from error

    async def complete(self) -> bytes:
        assert self._response is not None
        try:
            body = await self._response.read()
            self._usage = _decode_usage(body).usage
        except UpstreamError as error:
            raise _translated(error, self._task.model) from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise refusals.upstream_failed("The upstream's reply is not a chat completion.") from None
        if body.lstrip().startswith(b'{"error"'):
            raise refusals.upstream_failed("The upstream answered 200 with an error.")
        self._end_ts = self._replica.clock.wall_us()
        self._is_done = True
        return body

    async def stream(self, *, quiet_s: float) -> AsyncIterator[bytes]:
        assert self._response is not None
        splitter = SseSplitter()
        try:
            while not self._is_done:
                data = await self._next_bytes(quiet_s)
                if data is None:
                    yield b""
                    continue
                if not data:
                    raise refusals.upstream_failed("The upstream ended its stream without an end mark.")
                relayed = self._sift(splitter.feed(data))
                if relayed:
                    yield relayed
                if self._failure is not None:
                    raise self._failure
        except (UpstreamError, ProtocolError) as error:
            raise _translated(error, self._task.model) from error
        self._end_ts = self._replica.clock.wall_us()
        self._response.close()

    async def _next_bytes(self, quiet_s: float) -> bytes | None:
        """What came; `b""` at the end; None if the upstream was quiet before its first token.

        Once tokens flow there is nothing to bridge, and a timer for each read would cost the hot path.
        """
        assert self._response is not None
        if self._first_token_ts is not None:
            return await self._response.next_bytes()
        try:
            async with asyncio.timeout(quiet_s):
                return await self._response.next_bytes()
        except TimeoutError:
            return None

    def ending(self) -> bytes:
        return self._usage_event + DONE if self._task.call.is_usage_wanted else DONE

    @property
    def tokens_told(self) -> int:
        return self._num_chunks

    tokens_generated = tokens_told

    def abort(self) -> None:
        if self._response is not None:
            self._response.close()

    async def counts(self) -> Counts:
        usage = self._usage
        if usage is None:
            prompt, cached, completion = 0, 0, self._num_chunks
        else:
            prompt, completion = usage.prompt_tokens, usage.completion_tokens
            cached = int((usage.prompt_tokens_details or {}).get("cached_tokens") or 0)
        return Counts(
            source=self._source(),
            attempt_ids=(self._task.attempt_id,),
            prompt_tokens=prompt,
            prompt_tokens_cached=cached,
            completion_tokens=completion,
            start_ts=self._start_ts,
            first_token_ts=self._first_token_ts,
            decode_us=max(0, self._end_ts - self._first_token_ts) if self._first_token_ts else 0,
            prefill_us=max(0, self._first_token_ts - (self._start_ts or 0)) if self._first_token_ts else 0,
        )

    def _source(self) -> CountSource:
        if self._usage is not None:
            return "upstream_usage"
        if self._num_chunks:
            return "chunks"
        if self._is_done:
            _log.warning("upstream_gave_no_usage", upstream=self._replica.client.name)
            return "unknown"
        return "none"

    def acknowledge(self) -> None:
        """A foreign server keeps no records of ours."""

    def _sift(self, events: list[bytes]) -> bytes:
        """What of these events goes to the client now. Notes usage, content and the end on the way."""
        kept: list[bytes] = []
        for event in events:
            if event.startswith(b"data: [DONE]") or data_of(event) == b"[DONE]":
                self._is_done = True
                break
            if _ERROR.match(event):
                self._failure = refusals.upstream_failed("The upstream reported an error in its stream.")
                break
            if b'"usage"' in event and _NO_CHOICES.search(event):
                self._take_usage(event)
                if self._failure is not None:
                    break
                continue
            if _HAS_CONTENT.search(event):
                self._num_chunks += 1
                if self._first_token_ts is None:
                    self._first_token_ts = self._replica.clock.wall_us()
            kept.append(event)
        return b"".join(kept)

    def _take_usage(self, event: bytes) -> None:
        try:
            self._usage = _decode_usage(data_of(event) or b"").usage
        except msgspec.DecodeError:
            self._failure = refusals.upstream_failed("The upstream's usage chunk is malformed.")
        self._usage_event = event


def upstream_body(
    body: bytes, *, is_stream: bool, model: str | None, max_tokens: int | None, is_plain: bool
) -> bytes:
    """The request as the upstream gets it: usage asked for, its own name of the model, OpenAI's names only.

    Nearly always (`ChatCall.is_plain`) a few bytes put behind. The body is taken apart where a value has to
    change.
    """
    if is_plain and model is None and max_tokens is None:
        return body.rstrip()[:-1] + _INCLUDE_USAGE if is_stream else body
    content = msgspec.json.decode(body)
    if model is not None:
        content["model"] = model
    if content.get("max_new_tokens") is not None:
        content.setdefault("max_tokens", content["max_new_tokens"])
    for name in (
        "max_new_tokens",
        "session_id",
        "conversation_id",
        "latency_sla",
        "priority",
        "allow_degrade",
    ):
        content.pop(name, None)
    for message in content.get("messages", ()):
        message.pop("cache_control", None)
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            part.pop("cache_control", None)
    if max_tokens is not None:
        names = [name for name in ("max_tokens", "max_completion_tokens") if content.get(name) is not None]
        for name in names or ["max_tokens"]:
            content[name] = max_tokens
    if is_stream:
        content["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(content)


def _has_own_maximum(task: Task) -> bool:
    """A limit decided how long the answer may be: for a client that set no maximum, or that set a larger one."""
    return task.is_limited and (task.call.max_tokens is None or task.max_tokens < task.call.max_tokens)


def _translated(error: UpstreamError | ProtocolError, model: str) -> Refusal:
    if isinstance(error, UpstreamUnreachable):
        return refusals.upstream_unreachable(model)
    if isinstance(error, UpstreamTimedOut):
        return refusals.upstream_failed("The upstream did not answer in time.", status=504)
    return refusals.upstream_failed("The upstream broke off its answer.")


def _status_refusal(status: int, body: bytes) -> Refusal:
    """An upstream's refusal: its own words where the client can act on them, nothing of them elsewhere."""
    if status in _CLIENT_ERRORS:
        return refusals.upstream_refused(status, _message_of(body))
    return refusals.upstream_failed(f"The upstream answered with status {status}.")


def _seconds(retry_after: bytes | None) -> float | None:
    """`Retry-After` in its form of seconds; the form of a date is not worth a clock."""
    try:
        return None if retry_after is None else float(retry_after)
    except ValueError:
        return None


def _message_of(body: bytes) -> str:
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:500] if message else ""
