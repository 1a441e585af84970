"""All lanes of a queue under one policy, those that were put back before them, and who is next."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from headrace.scheduling import search
from headrace.scheduling.class_shares import ClassShares
from headrace.scheduling.counters import TenantCounter
from headrace.scheduling.jobs import Job, Place, Size, rank_of, size_of
from headrace.scheduling.lanes import Lane
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
        self._num_in: dict[ServiceClass, int] = dict.fromkeys(_CLASSES, 0)
        """Jobs in the lanes of a class."""
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
        self._ages.clear()
        self._set(policy)
        for job in jobs:
            self.add(job)

    def add(self, job: Job[Ticket]) -> None:
        job.place = Place.LANE
        job.rank = rank_of(job, self.policy)
        service_class = job.service_class
        if service_class == "batch":
            self._ages.set(job, job.entered_us)
        self._num_in[service_class] += 1
        self._lanes[service_class, size_of(job.demand, self.policy)].add(job)

    def add_first(self, job: Job[Ticket]) -> None:
        """Before everybody else."""
        job.place = Place.FRONT
        self._front[job.ticket] = job
        self._front.move_to_end(job.ticket, last=False)

    def remove(self, job: Job[Ticket]) -> None:
        if job.place is Place.FRONT:
            del self._front[job.ticket]
            return
        assert job.flow is not None
        lane = job.flow.row.lane
        lane.remove(job)
        self._num_in[lane.service_class] -= 1
        if lane.service_class == "batch":
            self._ages.discard(job)

    def moved(self, counter: TenantCounter) -> None:
        """The counter of a tenant that waits has changed."""
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
        return list(self._front.values())

    def first_in_front(self, may_start: Callable[[Ticket], bool] | None) -> Job[Ticket] | None:
        """The next one of those that were put back who may start."""
        for job in self._front.values():
            if may_start is None or may_start(job.ticket):
                return job
        return None

    def num_waiting(self, service_class: ServiceClass) -> int:
        """Jobs of a class, after aging."""
        number = sum(lane.num_jobs for lane in self._lanes.values() if lane.service_class == service_class)
        return number + sum(job.service_class == service_class for job in self.front())

    def lanes(self) -> list[Lane[Ticket]]:
        """Those in which somebody waits, in their order. To read."""
        self._put_right()
        return [lane for lane in self._lanes.values() if lane.num_jobs]

    def first(
        self,
        *,
        is_open: Callable[[Lane[Ticket]], bool] | None,
        may_start: Callable[[Ticket], bool] | None,
        is_warm: Callable[[Job[Ticket]], bool] | None,
    ) -> Job[Ticket] | None:
        """The next one of those in open lanes who may start. `is_open` is None where all are."""
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

    def first_of_each(
        self, may_start: Callable[[Ticket], bool] | None, *, tenants_max: int
    ) -> list[Job[Ticket]]:
        """Interactive requests that a place would help, next one first: of the first tenants the first that may start.

        If one of those that were put back is such a request, it alone: nobody gets a place before it. Long prompts
        wait for their budget rather than for a place.
        """
        for job in self.front():
            is_one = job.service_class == "interactive" and size_of(job.demand, self.policy) != "long"
            if is_one and (may_start is None or may_start(job.ticket)):
                return [job]
        self._put_right()
        lanes = [self._lanes["interactive", size] for size in _SIZES if size != "long"]
        return search.first_of_each(lanes, may_start=may_start, tenants_max=tenants_max)

    def granted(self, job: Job[Ticket], cost: float) -> None:
        """A job, already taken out, was granted: for the shares of the classes."""
        if self.is_fair:
            other: ServiceClass = "interactive" if job.service_class == "batch" else "batch"
            self._shares.granted(job.service_class, cost, does_other_wait=self._num_in[other] > 0)

    def granted_alone(self) -> None:
        """A job was granted that had never been in here, while nobody waited."""
        if self.is_fair:
            self._shares.nobody_waits()

    def is_aged(self, job: Job[Ticket], now_us: int) -> bool:
        """Whether `age` would move it."""
        return (
            self.is_fair and job.service_class == "batch" and job.entered_us <= now_us - self.policy.aging_us
        )

    def _put_right(self) -> None:
        if self._moved:
            lanes = [lane for lane in self._lanes.values() if lane.num_jobs]
            for counter in self._moved:
                if counter.num_waiting:
                    for lane in lanes:
                        lane.moved(counter)
            self._moved.clear()

    def _groups(self, is_open: Callable[[Lane[Ticket]], bool] | None) -> list[list[Lane[Ticket]]]:
        """Lanes that are looked at together, first group first."""
        lanes = [
            lane for lane in self._lanes.values() if lane.num_jobs and (is_open is None or is_open(lane))
        ]
        if not self.is_fair or not self._num_in["batch"]:
            return [lanes]
        interactive = [lane for lane in lanes if lane.service_class == "interactive"]
        batch = [lane for lane in lanes if lane.service_class == "batch"]
        return [batch, interactive] if self._shares.is_batch_turn else [interactive, batch]
