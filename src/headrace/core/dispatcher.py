"""Hands out places: who waits gets one as soon as the queue says so, and gives it up when the queue says so.

The queue (`headrace.scheduling.fair`) decides; here the decisions reach the operations and their replicas.
"""

import asyncio
from typing import Final

from headrace.admission.controller import AdmissionController
from headrace.admission.entry import Entry, Phase
from headrace.clock import Clock
from headrace.core.metrics import CoreMetrics
from headrace.core.operation import Operation
from headrace.core.replica import ReplicaBusy
from headrace.core.served_model import ServedModel
from headrace.core.watch import Watch

BUSY_SECONDS_FIRST: Final = 0.1
"""A replica that is full is asked again after so long; twice as long each time it is full again."""
BUSY_SECONDS_MAX: Final = 5.0
RETRY_AFTER_SECONDS_MAX: Final = 30.0


class Dispatcher:
    """Belongs to the core. `models` and `operations` are the core's own."""

    def __init__(
        self,
        controller: AdmissionController,
        models: dict[str, ServedModel],
        operations: dict[str, Operation],
        *,
        watch: Watch,
        clock: Clock,
        metrics: CoreMetrics,
    ) -> None:
        self._controller = controller
        self._models = models
        self._operations = operations
        self._watch = watch
        self._clock = clock
        self._metrics = metrics
        self._stopping: dict[str, Operation] = {}
        """By model: the operation that is being stopped for another. One at a time."""

    def dispatch(self, model: ServedModel) -> None:
        """Grant what can be granted."""
        now_us = self._clock.monotonic_us()
        if model.affinity is not None:
            model.affinity.advance(now_us)
        for entry in self._controller.dispatch(model.model_id, now_us):
            assert entry.replica_id is not None
            operation = self._operations[entry.request_id]
            if operation.answer is None:  # else it goes on where it was
                self._metrics.placed(model.model_id, *model.place(entry))
            operation.grant(model.replicas[entry.replica_id], now_us)
            self._watch.granted(operation)
        if model.scheduling.preemption and model.queue.num_waiting:
            self._preempt(model)

    def dispatch_all(self) -> None:
        """A place is free, and a tenant may start one more, whatever the model."""
        for model in self._models.values():
            if model.queue.num_waiting:
                self.dispatch(model)

    def put_back(self, operation: Operation, busy: ReplicaBusy) -> None:
        """A granted request could not start: it waits again, as the next one, and the replica has a pause."""
        replica = operation.replica
        assert replica is not None
        model = operation.model
        operation.ungrant()
        self._controller.put_back(operation.entry)
        self._watch.put_back(operation)
        model.busy[replica.replica_id] = times = model.busy.get(replica.replica_id, 0) + 1
        pause_s = min(BUSY_SECONDS_FIRST * 2 ** min(times - 1, 16), BUSY_SECONDS_MAX)
        if busy.retry_after_s is not None:
            pause_s = min(max(busy.retry_after_s, 0.0), RETRY_AFTER_SECONDS_MAX)
        self._metrics.put_back(model.model_id)
        asyncio.get_running_loop().call_later(pause_s, self._resume, model, replica.replica_id)
        self.dispatch(model)

    def ended(self, operation: Operation) -> None:
        """An operation was settled or has expired: nobody waits for it to stop any more."""
        model_id = operation.model.model_id
        if self._stopping.get(model_id) is operation:
            del self._stopping[model_id]

    def note_progress(self) -> None:
        """Tell the queues how far what runs has come: what writes more than was expected is charged for it now, what
        writes more than was predicted takes memory for it, and a long prompt that has been read in makes room for the
        next one.
        """
        for operation in self._operations.values():
            answer, entry = operation.answer, operation.entry
            if answer is not None and entry.phase is Phase.GRANTED and answer.tokens_generated:
                operation.model.queue.progress(entry, answer.tokens_generated)
                if answer.tokens_generated > entry.output_tokens:
                    self._controller.grow(entry, answer.tokens_generated)
        self.dispatch_all()

    def _resume(self, model: ServedModel, replica_id: str) -> None:
        model.queue.pause(replica_id, is_paused=False)
        self.dispatch(model)

    def _preempt(self, model: ServedModel) -> None:
        """Have a request stopped for one that waits, if the queue's rule says so. It tells when it has stopped."""
        if model.model_id in self._stopping:
            return
        wanted = self._controller.wants_preemption(model.model_id)
        if wanted is None:
            return
        victim, favoured = wanted
        operation = self._operations[victim.request_id]
        answer = operation.answer
        if answer is None or not answer.can_preempt or operation.closing is not None:
            return
        self._stopping[model.model_id] = operation
        answer.preempt(lambda output_tokens: self._stopped(operation, favoured, output_tokens))

    def _stopped(self, operation: Operation, favoured: Entry, output_tokens: int) -> None:
        """The replica has stopped a request. It keeps what it needs to go on with it."""
        self.ended(operation)
        if operation.entry.phase is not Phase.GRANTED:
            return
        self._controller.preempt(operation.entry, output_tokens=output_tokens, in_favour_of=favoured)
        self._metrics.preempted(operation.model.model_id)
        self.dispatch(operation.model)
