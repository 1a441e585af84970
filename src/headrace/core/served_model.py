"""A model as it is served: its queue, its replicas, and how they are told to work."""

from headrace.admission.entry import Entry
from headrace.config.scheduling import SchedulingSettings, ServiceClass
from headrace.config.settings import ModelSettings, QueueSettings
from headrace.core.replica import Replica
from headrace.request.controls import AS_CONFIGURED, Controls
from headrace.scheduling.dispatch import QueueBounds
from headrace.scheduling.expectation import Expectations
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import QueuePolicy
from headrace.scheduling.service_window import ServiceWindow


class ServedModel:
    """A model that clients can ask for, with its queue and its replicas."""

    def __init__(self, settings: ModelSettings, queue: QueueSettings, *, created_s: int) -> None:
        self.model_id = settings.id
        self.sampling = settings.sampling_defaults
        self.created_s = created_s
        self.cache_ttl_s = settings.engine.cache_ttl_s
        self.can_preempt = settings.can_preempt
        self.degrade_to = settings.degrade_to
        self.configured_scheduling: SchedulingSettings = settings.scheduling
        self.scheduling: SchedulingSettings = settings.scheduling
        self.queue: FairQueue[Entry] = FairQueue(
            queue_bounds(queue), QueuePolicy.of(settings.scheduling), may_run=self.may_run
        )
        self.expectations = Expectations()
        self.service = ServiceWindow()
        """What each tenant got lately."""
        self.waiting: dict[ServiceClass, int] = {}
        """Requests waiting by class, a second ago at most."""
        self.replicas: dict[str, Replica] = {}
        self.capacities: dict[str, int] = {}
        """What each replica was made for, in requests at once."""
        self.controls = AS_CONFIGURED
        self.context_tokens: int | None = None
        """What a replica says of the model; None as long as there is none that knows."""
        self.can_count = False
        """Whether a replica can count a prompt's tokens exactly."""
        self.busy: dict[str, int] = {}
        """How many times in a row a replica said that it is full."""
        self._set_aside = _set_aside(settings)
        self._owners: dict[str, str] = {}
        """Ready replicas that are set aside for a tenant."""

    def add(self, replica: Replica, capacity: int) -> None:
        self.replicas[replica.replica_id] = replica
        self.capacities[replica.replica_id] = capacity
        owner = self._set_aside.get(replica.worker_id)
        if owner is not None:
            self._owners[replica.replica_id] = owner
        self._ask_replicas()

    def remove(self, replica_id: str) -> None:
        self.replicas.pop(replica_id, None)
        self.capacities.pop(replica_id, None)
        self.busy.pop(replica_id, None)
        self._owners.pop(replica_id, None)
        self._ask_replicas()

    def may_run(self, entry: Entry, replica_id: str) -> bool:
        """Whether a request may run on a replica."""
        if entry.home is not None:
            return entry.home == replica_id
        if not self._set_aside:
            return True
        owner = self._owners.get(replica_id)
        if owner is None:
            return not self._is_apart(entry)
        return owner == entry.tenant_id and entry.is_dedicated

    def is_bound(self, entry: Entry) -> bool:
        """Whether there are replicas where a request may not run."""
        return entry.home is not None or bool(self._set_aside)

    @property
    def is_pressing(self) -> bool:
        """Whether its queue wants to know at once how far what runs has come."""
        scheduling = self.scheduling
        return self.queue.num_waiting > 0 and (
            scheduling.preemption or scheduling.long_prompt_tokens is not None
        )

    def _is_apart(self, entry: Entry) -> bool:
        """Whether its tenant has replicas of its own, ready ones: while it has none it runs where all do."""
        return entry.is_dedicated and entry.tenant_id in self._owners.values()

    def _ask_replicas(self) -> None:
        """What they say stays the same for their lives, so it is not asked for each request."""
        self.context_tokens = next((replica.context_tokens for replica in self.replicas.values()), None)
        self.can_count = any(replica.can_count for replica in self.replicas.values())


def queue_bounds(settings: QueueSettings) -> QueueBounds:
    """A tenant alone may fill the whole queue unless the settings say otherwise."""
    length, tokens = settings.length, settings.tokens
    return QueueBounds(
        length=length,
        tokens=tokens,
        tenant_length=length if settings.tenant_length is None else settings.tenant_length,
        tenant_tokens=tokens if settings.tenant_tokens is None else settings.tenant_tokens,
    )


def capacity_by(controls: Controls, capacity: int) -> int:
    """How many requests a replica gets that was made for so many."""
    limits = (capacity, controls.max_concurrent_requests, controls.max_batch_size)
    return min(limit for limit in limits if limit is not None)


def _set_aside(settings: ModelSettings) -> dict[str, str]:
    """Which workers are for which tenant: the last ones, in the order of the setting."""
    owners = [tenant for tenant, number in settings.dedicated_workers.items() for _ in range(number)]
    return dict(zip(reversed(settings.worker_ids), owners, strict=False))
