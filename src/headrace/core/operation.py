"""One client request inside the core, from acceptance to its one final record.

    accepted ──▶ waiting ──▶ granted ──▶ closing ──▶ settled
                    └──────────────────────▲

It is a scope: leaving it, for whatever reason, gives back the place in the queue or on the replica and
writes the record. When the client is gone, its task is not kept waiting: the core closes on its own.
"""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from headrace import bounds
from headrace.api import refusals
from headrace.core.replica import Answer, Replica, Task
from headrace.errors import Refusal
from headrace.ledger.closing import (
    CLIENT_CLOSED,
    COMPLETED,
    NOTHING,
    SHUTDOWN,
    Ending,
    ending_of,
)
from headrace.ledger.records import OperationRecord, Reservation
from headrace.limits import book
from headrace.limits.book import Account
from headrace.store.errors import StoreUnavailable

if TYPE_CHECKING:
    from headrace.core.core import Core, ServedModel


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How large a request may become, in tokens."""

    maximum: int
    """Most tokens of the answer: what the client asked for, or what stands in for it."""
    total: int
    """Prompt and answer: what is held."""
    is_clamped: bool
    """The client set no maximum and a limit made it smaller than the default."""
    is_limited: bool
    """Some level limits tokens, so the maximum has to be kept."""


class Operation:
    """Made by `Core.accept`; use it with `async with`."""

    def __init__(self, core: "Core", model: "ServedModel", reservation: Reservation, *, size: Size) -> None:
        self._core = core
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.model = model
        self.reservation = reservation
        self.size = size
        self.accounts: tuple[Account, ...] = ()
        self.held = 0
        self.journalled: asyncio.Future[None] | None = None
        self.replica: Replica | None = None
        self.answer: Answer | None = None
        self.record: OperationRecord | None = None
        self.accepted_us = core.clock.monotonic_us()
        self.granted_us = 0

    @property
    def is_stream(self) -> bool:
        return self.reservation.mode == "stream"

    @property
    def request_id(self) -> str:
        return self.reservation.request_id

    @property
    def attempt_id(self) -> str:
        return f"{self.reservation.request_id}.1"

    async def __aenter__(self) -> Self:
        assert self.journalled is not None
        try:
            async with asyncio.timeout(bounds.LEDGER_SECONDS_MAX):
                await asyncio.shield(self.journalled)
        except (StoreUnavailable, TimeoutError):
            self._close(ending_of(refusals.store_unavailable()))
            raise refusals.store_unavailable() from None
        except asyncio.CancelledError:
            self._close(CLIENT_CLOSED)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.record is not None:
            return
        if isinstance(error, asyncio.CancelledError):
            self._close(SHUTDOWN if self._core.is_cutting else CLIENT_CLOSED)
            return
        closing = self._close(_ending(error))
        # The record is durable before the client hears of the end, unless the worker or the disk takes too
        # long: then the core closes on its own. A client that leaves now changes nothing.
        await asyncio.wait((closing,), timeout=bounds.SETTLE_SECONDS_MAX)

    async def granted(self, timeout_s: float | None = None) -> bool:
        """Wait for a place on a replica; False if none was free in time. Raises `Refusal`."""
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

    async def settle(self) -> OperationRecord:
        """Settle a request that was answered in full. Returns when the record is durable."""
        assert self.answer is not None and self.record is None
        counts = await self.answer.counts()
        await asyncio.shield(self._core.settle(self, COMPLETED, counts))
        assert self.record is not None
        return self.record

    def trim(self, total: int) -> None:
        """The exact prompt is known: hold no more than it and the longest answer need."""
        if total < self.held:
            book.trim(self.accounts, self.held - total)
            self.held = total

    # --- called by the core ------------------------------------------------------------------------

    def hold(self, accounts: tuple[Account, ...], tokens: int) -> None:
        self.accounts = accounts
        self.held = tokens

    def grant(self, replica: Replica) -> None:
        self.replica = replica
        self.granted_us = self._core.clock.monotonic_us()
        if not self._granted.done():
            self._granted.set_result(None)

    def refuse(self, refusal: Refusal) -> None:
        """End the wait of a request that is still in the queue."""
        if not self._granted.done():
            self._granted.set_exception(refusal)

    def _close(self, ending: Ending) -> "asyncio.Future[None]":
        """Settle once the counts are final; at once where nothing ran."""
        if not self._granted.done():
            self._granted.cancel()
        elif not self._granted.cancelled():
            self._granted.exception()  # taken note of: nobody may be waiting for it any more
        self._core.leave_queue(self)
        if self.answer is None:
            return self._core.settle(self, ending, NOTHING)
        return self._core.spawn(self._abort_and_settle(self.answer, ending))

    async def _abort_and_settle(self, answer: Answer, ending: Ending) -> None:
        answer.abort()
        counts = await answer.counts()
        await self._core.settle(self, ending, counts)


def _ending(error: BaseException | None) -> Ending:
    if isinstance(error, Refusal):
        return ending_of(error)
    return ending_of(refusals.internal_error())
