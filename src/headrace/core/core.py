"""The owner of admission and ledger: every request is an `Operation` of the core.

One object, one thread. What it decides (who runs where, who waits, which record ends what) is pure
code in `headrace.scheduling` and `headrace.ledger`; here are the futures and the journal around it.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final

import msgspec
import structlog

from headrace.api import refusals
from headrace.clock import Clock
from headrace.config.settings import ModelSettings, SamplingDefaults, Settings
from headrace.core.admission import Admission
from headrace.core.directory import Directory
from headrace.core.embedded import counts_of
from headrace.core.metrics import CoreMetrics
from headrace.core.operation import Operation, Size
from headrace.core.replica import Replica
from headrace.errors import Refusal
from headrace.ledger.closing import NOTHING, RECOVERED, SHUTDOWN, Counts, Ending, close, ending_of
from headrace.ledger.records import OperationRecord, Reservation
from headrace.limits import book
from headrace.limits.book import Account, Ask
from headrace.limits.window import WINDOW_US
from headrace.request.messages import Message
from headrace.scheduling.dispatch import ModelQueue, NoReplica, QueueFull
from headrace.store.errors import StoreUnavailable
from headrace.store.journal import Journal
from headrace.worker.messages import AttemptRecord

_log = structlog.get_logger()


class ServedModel:
    """A model that clients can ask for, with its queue and its replicas."""

    def __init__(
        self, model_id: str, *, sampling: SamplingDefaults, queue_length: int, created_s: int
    ) -> None:
        self.model_id = model_id
        self.sampling = sampling
        self.created_s = created_s
        self.queue: ModelQueue[Operation] = ModelQueue(length_max=queue_length)
        self.replicas: dict[str, Replica] = {}

    @property
    def context_tokens(self) -> int | None:
        return next((replica.context_tokens for replica in self.replicas.values()), None)

    @property
    def can_count(self) -> bool:
        """Whether a replica can count a prompt's tokens exactly."""
        return any(replica.can_count for replica in self.replicas.values())


CUT_MARGIN_US: Final = 20_000
TOKEN_LIMITS: Final = frozenset({"tpm", "prompt_tokens", "total_tokens"})
"""Limits that a bound may exceed where the exact count would not."""


class NeedsCount(Exception):
    """The bound of the prompt does not fit; its exact count may."""


class Core:
    """Accepts, grants, settles. Belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        directory: Directory,
        journal: Journal,
        clock: Clock,
        metrics: CoreMetrics,
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.journal = journal
        self.clock = clock
        self.metrics = metrics
        self.admission = Admission(directory, clock, cluster=settings.limits)
        self.is_stopping = False
        self._cut_us = 0
        self.models: dict[str, ServedModel] = {}
        self._open: set[Operation] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- models and replicas: called by the supervisor ------------------------------------------------

    def add_model(self, settings: ModelSettings) -> None:
        assert settings.id not in self.models
        self.admission.set_model_limits(settings.id, settings.limits)
        self.models[settings.id] = ServedModel(
            settings.id,
            sampling=settings.sampling_defaults,
            queue_length=self.settings.queue.length,
            created_s=self.clock.wall_us() // 1_000_000,
        )

    def expect_replica(self, model_id: str, replica_id: str) -> None:
        """A replica is starting; requests may wait for it."""
        self.models[model_id].queue.expect(replica_id)

    def add_replica(self, model_id: str, replica: Replica, *, capacity: int) -> None:
        """A replica is ready."""
        model = self.models[model_id]
        model.replicas[replica.replica_id] = replica
        model.queue.add(replica.replica_id, capacity=capacity)
        self._dispatch(model)

    def remove_replica(self, model_id: str, replica_id: str, *, successor_id: str | None) -> None:
        """A replica is gone. With a successor expected, waiting requests wait on; without, they may end."""
        model = self.models[model_id]
        if successor_id is not None:
            model.queue.expect(successor_id)
        model.replicas.pop(replica_id, None)
        model.queue.give_up(replica_id)
        for operation in model.queue.drop_hopeless():
            operation.refuse(refusals.no_worker(model_id, retry_after_s=5))

    def running_on(self, model_id: str, replica_id: str) -> int:
        return self.models[model_id].queue.running_on(replica_id)

    # --- operations: called by the gateway --------------------------------------------------------

    def accept(self, reservation: Reservation, *, max_tokens: int | None, is_exact: bool) -> Operation:
        """Check every limit, hold the tokens, take a place in the queue and journal the reservation, or
        refuse: one decision, all or nothing.

        `reservation.prompt_tokens_estimated` is an upper bound of the prompt unless `is_exact`. Where only
        the bound stands in the way, `NeedsCount` asks for the exact count. The operation is an async
        context manager: entering it waits for the journal, leaving it for any reason settles it.
        Raises `Refusal` (404, 429, 503); refusals of a known model are recorded.
        """
        model = self.models.get(reservation.model)
        if model is None:
            raise refusals.model_not_found(reservation.model)
        if self.is_stopping:
            raise refusals.shutting_down()
        if not self.journal.is_healthy:
            raise refusals.store_unavailable()
        accounts = self.admission.accounts_of(
            tenant_id=reservation.tenant_id, api_key_id=reservation.api_key_id, model=reservation.model
        )
        size = self._size(model, accounts, reservation.prompt_tokens_estimated, max_tokens)
        is_stream = reservation.mode == "stream"
        ask = Ask(
            prompt_tokens=reservation.prompt_tokens_estimated, total_tokens=size.total, is_stream=is_stream
        )
        excess = self.admission.excess(accounts, ask)
        if excess is not None and excess.limit_type in TOKEN_LIMITS and not is_exact and model.can_count:
            raise NeedsCount
        operation = Operation(
            self, model, msgspec.structs.replace(reservation, reserved_tokens=size.total), size=size
        )
        try:
            operation.journalled = self.journal.reserve(operation.reservation)
        except StoreUnavailable:
            raise refusals.store_unavailable() from None
        if excess is not None:
            raise self._turn_away(operation, self.admission.refusal(excess))
        try:
            model.queue.enter(operation, may_start=book.may_start(accounts, is_stream=is_stream))
        except QueueFull as full:
            raise self._turn_away(operation, refusals.queue_full(limit=full.limit, used=full.used)) from None
        except NoReplica:
            raise self._turn_away(operation, refusals.no_worker(model.model_id, retry_after_s=5)) from None
        self.admission.hold(accounts, ask)
        operation.hold(accounts, size.total)
        self._open.add(operation)
        self._dispatch(model)
        return operation

    async def count_prompt(self, model_id: str, messages: list[Message]) -> int | None:
        """The exact tokens of a prompt, by a ready replica; None if none can say."""
        for replica in list(self.models[model_id].replicas.values()):  # they come and go while this waits
            tokens = await replica.count_prompt(messages)
            if tokens is not None:
                return tokens
        return None

    def _size(
        self, model: ServedModel, accounts: Sequence[Account], prompt_tokens: int, max_tokens: int | None
    ) -> Size:
        """What to hold, and the maximum that makes it enough."""
        context = model.context_tokens
        maximum = self.settings.default_max_tokens if max_tokens is None else max_tokens
        if context is not None:
            maximum = min(maximum, context)
        room = self.admission.room(accounts)
        is_clamped = (
            max_tokens is None and room is not None and prompt_tokens + maximum > room > prompt_tokens
        )
        if is_clamped:
            assert room is not None
            maximum = room - prompt_tokens
        total = prompt_tokens + maximum
        return Size(
            maximum=maximum,
            total=total if context is None else min(total, context),
            is_clamped=is_clamped,
            is_limited=room is not None,
        )

    def leave_queue(self, operation: Operation) -> None:
        operation.model.queue.leave(operation)

    def settle(self, operation: Operation, ending: Ending, counts: Counts) -> "asyncio.Future[None]":
        """Write the final record and free the place. The future is done once the record is durable."""
        record = close(
            operation.reservation,
            ending,
            counts,
            worker_id=operation.replica.worker_id if operation.replica else None,
            end_ts=self.clock.wall_us(),
        )
        operation.record = record
        self._open.discard(operation)
        durable = self.journal.settle(record)
        answer = operation.answer
        if answer is not None:
            durable.add_done_callback(lambda done: None if done.cancelled() else answer.acknowledge())
        self.metrics.settled(record)
        self.admission.settle(
            operation.accounts, held=operation.held, used=counts.prompt_tokens + counts.completion_tokens
        )
        if operation.replica is not None:
            operation.model.queue.release(operation.replica.replica_id)
            book.release(operation.accounts, is_stream=operation.is_stream)
            for model in self.models.values():
                if model.queue.num_waiting:
                    self._dispatch(model)
        return durable

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task that the core owns, so that it outlives the client's."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def usage(self, request_id: str, tenant_id: str) -> OperationRecord | Reservation | None:
        """A tenant's operation: its final record, or its reservation while it is open."""
        return self.journal.get(request_id, tenant_id) or self.journal.get_open(request_id, tenant_id)

    # --- start and stop -------------------------------------------------------------------------------

    async def recover(self, records: Iterable[AttemptRecord]) -> int:
        """Close what an earlier life left open, from what its workers noted. Returns how many there were."""
        by_attempt = {record.attempt_id: record for record in records}
        durable = []
        for reservation in self.journal.open_reservations():
            record = by_attempt.get(f"{reservation.request_id}.1")
            counts = NOTHING if record is None else counts_of(record)
            durable.append(
                self.journal.settle(
                    close(reservation, RECOVERED, counts, worker_id=None, end_ts=self.clock.wall_us())
                )
            )
        if durable:
            await asyncio.gather(*durable)
            _log.warning("operations_recovered", count=len(durable))
        self.admission.restore(self.journal.settled_since(self.clock.wall_us() - WINDOW_US))
        return len(durable)

    def begin_stop(self, *, drain_s: float) -> None:
        """Accept nothing any more. What still runs after `drain_s` is going to be cut."""
        self.is_stopping = True
        # Timers of the event loop count whole milliseconds and may fire a little early.
        self._cut_us = self.clock.monotonic_us() + int(drain_s * 1e6) - CUT_MARGIN_US

    @property
    def is_cutting(self) -> bool:
        """Whether a request that is cancelled now was most likely cut by the end of the drain."""
        return self.is_stopping and self.clock.monotonic_us() >= self._cut_us

    async def settle_open(self, *, seconds: float) -> None:
        """Wait for operations that are still being closed. Call after the gateway has drained."""
        for operation in list(self._open):
            operation.refuse(refusals.shutting_down())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def stop(self) -> None:
        """Wait once more, after the workers are gone, and close whatever is left."""
        await self.settle_open(seconds=10)
        for operation in list(self._open):
            _log.error("operation_left_open", request_id=operation.request_id)
            self.settle(operation, SHUTDOWN, NOTHING)

    def _turn_away(self, operation: Operation, refusal: Refusal) -> Refusal:
        """Record a refusal without waiting for the journal."""
        self.settle(operation, ending_of(refusal), NOTHING)
        return refusal

    def _dispatch(self, model: ServedModel) -> None:
        for operation, replica_id in model.queue.dispatch(_may_start):
            book.grant(operation.accounts, is_stream=operation.is_stream)
            operation.grant(model.replicas[replica_id])


def _may_start(operation: Operation) -> bool:
    return book.may_start(operation.accounts, is_stream=operation.is_stream)
