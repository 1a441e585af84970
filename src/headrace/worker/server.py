"""The worker's network side: gateways connect over a Unix socket, attempts go to the engine loop.

One asyncio thread. Tokenizing runs on a helper thread, computing on the engine thread; this one only
passes messages, so heartbeats and aborts go on whatever the engine does.
"""

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import msgspec
import structlog

from headrace import bounds
from headrace.caching.slots import CacheOrder
from headrace.clock import Clock
from headrace.engine.protocol import EngineInfo
from headrace.errors import ProtocolError
from headrace.framing import FrameSplitter, FrameWriter
from headrace.request.messages import Message
from headrace.worker.loop import EngineLoop, LoopNews
from headrace.worker.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Acknowledge,
    Adjust,
    Count,
    Counted,
    Drain,
    EndSession,
    FromWorker,
    Hello,
    News,
    Preempt,
    Rejected,
    Resume,
    Status,
    Submit,
    ToWorker,
)
from headrace.worker.progress import ProgressFile
from headrace.worker.prompt import PromptBuilder, PromptError
from headrace.worker.sequence import Sequence
from headrace.worker.stats import StepStats

STATUS_SECONDS = 0.5
WRITE_BYTES_MAX = 64 * bounds.MIB
"""A gateway that lets so much wait is dropped; its attempts end as if it had gone."""

_log = structlog.get_logger()
_decode = msgspec.msgpack.Decoder(ToWorker).decode
_encode = msgspec.msgpack.Encoder().encode


class WorkerServer:
    """Accepts gateways and routes messages between them and the loop."""

    def __init__(
        self,
        *,
        worker_id: str,
        info: EngineInfo,
        prompts: PromptBuilder,
        progress: ProgressFile,
        stats: StepStats,
        clock: Clock,
        load_us: int,
        warm_up_us: int,
        is_caching: bool = True,
    ) -> None:
        self._worker_id = worker_id
        self._info = info
        self._prompts = prompts
        self._progress = progress
        self._stats = stats
        self._clock = clock
        self._load_us = load_us
        self._warm_up_us = warm_up_us
        self._is_caching = is_caching
        self._tokenizer = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._connections: dict[int, _Connection] = {}
        self._next_connection = 0
        self._attempts: dict[str, int] = {}
        """Attempts of live connections, from `Submit` to their record; the value is the connection."""
        self._tokenizing: dict[str, list[Abort | Preempt | Resume]] = {}
        """Attempts whose prompt is still being tokenized, and what they have been told meanwhile."""
        self._is_draining = False
        self.drained = asyncio.Event()
        self._loop: EngineLoop | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, path: Path, loop: EngineLoop) -> None:
        """Listen on a Unix socket that only this user may open."""
        self._loop = loop
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: _Connection(self), str(path)
            )
        finally:
            os.umask(mask)
        self._spawn(self._send_status())

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self._connections.values()):
            connection.close()
        self._tokenizer.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Reject what comes from now on; `drained` is set once nothing runs."""
        self._is_draining = True
        if self._loop is not None:
            self._loop.drain()
        self._check_drained()

    def publish(self, news: LoopNews) -> None:
        """Send the loop's news to the gateways they belong to. Call on the network thread."""
        parcels: dict[int, News] = {}
        for number, preempted in news.preempted:
            parcels.setdefault(number, News()).preempted.append(preempted)
        for number, piece in news.pieces:
            parcels.setdefault(number, News()).pieces.append(piece)
        for number, record in news.records:
            self._attempts.pop(record.attempt_id, None)
            parcels.setdefault(number, News()).records.append(record)
        for number, parcel in parcels.items():
            connection = self._connections.get(number)
            if connection is not None:
                connection.send(parcel)
        self._check_drained()

    # --- called by connections ------------------------------------------------------------------------

    def connected(self, connection: "_Connection") -> int:
        number = self._next_connection
        self._next_connection += 1
        self._connections[number] = connection
        assert self._loop is not None
        connection.send(
            Hello(
                protocol_version=PROTOCOL_VERSION,
                worker_id=self._worker_id,
                pid=os.getpid(),
                engine=self._info,
                load_us=self._load_us,
                warm_up_us=self._warm_up_us,
                can_preempt=self._loop.can_preempt,
                unacknowledged=self._progress.unacknowledged(),
            )
        )
        return number

    def disconnected(self, number: int) -> None:
        """A gateway went away: nobody waits for its attempts any more."""
        self._connections.pop(number, None)
        for attempt_id in [one for one, owner in self._attempts.items() if owner == number]:
            self._tell(Abort(attempt_id))

    def received(self, number: int, message: ToWorker) -> None:
        match message:
            case Submit():
                self._submit(number, message)
            case Abort() | Preempt() | Resume():
                if self._attempts.get(message.attempt_id) == number:
                    self._tell(message)
            case Count():
                self._spawn(self._count(number, message))
            case Acknowledge(attempt_ids):
                self._progress.acknowledged(attempt_ids)
            case EndSession(session):
                if self._loop is not None:
                    self._loop.end_session(session)
            case Adjust(controls):
                if self._loop is not None:
                    self._loop.adjust(controls)
            case Drain():
                self.drain()

    # --- attempts -----------------------------------------------------------------------------------

    def _submit(self, number: int, submit: Submit) -> None:
        if submit.attempt_id in self._attempts:
            raise ProtocolError(f"attempt {submit.attempt_id} was submitted twice")
        if self._is_draining or self._progress.num_unacknowledged() >= bounds.RECORDS_UNACKNOWLEDGED_MAX:
            self._reject(number, Rejected(submit.attempt_id, "draining", "The worker takes no new attempts."))
            return
        self._attempts[submit.attempt_id] = number
        self._tokenizing[submit.attempt_id] = []
        self._spawn(self._prepare(number, submit))

    async def _count(self, number: int, count: Count) -> None:
        outcome = await asyncio.get_running_loop().run_in_executor(
            self._tokenizer, self._tokenize, "", count.messages
        )
        tokens: int | None = (
            outcome.prompt_tokens or None if isinstance(outcome, Rejected) else len(outcome.tokens)
        )
        connection = self._connections.get(number)
        if connection is not None:
            connection.send(Counted(count.number, tokens))

    async def _prepare(self, number: int, submit: Submit) -> None:
        """Tokenize, check against the context, hand over to the loop."""
        arrived_us = self._clock.monotonic_us()
        outcome = await asyncio.get_running_loop().run_in_executor(
            self._tokenizer, self._tokenize, submit.attempt_id, submit.messages
        )
        told = self._tokenizing.pop(submit.attempt_id)
        if isinstance(outcome, Rejected):
            self._attempts.pop(submit.attempt_id, None)
            self._reject(number, outcome)
            return
        prompt = outcome.tokens
        room = self._info.context_tokens - len(prompt)
        maximum = room if submit.max_tokens is None else min(submit.max_tokens, room)
        sequence = Sequence(
            attempt_id=submit.attempt_id,
            tenant_id=submit.tenant_id,
            connection_id=number,
            prompt=prompt,
            max_tokens=maximum,
            sampling=submit.sampling,
            stop=submit.stop,
            arrived_us=arrived_us,
            order=submit.cache if self._is_caching else CacheOrder(mode="off"),
            cacheable=outcome.cacheable,
            batch_wait_ms=submit.batch_wait_ms,
        )
        connection = self._connections.get(number)
        if connection is not None:
            connection.send(News(accepted=[Accepted(submit.attempt_id, len(prompt), maximum)]))
        assert self._loop is not None
        self._loop.submit(sequence)
        for message in told:
            self._tell(message)

    def _tokenize(self, attempt_id: str, messages: list[Message]) -> "_Prompt | Rejected":
        """On the tokenizer thread. A prompt that cannot fit is not tokenized at all."""
        context = self._info.context_tokens
        at_least = sum(len(message.content.encode()) for message in messages) // self._prompts.token_bytes_max
        if at_least >= context:
            return Rejected(attempt_id, "context_length_exceeded", "", at_least)
        try:
            tokens = self._prompts.build(messages)
            cacheable = self._prompts.cacheable(messages, tokens)
        except PromptError as error:
            return Rejected(attempt_id, "invalid_prompt", str(error))
        except Exception:  # noqa: BLE001 - whatever it was: an attempt without an answer would hang for ever
            _log.exception("prompt_failed", attempt_id=attempt_id)
            return Rejected(
                attempt_id, "invalid_prompt", "The worker could not make a prompt of these messages."
            )
        if not tokens:
            return Rejected(attempt_id, "invalid_prompt", "The messages make an empty prompt.")
        if len(tokens) >= context:
            return Rejected(attempt_id, "context_length_exceeded", "", len(tokens))
        return _Prompt(tokens, cacheable)

    def _tell(self, message: Abort | Preempt | Resume) -> None:
        """Pass on what an attempt is told, once it is in the loop."""
        told = self._tokenizing.get(message.attempt_id)
        if told is not None:
            told.append(message)
            return
        assert self._loop is not None
        match message:
            case Abort(attempt_id):
                self._loop.abort(attempt_id)
            case Preempt(attempt_id):
                self._loop.preempt(attempt_id)
            case Resume(attempt_id):
                self._loop.resume(attempt_id)

    def _reject(self, number: int, rejected: Rejected) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.send(News(rejected=[rejected]))
        self._check_drained()

    def _check_drained(self) -> None:
        if self._is_draining and not self._attempts:
            self.drained.set()

    async def _send_status(self) -> None:
        assert self._loop is not None
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            owned: dict[int, list[str]] = {}
            for attempt_id, number in self._attempts.items():
                owned.setdefault(number, []).append(attempt_id)
            for number, connection in list(self._connections.items()):
                connection.send(
                    Status(
                        running=self._loop.num_running,
                        waiting=self._loop.num_waiting,
                        suspended=self._loop.num_suspended,
                        attempts=owned.get(number, []),
                        step_age_s=self._stats.step_age_s(self._clock.monotonic_us()),
                        is_draining=self._is_draining,
                    )
                )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Prompt(msgspec.Struct, frozen=True):
    tokens: list[int]
    cacheable: int


class _Connection(asyncio.Protocol):
    """One gateway."""

    def __init__(self, server: WorkerServer) -> None:
        self._server = server
        self._splitter = FrameSplitter()
        self._writer = FrameWriter()
        self._transport: asyncio.Transport | None = None
        self._number = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._number = self._server.connected(self)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                self._server.received(self._number, _decode(payload))
        except (ProtocolError, msgspec.DecodeError) as error:
            _log.warning("gateway_broke_protocol", error=str(error))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.disconnected(self._number)

    def send(self, message: FromWorker) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(self._writer.frame(_encode(message)))
        if transport.get_write_buffer_size() > WRITE_BYTES_MAX:
            _log.warning("gateway_too_slow", waiting_bytes=transport.get_write_buffer_size())
            transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
