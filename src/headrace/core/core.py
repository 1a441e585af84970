"""The owner of admission and ledger: every request is an `Operation` of the core.

One object, one thread. What it decides (who is accepted, who runs where, who waits, which record ends what)
is pure code in `headrace.admission` and `headrace.ledger`; here are the futures and the journal around it.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final

import msgspec
import structlog

from headrace.admission.applicant import Applicant
from headrace.admission.controller import AdmissionController, Admitted, LimitReached
from headrace.admission.entry import Entry, Phase
from headrace.api import refusals
from headrace.caching.slots import KEPT_IN_FULL, CacheOrder
from headrace.clock import Clock
from headrace.config.scheduling import SchedulingSettings, ServiceClass
from headrace.config.settings import ModelSettings, Settings
from headrace.core.accounts import CallerAccounts
from headrace.core.applicants import Applicants
from headrace.core.cache_orders import CacheOrders, session_key
from headrace.core.demands import count_service, learn, took
from headrace.core.directory import Directory
from headrace.core.dispatcher import Dispatcher
from headrace.core.metrics import CoreMetrics
from headrace.core.operation import Operation
from headrace.core.queue_views import QueueViews
from headrace.core.recovery import close_left_open
from headrace.core.refusal_log import RefusalLog
from headrace.core.replica import Answer, Replica, ReplicaBusy
from headrace.core.served_model import ServedModel, capacity_by
from headrace.core.sessions import Sessions
from headrace.core.watch import Watch
from headrace.errors import Refusal
from headrace.ledger.closing import EXPIRED, LATE, NOTHING, SHUTDOWN, Counts, Ending, close
from headrace.ledger.records import OperationRecord, Reservation
from headrace.limits.window import WINDOW_US
from headrace.request.controls import AS_CONFIGURED, Controls
from headrace.request.latency import LatencySla
from headrace.request.messages import Message
from headrace.scheduling.policy import QueuePolicy
from headrace.scheduling.queue_bounds import NoReplica, QueueFull
from headrace.store.errors import StoreUnavailable
from headrace.store.journal import Journal
from headrace.worker.messages import AttemptRecord, KeptSession

_log = structlog.get_logger()

CUT_MARGIN_US: Final = 20_000


class TurnedAway(Exception):
    """There was no room for a request that may be served with less. Nobody has recorded the refusal: who gives up does
    (`Core.turn_away`)."""

    def __init__(self, reservation: Reservation, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.reservation = reservation
        self.refusal = refusal


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
        self.controller = AdmissionController(
            lease_us=int(settings.lease_s * 1e6), memory_throttle_us=int(settings.memory_throttle_s * 1e6)
        )
        self.accounts = CallerAccounts(self.controller.accounts, directory, clock, cluster=settings.limits)
        self._applicants = Applicants(
            self.accounts, directory, default_max_tokens=settings.default_max_tokens
        )
        self.sessions = Sessions(clock, ttl_s=settings.session_ttl_s)
        self.cache_orders = CacheOrders(directory, self.sessions, session_ttl_s=settings.session_ttl_s)
        self.is_stopping = False
        self._cut_us = 0
        self.models: dict[str, ServedModel] = {}
        self._open: dict[str, Operation] = {}
        self.queues = QueueViews(self.controller, directory, self.models, clock)
        self._watch = Watch(self, settings)
        self._dispatcher = Dispatcher(
            self.controller, self.models, self._open, watch=self._watch, clock=clock, metrics=metrics
        )
        self._refusals = RefusalLog(journal, clock, metrics, per_s=settings.ledger.refusals_per_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._late: set[asyncio.Task[Any]] = set()
        """Wait for the records of expired operations: for as long as their workers live, if need be."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one it belongs to."""
        # Asked for once: in Python 3.11 `get_running_loop` is a system call.
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    # --- models and replicas: called by the supervisor ------------------------------------------------

    def add_model(self, settings: ModelSettings) -> None:
        assert settings.id not in self.models
        self.accounts.set_model_limits(settings.id, settings.limits)
        model = ServedModel(settings, self.settings.queue, created_s=self.clock.wall_us() // 1_000_000)
        self.controller.add_model(settings.id, model.queue, is_bound=model.is_bound)
        self.models[settings.id] = model

    def expect_replica(self, model_id: str, replica_id: str) -> None:
        """A replica is starting; requests may wait for it."""
        self.models[model_id].queue.expect(replica_id)

    def add_replica(
        self, model_id: str, replica: Replica, *, capacity: int, sessions: Sequence[KeptSession] = ()
    ) -> None:
        """A replica is ready, with something of these conversations."""
        model = self.models[model_id]
        model.add(replica, capacity)
        model.remember(replica_id=replica.replica_id, sessions=sessions, clock=self.clock)
        model.queue.add(replica.replica_id, capacity=capacity_by(model.controls, capacity))
        if model.controls != AS_CONFIGURED:
            replica.adjust(model.controls)
        self._dispatcher.dispatch(model)

    def remove_replica(self, model_id: str, replica_id: str, *, successor_id: str | None) -> None:
        """A replica is gone. With a successor expected, waiting requests wait on; without, they may end."""
        model = self.models[model_id]
        model.remove(replica_id)
        hopeless = self.controller.remove_replica(model_id, replica_id, successor_id=successor_id)
        for entry in hopeless:
            self._open[entry.request_id].refuse(refusals.no_worker(model_id, retry_after_s=5))

    def control(self, model: ServedModel, controls: Controls) -> None:
        """Serve a model by these from now on, also on replicas that are yet to come."""
        model.controls = controls
        for replica_id, replica in model.replicas.items():
            replica.adjust(controls)
            model.queue.set_capacity(replica_id, capacity_by(controls, model.capacities[replica_id]))
        self._dispatcher.dispatch(model)

    def reschedule(self, model: ServedModel, scheduling: SchedulingSettings) -> None:
        """Decide who is next like this from now on."""
        model.scheduling = scheduling
        model.queue.set_policy(QueuePolicy.of(scheduling))
        self._dispatcher.dispatch(model)

    def running_on(self, model_id: str, replica_id: str) -> int:
        return self.models[model_id].queue.running_on(replica_id)

    # --- operations: called by the gateway --------------------------------------------------------

    def accept(
        self,
        reservation: Reservation,
        messages: list[Message],
        *,
        max_tokens: int | None,
        priority: int = 0,
        is_exact: bool,
        is_final: bool = False,
        may_degrade: bool = False,
        cache: CacheOrder = KEPT_IN_FULL,
    ) -> Operation:
        """Check every limit, hold the tokens, take a place in the queue and journal the reservation, or
        refuse: one decision, all or nothing.

        `reservation.prompt_tokens_estimated` is an upper bound of the prompt unless `is_exact`. Where only
        the bound stands in the way, `NeedsCount` asks for the exact count; where only the bounds of others do,
        `NeedsTrim` asks for `count_held`, unless `is_final`. `cache` says what workers may have of it.
        The operation is an async context manager: entering it waits for the journal, leaving it for any reason
        settles it.
        `may_degrade`: rather a shorter answer than a refusal, and `TurnedAway` in place of a refusal that is recorded.
        Raises `Refusal` (404, 429, 503); those for want of room are recorded.
        """
        model = self.models.get(reservation.model)
        if model is None:
            raise refusals.model_not_found(reservation.model)
        if self.is_stopping:
            raise refusals.shutting_down()
        if not self.journal.is_healthy:
            raise refusals.store_unavailable()
        now_us = self.clock.monotonic_us()
        applicant = self._applicants.of(
            model,
            reservation,
            max_tokens=max_tokens,
            priority=priority,
            is_exact=is_exact,
            is_final=is_final,
            may_be_shortened=may_degrade,
            now_us=now_us,
        )
        try:
            admitted = self._admit(model, applicant, now_us)
        except Refusal as refusal:
            if may_degrade:
                raise TurnedAway(reservation, refusal) from None
            self.turn_away(reservation, refusal)
            raise
        entry, size = admitted.entry, admitted.size
        reservation = msgspec.structs.replace(reservation, reserved_tokens=size.total)
        operation = Operation(self, model, reservation, messages, entry, size, now_us)
        try:
            operation.journalled = self.journal.reserve(reservation)
        except StoreUnavailable:
            self.controller.take_back(entry, now_us)
            raise refusals.store_unavailable() from None
        finally:
            for evicted in admitted.evicted:
                displaced = self._open[evicted.request_id]
                displaced.refuse(refusals.queue_displaced(queue=self.queues.facts_of(displaced)))
        self._open[entry.request_id] = operation
        if model.affinity is not None and applicant.demand is not None:
            model.recognise(entry, messages, cache, prompt_tokens=applicant.demand.prompt_tokens)
        self._watch.accepted(operation)
        self._dispatcher.dispatch(model)
        if operation.replica is None:
            operation.wait = self.queues.at_entry(entry)
        return operation

    def turn_away(self, reservation: Reservation, refusal: Refusal) -> None:
        """Record a refusal without waiting for the journal."""
        if refusal.details.get("limit_type") == "memory":
            self.metrics.refused_memory(reservation.model, refusal.details["level"])
        self._refusals.record(reservation, refusal)

    async def count_prompt(self, model_id: str, messages: list[Message]) -> int | None:
        """The exact tokens of a prompt, by a ready replica; None if none can say."""
        for replica in list(self.models[model_id].replicas.values()):  # they come and go while this waits
            tokens = await replica.count_prompt(messages)
            if tokens is not None:
                return tokens
        return None

    async def count_held(self, entries: list[Entry]) -> None:
        """Count the prompts of operations that hold a bound, each once, and let them hold no more than that."""
        operations = [self._open[entry.request_id] for entry in entries if entry.request_id in self._open]
        for operation in operations:
            if operation.counting is None:
                operation.counting = self.spawn(self._count_and_trim(operation))
        if operations:
            await asyncio.wait([operation.counting for operation in operations if operation.counting])

    async def _count_and_trim(self, operation: Operation) -> None:
        tokens = await self.count_prompt(operation.model.model_id, operation.messages)
        total = operation.size.total
        if tokens is not None:
            total = min(total, tokens + operation.size.maximum)
        self._trim(operation, total, prompt_tokens=tokens)

    def put_back(self, operation: Operation, busy: ReplicaBusy) -> None:
        """A granted request could not start: it waits again, as the next one, and the replica has a pause."""
        self._dispatcher.put_back(operation, busy)
        if operation.wait is None and operation.replica is None:
            operation.wait = self.queues.at_entry(operation.entry)

    def begun(self, operation: Operation, answer: Answer) -> None:
        """The replica has taken the request. If it says how long that is, no more is held than it needs."""
        if operation.model.busy and operation.replica is not None:
            operation.model.busy.pop(operation.replica.replica_id, None)
        if answer.exact_total is not None:
            self._trim(operation, answer.exact_total, prompt_tokens=answer.prompt_tokens)

    def settle(self, operation: Operation, ending: Ending, counts: Counts) -> "asyncio.Future[None]":
        """Write the final record and free the place. The future is done once the record is durable."""
        record = self._close(operation, ending, counts)
        durable = self.journal.settle(record)
        self._ended(operation, record)
        was_granted = operation.entry.phase is Phase.GRANTED
        used = record.charged_prompt_tokens + record.charged_completion_tokens
        self.controller.settle(
            operation.entry, used=used, now_us=self.clock.monotonic_us(), took=took(record)
        )
        learn(operation.model, operation.reservation, record)
        count_service(operation, record)
        self._acknowledge(operation)
        if was_granted:
            self._dispatcher.dispatch_all()
        return durable

    def expire(self, operation: Operation) -> None:
        """Nobody has seen the attempt alive during its lease: end it, and post its record should it come."""
        _log.error("lease_expired", request_id=operation.request_id, worker=operation.replica_worker)
        assert operation.answer is not None
        operation.answer.abort()
        operation.interrupt(refusals.lease_expired())
        if operation.closing is not None:
            operation.closing.cancel()
        record = self._close(operation, EXPIRED, NOTHING)
        self.journal.settle(record)
        self._ended(operation, record)
        self.controller.expire(operation.entry, self.clock.monotonic_us())
        late = asyncio.get_running_loop().create_task(self._settle_late(operation))
        self._late.add(late)
        late.add_done_callback(self._late.discard)
        self._dispatcher.dispatch_all()

    def end_session(self, session_id: str, tenant: str) -> bool:
        """Forget a session and what the workers keep of it. False if there is none of this tenant."""
        if not self.sessions.end(session_id, tenant):
            return False
        session = session_key(tenant, session_id)
        for model in self.models.values():
            model.end_session(tenant, session)
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task that the core owns, so that it outlives the client's."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def journalled(self, operation: Operation) -> None:
        """The operation waits for the journal no longer."""
        self._watch.journalled(operation)

    def is_closing(self, operation: Operation) -> None:
        """The operation's task is done with it; what remains is the record."""
        self._watch.closing(operation)

    def note_progress(self, *, is_full_round: bool) -> None:
        """Called by the watch: now and then about all that runs, always where the queue waits for a first token or
        somebody may have to give up a place.
        """
        if is_full_round:
            self.queues.look()
        if is_full_round or any(model.is_pressing for model in self.models.values()):
            self._dispatcher.note_progress()

    def usage(self, request_id: str, tenant_id: str) -> OperationRecord | Reservation | None:
        """A tenant's operation: its final record, or its reservation while it is open."""
        return self.journal.get(request_id, tenant_id) or self.journal.get_open(request_id, tenant_id)

    def wait_of(self, request_id: str) -> dict[str, Any] | None:
        """Where an open operation stands in the queue; None if it does not wait."""
        operation = self._open.get(request_id)
        return None if operation is None else self.queues.waiting(operation)

    def service_class(self, tenant_id: str, latency_sla: LatencySla) -> ServiceClass:
        """The class a caller's request waits in. A `batch` tenant's are all of that class."""
        return "batch" if latency_sla == "throughput" else self.directory.sharing_of(tenant_id).service_class

    @property
    def open_operations(self) -> Iterable[Operation]:
        return self._open.values()

    # --- start and stop -------------------------------------------------------------------------------

    async def recover(self, records: Iterable[AttemptRecord]) -> int:
        """Close what an earlier life left open, from what its workers noted. Returns how many there were."""
        number = await close_left_open(
            self.journal, records, self.clock, abort_policy=self.settings.ledger.abort_policy
        )
        self.accounts.restore(self.journal.settled_since(self.clock.wall_us() - WINDOW_US))
        return number

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
        for operation in list(self._open.values()):
            operation.refuse(refusals.shutting_down())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def stop(self) -> None:
        """Wait once more, after the workers are gone, and close whatever is left."""
        await self.settle_open(seconds=10)
        if self._late:
            await asyncio.wait(self._late, timeout=1)
        for operation in list(self._open.values()):
            _log.error("operation_left_open", request_id=operation.request_id)
            self.settle(operation, SHUTDOWN, NOTHING)
        self._watch.stop()
        self._refusals.stop()

    # --- inside -----------------------------------------------------------------------------------------

    def _trim(self, operation: Operation, total: int, *, prompt_tokens: int | None) -> None:
        """Hold no more than so many tokens. Where that frees memory, others may begin."""
        if self.controller.trim(operation.entry, total, prompt_tokens=prompt_tokens):
            self._dispatcher.dispatch_all()

    def _admit(self, model: ServedModel, applicant: Applicant, now_us: int) -> Admitted:
        try:
            return self.controller.accept(applicant, now_us)
        except LimitReached as reached:
            raise self.accounts.refusal(reached.excess) from None
        except QueueFull as full:
            assert applicant.demand is not None
            raise self.queues.refusal(model, applicant.tenant_id, applicant.demand, full) from None
        except NoReplica:
            raise refusals.no_worker(model.model_id, retry_after_s=5) from None

    def _close(self, operation: Operation, ending: Ending, counts: Counts) -> OperationRecord:
        return close(
            operation.reservation,
            ending,
            counts,
            worker_id=operation.replica_worker,
            end_ts=self.clock.wall_us(),
            abort_policy=self.settings.ledger.abort_policy,
            delivered_tokens=None if ending.outcome == "completed" else operation.delivered_tokens,
        )

    def _ended(self, operation: Operation, record: OperationRecord) -> None:
        operation.record = record
        del self._open[operation.request_id]
        self._watch.ended(operation)
        self._dispatcher.ended(operation)
        self.metrics.settled(record)

    def _acknowledge(self, operation: Operation) -> None:
        """Let the worker forget its record once ours is durable, whoever waits for that."""
        answer = operation.answer
        if answer is not None and answer.is_recorded:
            self.journal.flush().add_done_callback(
                lambda done: answer.acknowledge() if done.exception() is None else None
            )

    async def _settle_late(self, operation: Operation) -> None:
        """Wait for the record of an expired operation: it comes from its worker, or with that one's end."""
        entry = operation.entry
        assert operation.answer is not None
        counts = await operation.answer.counts()
        if counts.source == "none":
            self.controller.forget(entry)
            return
        record = self._close(operation, LATE, counts)
        self.controller.settle_late(
            entry,
            used=record.charged_prompt_tokens + record.charged_completion_tokens,
            now_us=self.clock.monotonic_us(),
            took=took(record),
        )
        count_service(operation, record)
        _log.warning("late_settlement", request_id=operation.request_id)
        await self.journal.late_settle(record)
        operation.answer.acknowledge()
