"""The gateway's end of a worker connection: attempts go out, their news come back.

A broken connection means a dead worker: whoever supervises it kills what may be left of the process,
reads its progress file and hands the records in with `deliver`, so that every attempt still ends in
exactly one record.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, cast

import msgspec

from headrace import bounds
from headrace.clock import Clock
from headrace.errors import ProtocolError
from headrace.framing import FrameSplitter, FrameWriter
from headrace.request.controls import Controls
from headrace.request.messages import Message
from headrace.worker.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Acknowledge,
    Adjust,
    AttemptRecord,
    Count,
    Counted,
    Drain,
    EndSession,
    FromWorker,
    Hello,
    News,
    Piece,
    Preempt,
    Rejected,
    Resume,
    Status,
    Submit,
    ToWorker,
)

_decode = msgspec.msgpack.Decoder(FromWorker).decode
_encode = msgspec.msgpack.Encoder().encode


class Lost(msgspec.Struct, frozen=True):
    """The worker is gone; the attempt's record will come from its progress file."""


LOST: Final = Lost()

AttemptEvent = Accepted | Rejected | Piece | AttemptRecord | Lost


class Attempt:
    """One attempt as the gateway sees it. `take` for its events, `record` for its end."""

    __slots__ = (
        "_clock",
        "_events",
        "_on_preempted",
        "_waiter",
        "attempt_id",
        "heard_us",
        "is_over",
        "record",
    )

    def __init__(self, attempt_id: str, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._clock = clock
        self.attempt_id = attempt_id
        self.heard_us = clock.monotonic_us()
        """When the worker last said anything of it, be it that it is still there."""
        self.record: asyncio.Future[AttemptRecord | Rejected | None] = loop.create_future()
        """How it ended: its record, or `Rejected`, or None if it died with its worker without a trace."""
        self._events: list[AttemptEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._on_preempted: Callable[[int], None] | None = None
        self.is_over = False
        """Its last event is here."""

    def when_preempted(self, call: Callable[[int], None]) -> None:
        """Call this once, with the tokens generated so far, when the worker has preempted it; never if it ends first."""
        assert self._on_preempted is None, "it is being preempted already"
        self._on_preempted = call

    def preempted(self, completion_tokens: int) -> None:
        call, self._on_preempted = self._on_preempted, None
        self.heard_us = self._clock.monotonic_us()
        if call is not None:
            call(completion_tokens)

    async def take(self, timeout_s: float | None = None) -> list[AttemptEvent]:
        """All events since the last call; empty if none came in time. The last one is `Rejected`, a
        record or `LOST`.

        Cancelling it loses nothing; the attempt goes on until it is aborted.
        """
        if not self._events:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        events, self._events = self._events, []
        return events

    def push(self, event: AttemptEvent) -> None:
        if isinstance(event, AttemptRecord | Rejected | Lost):
            self._on_preempted, self.is_over = None, True
        self._events.append(event)
        self.heard_us = self._clock.monotonic_us()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def resolve(self, outcome: AttemptRecord | Rejected | None) -> None:
        if not self.record.done():
            self.record.set_result(outcome)


class WorkerLink(asyncio.Protocol):
    """A connection to one worker. Made by `connect`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._writer = FrameWriter()
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._attempts: dict[str, Attempt] = {}
        self._counts: dict[int, asyncio.Future[int | None]] = {}
        self._next_count = 0
        self._hello: asyncio.Future[Hello] = loop.create_future()
        self.lost = asyncio.Event()
        """Set when the connection is gone or the worker broke the protocol."""
        self.status: Status | None = None
        self._heard_s = loop.time()

    @classmethod
    async def connect(cls, path: Path, clock: Clock) -> tuple["WorkerLink", Hello]:
        """Connect and wait for the worker's `Hello`. Raises `OSError` or `ProtocolError`."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(loop, clock), str(path))
        hello = await link._hello
        if hello.protocol_version != PROTOCOL_VERSION:
            link.close()
            raise ProtocolError(
                f"worker {hello.worker_id} speaks protocol {hello.protocol_version}, not {PROTOCOL_VERSION}"
            )
        return link, hello

    def submit(self, submit: Submit) -> Attempt:
        """Start an attempt. On a lost connection it is lost at once."""
        attempt = Attempt(submit.attempt_id, self._loop, self._clock)
        if self.lost.is_set():
            attempt.push(LOST)
            attempt.resolve(None)
            return attempt
        self._attempts[submit.attempt_id] = attempt
        self._send(submit)
        return attempt

    async def count(self, messages: list[Message]) -> int | None:
        """Tokens of a prompt; None if the worker is gone or silent, or the messages make no prompt."""
        if self.lost.is_set():
            return None
        self._next_count += 1
        number = self._next_count
        counted: asyncio.Future[int | None] = self._loop.create_future()
        self._counts[number] = counted
        self._send(Count(number, messages))
        try:
            async with asyncio.timeout(bounds.COUNT_SECONDS_MAX):
                return await counted
        except TimeoutError:
            return None
        finally:
            self._counts.pop(number, None)

    def abort(self, attempt: Attempt) -> None:
        """Stop an attempt. Its record still comes; without effect if it has ended."""
        if not attempt.record.done() and not self.lost.is_set():
            self._send(Abort(attempt.attempt_id))

    def preempt(self, attempt: Attempt) -> None:
        """Take an attempt out of the engine; `Attempt.when_preempted` says when. Without effect if it has ended."""
        if not attempt.record.done() and not self.lost.is_set():
            self._send(Preempt(attempt.attempt_id))

    def resume(self, attempt: Attempt) -> None:
        """Go on with a preempted attempt. Without effect on any other."""
        if not attempt.record.done() and not self.lost.is_set():
            self._send(Resume(attempt.attempt_id))

    def acknowledge(self, attempt_ids: list[str]) -> None:
        if not self.lost.is_set():
            self._send(Acknowledge(attempt_ids))

    def end_session(self, session: str) -> None:
        if not self.lost.is_set():
            self._send(EndSession(session))

    def adjust(self, controls: Controls) -> None:
        if not self.lost.is_set():
            self._send(Adjust(controls))

    def drain(self) -> None:
        if not self.lost.is_set():
            self._send(Drain())

    def deliver(self, records: Iterable[AttemptRecord]) -> None:
        """Hand in what a dead worker's progress file says, and end every attempt it says nothing of."""
        assert self.lost.is_set()
        attempts, self._attempts = self._attempts, {}
        for record in records:
            attempt = attempts.pop(record.attempt_id, None)
            if attempt is not None:
                attempt.resolve(record)
        for attempt in attempts.values():
            attempt.resolve(None)

    def is_stuck(self, *, step_s_max: float, silence_s_max: float) -> bool:
        """Whether the engine hangs in a step, or the process says nothing at all any more."""
        if self._loop.time() - self._heard_s > silence_s_max:
            return True
        return self.status is not None and self.status.step_age_s > step_s_max

    def break_off(self) -> None:
        """Treat the worker as gone, whatever state its connection is in."""
        self._break(ProtocolError("the worker was given up"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                self._received(_decode(payload))
        except (ProtocolError, msgspec.DecodeError) as error:
            self._break(ProtocolError(f"the worker broke the protocol: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._break(ProtocolError("the worker closed the connection"))

    def _received(self, message: FromWorker) -> None:
        match message:
            case News():
                self._route(message)
            case Status():
                self.status = message
                self._heard_s = self._loop.time()
                self._saw(message.attempts)
            case Counted(number, prompt_tokens):
                counted = self._counts.get(number)
                if counted is not None and not counted.done():
                    counted.set_result(prompt_tokens)
            case Hello():
                if not self._hello.done():
                    self._hello.set_result(message)

    def _saw(self, attempt_ids: list[str]) -> None:
        now_us = self._clock.monotonic_us()
        for attempt_id in attempt_ids:
            attempt = self._attempts.get(attempt_id)
            if attempt is not None:
                attempt.heard_us = now_us

    def _route(self, news: News) -> None:
        attempts = self._attempts
        for accepted in news.accepted:
            if accepted.attempt_id in attempts:
                attempts[accepted.attempt_id].push(accepted)
        for preempted in news.preempted:
            attempt = attempts.get(preempted.attempt_id)
            if attempt is not None:
                attempt.preempted(preempted.completion_tokens)
        for piece in news.pieces:
            attempt = attempts.get(piece.attempt_id)
            if attempt is not None:
                attempt.push(piece)
        for rejected in news.rejected:
            self._ended(rejected.attempt_id, rejected)
        for record in news.records:
            self._ended(record.attempt_id, record)

    def _ended(self, attempt_id: str, outcome: AttemptRecord | Rejected) -> None:
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            attempt.push(outcome)
            attempt.resolve(outcome)

    def _break(self, error: ProtocolError) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        if not self._hello.done():
            self._hello.set_exception(error)
        for attempt in self._attempts.values():
            attempt.push(LOST)
        for counted in self._counts.values():
            if not counted.done():
                counted.set_result(None)
        self.close()

    def _send(self, message: ToWorker) -> None:
        assert self._transport is not None
        self._transport.write(self._writer.frame(_encode(message)))
