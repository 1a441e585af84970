"""One client request inside the core, from acceptance to its one final record.

    accepted ──▶ waiting ──▶ granted ──▶ closing ──▶ settled
                    │ ◀── put back ┘        ▲
                    └───────────────────────┘

It is a scope: leaving it, for whatever reason, gives back the place in the queue or on the replica and
writes the record. When the client is gone, its task is not kept waiting: the core closes on its own.
"""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace import bounds
from headrace.admission.entry import Entry, Phase
from headrace.admission.size import Size
from headrace.api import refusals
from headrace.core.replica import Answer, Replica, ReplicaBusy, Task
from headrace.errors import Refusal
from headrace.ledger.closing import CLIENT_CLOSED, COMPLETED, NOTHING, SHUTDOWN, Ending, ending_of
from headrace.ledger.records import OperationRecord, Reservation
from headrace.request.messages import Message
from headrace.scheduling.explain import Explanation
from headrace.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from headrace.core.core import Core
    from headrace.core.served_model import ServedModel


class Operation:
    """Made by `Core.accept`; use it with `async with`."""

    __slots__ = (
        "_core",
        "_granted",
        "_interruption",
        "_task",
        "accepted_us",
        "answer",
        "attempts",
        "closing",
        "counting",
        "entry",
        "granted_us",
        "journalled",
        "messages",
        "model",
        "record",
        "replica",
        "request_id",
        "reservation",
        "size",
        "wait",
    )

    def __init__(
        self,
        core: "Core",
        model: "ServedModel",
        reservation: Reservation,
        messages: list[Message],
        entry: Entry,
        size: Size,
        now_us: int,
    ) -> None:
        self._core = core
        self._granted: asyncio.Future[None] | None = None
        """Made only where somebody has to wait for it."""
        self._task: asyncio.Task[object] | None = None
        self._interruption: Refusal | None = None
        self.model = model
        self.reservation = reservation
        self.messages = messages
        self.closing: asyncio.Task[None] | None = None
        """Waits for the final counts, once nobody works on the request any more."""
        self.counting: asyncio.Task[None] | None = None
        """Finds out how long the prompt is, if somebody needs to know before the worker says so."""
        self.entry = entry
        self.size = size
        self.journalled: asyncio.Future[None] | None = None
        self.replica: Replica | None = None
        self.answer: Answer | None = None
        self.attempts = 0
        self.record: OperationRecord | None = None
        self.request_id = entry.request_id
        self.accepted_us = now_us
        self.granted_us = 0
        self.wait: Explanation | None = None
        """Where it stood and why when it began to wait; None as long as it has not."""

    @property
    def is_stream(self) -> bool:
        return self.entry.is_stream

    async def __aenter__(self) -> Self:
        assert self.journalled is not None
        self._task = asyncio.current_task(self._core.loop)
        try:
            # Cancelling it does not take the reservation back; it only ends the wait.
            await self.journalled
        except StoreUnavailable:
            self._close(ending_of(refusals.store_unavailable()))
            raise refusals.store_unavailable() from None
        except asyncio.CancelledError:
            refusal = self._interrupted()
            self._close(CLIENT_CLOSED if refusal is None else ending_of(refusal))
            if refusal is not None:
                raise refusal from None
            raise
        finally:
            self._core.journalled(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            refusal = self._interrupted()
            if refusal is not None:
                await self._end(refusal)
                raise refusal from None
            if self.record is None:
                self._close(SHUTDOWN if self._core.is_cutting else CLIENT_CLOSED)
        elif self.record is None:
            await self._end(error)
        self._task = None

    async def granted(self, timeout_s: float | None = None) -> bool:
        """Wait for a place on a replica; False if none was free in time. Raises `Refusal`."""
        if self.replica is not None:
            return True
        if self._granted is None:
            self._granted = asyncio.get_running_loop().create_future()
        if not self._granted.done():
            await asyncio.wait((self._granted,), timeout=timeout_s)
            if not self._granted.done():
                return False
        self._granted.result()
        return True

    def start(self, task: Task) -> Answer:
        """Begin the attempt on the replica that was granted."""
        assert self.replica is not None and self.answer is None
        self.answer = self.replica.start(task)
        return self.answer

    def next_attempt_id(self) -> str:
        """Ids of attempts are the request's with a number behind."""
        self.attempts += 1
        return f"{self.request_id}.{self.attempts}"

    def put_back(self, busy: ReplicaBusy) -> None:
        """The replica is full after all: be the next one again, wherever there is room."""
        self.answer = None
        self._core.put_back(self, busy)

    async def settle(self) -> OperationRecord:
        """Settle a request that was answered in full. Returns when the record is durable."""
        assert self.answer is not None and self.record is None
        counts = await self.answer.counts()
        await self._core.settle(self, COMPLETED, counts)
        assert self.record is not None
        return self.record

    @property
    def replica_worker(self) -> str | None:
        """The worker it runs on, by the name that stays."""
        return None if self.replica is None else self.replica.worker_id

    @property
    def delivered_tokens(self) -> int:
        """Tokens of the answer that were handed to the client's connection before it was answered in full."""
        return self.answer.tokens_told if self.answer is not None and self.is_stream else 0

    # --- called by the core ------------------------------------------------------------------------

    def grant(self, replica: Replica, now_us: int) -> None:
        if self.answer is not None:  # it had been stopped for another, and goes on where it was
            self.answer.resume()
            return
        self.replica = replica
        self.granted_us = now_us
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    def ungrant(self) -> None:
        self.replica = None
        self._granted = None

    def refuse(self, refusal: Refusal) -> None:
        """End the wait of a request that is still in the queue, or not even journalled."""
        if self.journalled is not None and not self.journalled.done():
            self.interrupt(refusal)
        elif self.replica is None:
            if self._granted is None:
                self._granted = asyncio.get_running_loop().create_future()
            if not self._granted.done():
                self._granted.set_exception(refusal)
                self._granted.exception()  # taken note of: nobody may be waiting for it any more
        elif self.entry.phase is Phase.DROPPED:  # stopped for another, and displaced since
            self.interrupt(refusal)

    def interrupt(self, refusal: Refusal) -> None:
        """End whatever the request is doing with this refusal. Without effect once it is closing."""
        if self.record is None and self._interruption is None and self._task is not None:
            self._interruption = refusal
            self._task.cancel()

    def _interrupted(self) -> Refusal | None:
        """The refusal that a cancellation stands for; None if it is a real one, or one came as well."""
        if self._interruption is None or self._task is None or self._task.uncancel() > 0:
            return None
        return self._interruption

    async def _end(self, error: BaseException | None) -> None:
        """Close after an error. The record is durable before the client hears of it, unless the worker or the
        disk takes too long: then the core closes on its own. A client that leaves now changes nothing.
        """
        if self.record is not None:
            return
        closing = self._close(ending_of(error if isinstance(error, Refusal) else refusals.internal_error()))
        await asyncio.wait((closing,), timeout=bounds.SETTLE_SECONDS_MAX)

    def _close(self, ending: Ending) -> "asyncio.Future[None]":
        """Settle once the counts are final; at once where nothing ran."""
        if self.answer is None:
            return self._core.settle(self, ending, NOTHING)
        self._core.is_closing(self)
        self.closing = self._core.spawn(self._abort_and_settle(self.answer, ending))
        return self.closing

    async def _abort_and_settle(self, answer: Answer, ending: Ending) -> None:
        answer.abort()
        await self._core.settle(self, ending, await answer.counts())
