"""All lanes of a queue under one policy, those that were put back before them, and who is next."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from headrace.scheduling import search
from headrace.scheduling.class_shares import ClassShares
from headrace.scheduling.counters import TenantCounter
from headrace.scheduling.lanes import Job, Lane, Place, Size, rank_of, size_of
from headrace.scheduling.lazy_heap import LazyHeap
from headrace.scheduling.policy import Demand, QueuePolicy, ServiceClass

Ticket = TypeVar("Ticket", bound=Hashable)

_CLASSES: Final[tuple[ServiceClass, ...]] = ("interactive", "batch")
_SIZES: Final[tuple[Size, ...]] = ("brief", "usual", "long")


class WaitingRoom(Generic[Ticket]):
    """Where jobs wait. It knows nothing of replicas; what is closed for now comes in as an argument."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._front: OrderedDict[Ticket, Job[Ticket]] = OrderedDict()
        self._shares = ClassShares(policy.batch_floor)
        self._moved: set[TenantCounter] = set()
        """Tenants whose rows may stand where their counter no longer is: put right before anybody looks."""
        self._set(policy)

    def _set(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.is_fair = policy.name == "fair"
        self._lanes: dict[tuple[ServiceClass, Size], Lane[Ticket]] = {
            (service_class, size): Lane(service_class, size, is_by_counter=self.is_fair)
            for service_class in _CLASSES
            for size in _SIZES
        }
        self._ages: LazyHeap[Job[Ticket]] = LazyHeap()
        """Jobs of class batch by the time they came."""
        self._shares.floor = policy.batch_floor

    def __iter__(self) -> Iterator[Job[Ticket]]:
        """All that wait, those that were put back first, the others in no order."""
        yield from self._front.values()
        for lane in self._lanes.values():
            yield from lane

    @property
    def owed(self) -> float:
        return self._shares.owed

    def change_policy(self, policy: QueuePolicy) -> None:
        jobs = [job for lane in self._lanes.values() for job in lane]
        jobs.sort(key=lambda job: job.order)
        self._set(policy)
        for job in jobs:
            self.add(job)

    def add(self, job: Job[Ticket]) -> None:
        job.place = Place.LANE
        job.rank = rank_of(job, self.policy)
        if job.service_class == "batch":
            self._ages.set(job, job.entered_us)
        self.lane_of(job).add(job)

    def add_first(self, job: Job[Ticket]) -> None:
        """Before everybody else."""
        job.place = Place.FRONT
        self._front[job.ticket] = job
        self._front.move_to_end(job.ticket, last=False)

    def remove(self, job: Job[Ticket]) -> None:
        if job.place is Place.FRONT:
            del self._front[job.ticket]
            return
        assert job.lane is not None
        job.lane.remove(job)
        self._ages.discard(job)

    def moved(self, counter: TenantCounter) -> None:
        """A tenant's counter has changed."""
        if self.is_fair:
            self._moved.add(counter)

    def lane_of(self, job: Job[Ticket]) -> Lane[Ticket]:
        """Where it waits, or would."""
        return self._lanes[job.service_class, size_of(job.demand, self.policy)]

    def lane_for(self, demand: Demand) -> Lane[Ticket]:
        """Where a newcomer would wait."""
        return self._lanes[demand.service_class, size_of(demand, self.policy)]

    def age(self, now_us: int) -> None:
        """Move those who have waited long enough from batch to interactive."""
        if not self.is_fair:
            return
        while len(self._ages) and self._ages.rank() <= now_us - self.policy.aging_us:
            job = self._ages.peek()
            assert job is not None
            self.remove(job)
            job.is_aged = True
            self.add(job)

    def front(self) -> list[Job[Ticket]]:
        return list(self._front.values()) if self._front else []

    def first(
        self,
        *,
        is_open: Callable[[Lane[Ticket]], bool],
        may_start: Callable[[Ticket], bool] | None,
        is_warm: Callable[[Job[Ticket]], bool] | None,
    ) -> Job[Ticket] | None:
        """The next one of those in open lanes who may start."""
        policy = self.policy
        self._put_right()
        for lanes in self._groups(is_open):
            job = search.first(
                lanes,
                may_start=may_start,
                is_warm=is_warm if self.is_fair else None,
                quantum=policy.quantum,
                candidates_max=policy.locality_candidates_max,
            )
            if job is not None:
                return job
        return None

    def granted(self, job: Job[Ticket], cost: float) -> None:
        """A job, already taken out, was granted: for the shares of the classes."""
        if self.is_fair:
            other: ServiceClass = "interactive" if job.service_class == "batch" else "batch"
            does_other_wait = any(self._lanes[other, size].num_jobs for size in _SIZES)
            self._shares.granted(job.service_class, cost, does_other_wait=does_other_wait)

    def _put_right(self) -> None:
        if self._moved:
            lanes = [lane for lane in self._lanes.values() if lane.num_jobs]
            for counter in self._moved:
                if counter.num_waiting:
                    for lane in lanes:
                        lane.moved(counter)
            self._moved.clear()

    def _groups(self, is_open: Callable[[Lane[Ticket]], bool]) -> list[list[Lane[Ticket]]]:
        """Lanes that are looked at together, first group first."""
        lanes = [lane for lane in self._lanes.values() if lane.num_jobs and is_open(lane)]
        if not self.is_fair:
            return [lanes]
        interactive = [lane for lane in lanes if lane.service_class == "interactive"]
        batch = [lane for lane in lanes if lane.service_class == "batch"]
        return [batch, interactive] if self._shares.is_batch_turn else [interactive, batch]
