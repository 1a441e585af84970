"""A replica that is one of our own worker processes."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

from headrace.api import refusals
from headrace.api.completion import DONE, ChunkEncoder, Usage, completion
from headrace.config.settings import EngineSettings
from headrace.core.replica import ReplicaBusy, Task
from headrace.errors import Refusal
from headrace.ledger.closing import NOTHING, Counts
from headrace.request.controls import Controls
from headrace.request.messages import Message
from headrace.request.sampling import Sampling
from headrace.scheduling.batch_wait import batch_wait_ms
from headrace.worker.link import Attempt, AttemptEvent, Lost, WorkerLink
from headrace.worker.messages import Accepted, AttemptRecord, Hello, Piece, Rejected, Submit


class EmbeddedReplica:
    """One life of a worker process: a restarted worker is a new replica with the same `worker_id`."""

    def __init__(
        self, *, replica_id: str, worker_id: str, link: WorkerLink, hello: Hello, settings: EngineSettings
    ) -> None:
        self._settings = settings
        self.replica_id = replica_id
        self.worker_id = worker_id
        self.link = link
        self.engine = hello.engine
        self.can_preempt = hello.can_preempt

    @property
    def context_tokens(self) -> int | None:
        return self.engine.request_tokens_max

    @property
    def kv_bytes_per_token(self) -> int | None:
        return self.engine.kv_bytes_per_token

    can_count = True

    async def count_prompt(self, messages: list[Message]) -> int | None:
        return await self.link.count(messages)

    def adjust(self, controls: Controls) -> None:
        self.link.adjust(controls)

    def end_session(self, session: str) -> None:
        self.link.end_session(session)

    def start(self, task: Task) -> "EmbeddedAnswer":
        call = task.call
        attempt = self.link.submit(
            Submit(
                attempt_id=task.attempt_id,
                tenant_id=task.tenant_id,
                messages=call.messages,
                max_tokens=task.max_tokens,
                is_maximum_asked=task.call.max_tokens is not None,
                sampling=_sampling(task),
                stop=call.stop,
                cache=task.cache,
                batch_wait_ms=batch_wait_ms(
                    call.latency_sla,
                    interactive_wait_ms=self._settings.batch_wait_ms,
                    offline_wait_ms=self._settings.offline_batch_wait_ms,
                ),
            )
        )
        return EmbeddedAnswer(self, task, attempt)


class EmbeddedAnswer:
    """An attempt on a worker: pieces of text become chunks of the API."""

    def __init__(self, replica: EmbeddedReplica, task: Task, attempt: Attempt) -> None:
        self._replica = replica
        self._task = task
        self._attempt = attempt
        self._early: list[AttemptEvent] = []
        """Events that came in the same frame as the acceptance."""
        self._chunks = ChunkEncoder(
            completion_id=task.completion_id,
            created_s=task.created_s,
            model=task.model,
            is_usage_wanted=task.call.is_usage_wanted,
        )
        self._record: AttemptRecord | None = None
        self.tokens_told = 0
        self.tokens_generated = 0
        self.exact_total: int | None = None
        self.prompt_tokens: int | None = None

    is_recorded = True

    @property
    def can_preempt(self) -> bool:
        return self._replica.can_preempt

    @property
    def heard_us(self) -> int | None:
        # Once its record is here the attempt is over, and what is left to do is ours: a client may be slow.
        return None if self._attempt.record.done() else self._attempt.heard_us

    async def begin(self) -> None:
        events = await self._attempt.take()
        accepted = events[0]
        if isinstance(accepted, Accepted):
            self.exact_total = accepted.prompt_tokens + accepted.max_tokens
            self.prompt_tokens = accepted.prompt_tokens
        else:
            self._check(accepted)
        self._early = events[1:]

    async def complete(self) -> bytes:
        texts: list[str] = []
        while self._record is None:
            for event in await self._next():
                if isinstance(event, Piece):
                    self.tokens_generated = event.completion_tokens
                    texts.append(event.text)
                else:
                    self._check(event)
        return completion(
            completion_id=self._task.completion_id,
            created_s=self._task.created_s,
            model=self._task.model,
            text="".join(texts),
            finish_reason=self._record.finish_reason,
            usage=_usage(self._record),
        )

    async def stream(self, *, quiet_s: float) -> AsyncIterator[bytes]:
        chunks = self._chunks
        yield chunks.first()
        while self._record is None:
            events = await self._next(quiet_s)
            if not events:
                yield b""
            for event in events:
                if isinstance(event, Piece):
                    self.tokens_generated = event.completion_tokens
                    if event.text:
                        self.tokens_told = event.completion_tokens
                        yield chunks.text(event.text)
                else:
                    self._check(event)

    def ending(self) -> bytes:
        assert self._record is not None
        parts = [self._chunks.finish(self._record.finish_reason)]
        if self._task.call.is_usage_wanted:
            parts.append(self._chunks.usage(_usage(self._record)))
        parts.append(DONE)
        return b"".join(parts)

    def abort(self) -> None:
        self._replica.link.abort(self._attempt)

    def preempt(self, on_stopped: Callable[[int], None]) -> None:
        if self._attempt.is_over:
            return
        self._attempt.when_preempted(on_stopped)
        self._replica.link.preempt(self._attempt)

    def resume(self) -> None:
        self._replica.link.resume(self._attempt)

    async def counts(self) -> Counts:
        record = self._attempt.record
        # Others may wait for it, too: whoever stops waiting must not end that.
        outcome = record.result() if record.done() else await asyncio.shield(record)
        if not isinstance(outcome, AttemptRecord):
            return NOTHING
        return counts_of(outcome)

    def acknowledge(self) -> None:
        self._replica.link.acknowledge([self._attempt.attempt_id])

    async def _next(self, timeout_s: float | None = None) -> list[AttemptEvent]:
        if self._early:
            events, self._early = self._early, []
            return events
        return await self._attempt.take(timeout_s)

    def _check(self, event: AttemptEvent) -> None:
        """Take in the event that ends the attempt; raises if it ended badly."""
        match event:
            case AttemptRecord(finish_reason="error"):
                raise refusals.worker_fault(f"The engine failed: {event.error}")
            case AttemptRecord(finish_reason="aborted"):
                raise refusals.worker_fault("The worker stopped this request.")
            case AttemptRecord():
                self._record = event
            case Rejected():
                raise self._refusal(event)
            case Lost():
                raise refusals.worker_lost()

    def _refusal(self, rejected: Rejected) -> Refusal | ReplicaBusy:
        if rejected.code == "context_length_exceeded":
            return refusals.context_length_exceeded(
                prompt_tokens=rejected.prompt_tokens, context_tokens=self._replica.engine.request_tokens_max
            )
        if rejected.code == "kv_tokens_exceeded":
            return refusals.kv_tokens_exceeded(
                prompt_tokens=rejected.prompt_tokens,
                max_tokens=self._task.call.max_tokens or self._task.max_tokens,
                kv_tokens=self._replica.engine.kv_tokens,
            )
        if rejected.code == "invalid_prompt":
            return refusals.invalid_value("messages", rejected.message)
        assert rejected.code == "draining"
        return ReplicaBusy()


def _sampling(task: Task) -> Sampling:
    """How to draw: what the client asked for, then the model's defaults, and a seed of its own."""
    model = task.sampling_defaults
    return task.call.sampling(
        Sampling(
            temperature=model.temperature,
            top_p=model.top_p,
            top_k=model.top_k,
            seed=secrets.randbits(32),
        )
    )


def counts_of(record: AttemptRecord) -> Counts:
    """A worker's record in the ledger's words."""
    return Counts(
        source="engine" if record.source == "engine" else "progress_file",
        attempt_ids=(record.attempt_id,),
        prompt_tokens=record.prompt_tokens_computed,
        prompt_tokens_cached=record.prompt_tokens_cached,
        completion_tokens=record.completion_tokens,
        finish_reason=record.finish_reason,
        kv_bytes_peak=record.kv_bytes_peak,
        kv_byte_seconds=record.kv_byte_seconds,
        memory_source="kv_geometry",
        prefill_us=record.prefill_us,
        decode_us=record.decode_us,
        start_ts=record.started_ts,
        first_token_ts=record.first_token_ts,
    )


def _usage(record: AttemptRecord) -> Usage:
    return Usage(
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=record.prompt_tokens_cached,
    )
