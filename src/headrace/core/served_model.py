"""A model as it is served: its queue, its replicas, and how they are told to work."""

from collections.abc import Sequence

from headrace.admission.entry import Entry
from headrace.caching.slots import CacheOrder
from headrace.clock import Clock
from headrace.config.scheduling import SchedulingSettings, ServiceClass
from headrace.config.settings import MemorySettings, ModelSettings, QueueSettings
from headrace.core.replica import Replica
from headrace.limits.memory import MemoryRate
from headrace.request.controls import AS_CONFIGURED, Controls
from headrace.request.messages import Message
from headrace.scheduling.affinity import Affinity, Reason
from headrace.scheduling.expectation import Expectations
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.locality import Warmth
from headrace.scheduling.policy import QueuePolicy
from headrace.scheduling.prompt_keys import prompt_keys, session_key_of
from headrace.scheduling.queue_bounds import QueueBounds
from headrace.scheduling.service_window import ServiceWindow
from headrace.worker.messages import KeptSession


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
        self.affinity = Affinity() if settings.workers > 1 and settings.engine.prefix_cache else None
        """What went where: only where there is a choice, and something is kept to choose by."""
        self.queue: FairQueue[Entry] = FairQueue(
            queue_bounds(queue),
            QueuePolicy.of(settings.scheduling),
            may_run=self.may_run,
            warm_on=self._warm_on if self.affinity is not None else None,
        )
        self.expectations = Expectations()
        self.memory_rate = MemoryRate.of_settings(settings.memory or MemorySettings())
        """What a request needs. As the settings say, or as a replica does; it is remembered when that is gone."""
        self._is_memory_known = settings.memory is not None
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
        if self.affinity is not None:
            self.affinity.add(replica.replica_id)
        self._ask_replicas()

    def remove(self, replica_id: str) -> None:
        self.replicas.pop(replica_id, None)
        self.capacities.pop(replica_id, None)
        self.busy.pop(replica_id, None)
        self._owners.pop(replica_id, None)
        if self.affinity is not None:
            self.affinity.remove(replica_id)
        self._ask_replicas()

    def remember(self, *, replica_id: str, sessions: Sequence[KeptSession], clock: Clock) -> None:
        """A new replica has something of these conversations, put aside by an earlier life."""
        if self.affinity is None or not sessions:
            return
        now_us = clock.monotonic_us()
        self.affinity.advance(now_us)
        offset_us = clock.wall_us() - now_us
        for kept in sessions:
            until_us = kept.expires_ts - offset_us
            self.affinity.bring(kept.tenant, session_key_of(kept.session), replica_id, until_us=until_us)

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

    def recognise(
        self, entry: Entry, messages: Sequence[Message], cache: CacheOrder, *, prompt_tokens: int
    ) -> None:
        """Let an accepted request be placed by what workers have of it. `prompt_tokens`: as expected."""
        if self.affinity is None or cache.mode == "off":
            return
        entry.prompt_keys = prompt_keys(
            messages,
            tenant=entry.tenant_id,
            group=cache.group,
            session=cache.session,
            is_kept_in_full=cache.mode == "full",
            prompt_tokens=prompt_tokens,
            ttl_us=int(cache.ttl_s * 1e6),
        )

    def place(self, entry: Entry) -> tuple[Reason, int]:
        """A request was granted a place: why there, and how many tokens of its prompt are expected to be there."""
        assert entry.replica_id is not None
        if self.affinity is not None:
            return self.affinity.place(entry.prompt_keys, entry.replica_id)
        return ("only" if len(self.replicas) == 1 else "least_loaded"), 0

    def end_session(self, tenant: str, session: str) -> None:
        """Forget a conversation, here and on the replicas."""
        if self.affinity is not None:
            self.affinity.end_session(tenant, session_key_of(session))
        for replica in self.replicas.values():
            replica.end_session(session)

    def _warm_on(self, entry: Entry) -> Warmth | None:
        keys = entry.prompt_keys
        return None if keys is None or self.affinity is None else self.affinity.warmth(keys)

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
        for replica in self.replicas.values():
            if not self._is_memory_known and replica.kv_bytes_per_token is not None:
                self.memory_rate = MemoryRate(0, replica.kv_bytes_per_token)
                self._is_memory_known = True  # the geometry is the model's, whatever worker says it


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
