"""The replicas of a model: how many places each has, and how many of its memory's tokens are spoken for."""

from collections.abc import Callable, Iterator


class Replica:
    __slots__ = ("capacity", "is_paused", "kv_tokens", "kv_used", "replica_id", "running")

    def __init__(self, replica_id: str, *, capacity: int, kv_tokens: int | None) -> None:
        self.replica_id = replica_id
        self.capacity = capacity
        self.kv_tokens = kv_tokens
        self.running = 0
        self.kv_used = 0
        self.is_paused = False

    @property
    def num_free(self) -> int:
        return 0 if self.is_paused else max(0, self.capacity - self.running)

    def has_room(self, tokens: int) -> bool:
        """A place, and memory for so many tokens. An empty replica takes what is too large for it as well:
        it is the replica that knows how to refuse it."""
        if self.is_paused or self.running >= self.capacity:
            return False
        return self.kv_tokens is None or self.running == 0 or self.kv_used + tokens <= self.kv_tokens


class Replicas:
    """Those that are ready and those that are expected."""

    def __init__(self) -> None:
        self._ready: dict[str, Replica] = {}
        self._expected: set[str] = set()
        self.capacity = 0
        self.running = 0

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def is_hopeless(self) -> bool:
        return not self._ready and not self._expected

    @property
    def num_free(self) -> int:
        """Places of replicas that are not paused. What runs beyond a capacity takes none of the others' places."""
        return sum(one.num_free for one in self._ready.values())

    def all(self) -> Iterator[Replica]:
        yield from self._ready.values()

    def get(self, replica_id: str) -> Replica | None:
        return self._ready.get(replica_id)

    def expect(self, replica_id: str) -> None:
        self._expected.add(replica_id)

    def give_up(self, replica_id: str) -> Replica | None:
        self._expected.discard(replica_id)
        replica = self._ready.pop(replica_id, None)
        if replica is not None:
            self.capacity -= replica.capacity
            self.running -= replica.running
        return replica

    def add(self, replica_id: str, *, capacity: int, kv_tokens: int | None) -> None:
        assert capacity >= 1
        self.give_up(replica_id)
        self._ready[replica_id] = Replica(replica_id, capacity=capacity, kv_tokens=kv_tokens)
        self.capacity += capacity

    def set_capacity(self, replica: Replica, capacity: int) -> None:
        """From now on. More may run there until they end."""
        assert capacity >= 1
        self.capacity += capacity - replica.capacity
        replica.capacity = capacity

    def take(self, replica: Replica, tokens: int) -> None:
        replica.running += 1
        replica.kv_used += tokens
        self.running += 1

    def release(self, replica: Replica) -> None:
        assert replica.running > 0
        replica.running -= 1
        self.running -= 1

    def pick(self, tokens: int, fits: Callable[[str], bool] | None = None) -> Replica | None:
        """The least loaded with room, in proportion to its size."""
        best: Replica | None = None
        for replica in self._ready.values():
            if (
                replica.has_room(tokens)
                and (best is None or replica.running * best.capacity < best.running * replica.capacity)
                and (fits is None or fits(replica.replica_id))
            ):
                best = replica
        return best
