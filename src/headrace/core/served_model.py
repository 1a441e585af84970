"""A model as it is served: its queue, its replicas, and how they are told to work."""

from headrace.admission.entry import Entry
from headrace.config.settings import SamplingDefaults
from headrace.core.replica import Replica
from headrace.request.controls import AS_CONFIGURED, Controls
from headrace.scheduling.dispatch import ModelQueue


class ServedModel:
    """A model that clients can ask for, with its queue and its replicas."""

    def __init__(
        self,
        model_id: str,
        *,
        sampling: SamplingDefaults,
        queue: ModelQueue[Entry],
        created_s: int,
        cache_ttl_s: float,
    ) -> None:
        self.model_id = model_id
        self.sampling = sampling
        self.created_s = created_s
        self.cache_ttl_s = cache_ttl_s
        self.queue = queue
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

    def add(self, replica: Replica, capacity: int) -> None:
        self.replicas[replica.replica_id] = replica
        self.capacities[replica.replica_id] = capacity
        self._ask_replicas()

    def remove(self, replica_id: str) -> None:
        self.replicas.pop(replica_id, None)
        self.capacities.pop(replica_id, None)
        self.busy.pop(replica_id, None)
        self._ask_replicas()

    def _ask_replicas(self) -> None:
        """What they say stays the same for their lives, so it is not asked for each request."""
        self.context_tokens = next((replica.context_tokens for replica in self.replicas.values()), None)
        self.can_count = any(replica.can_count for replica in self.replicas.values())


def capacity_by(controls: Controls, capacity: int) -> int:
    """How many requests a replica gets that was made for so many."""
    limits = (capacity, controls.max_concurrent_requests, controls.max_batch_size)
    return min(limit for limit in limits if limit is not None)
