"""KV memory is short: who may begin, who has to stop, how many run at once.

1. A newcomer gets a slot only if what it has to read in fits into the cells that are left when all kept prefixes are let
   go, and beside it `GROWTH_TOKENS` for each sequence that runs then.
2. When the running sequences need more than is free, kept prefixes are let go first (least recently used first; that is
   the cache's rule, not this one's). Then one sequence after another is preempted: the newest of the tenant that holds
   most. The oldest of all never is, and what is let in always fits alone, so at least one always gets to its end.
3. After each preemption no more run than are left; one more for each `QUIET_STEPS` steps without a preemption.
"""

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

GROWTH_TOKENS: Final = 16
"""A newcomer leaves so much room for the next tokens of each, or it would push somebody out at once."""
QUIET_STEPS: Final = 64


class Resident(Protocol):
    """A sequence that holds cells or wants to. Lengths in tokens."""

    @property
    def tenant_id(self) -> str: ...

    @property
    def number(self) -> int:
        """Its rank in order of arrival."""
        ...

    @property
    def held(self) -> int:
        """Cells it holds."""
        ...

    @property
    def outstanding(self) -> int:
        """Cells it needs until its next new token can be drawn: the rest of its prompt, and what was drawn already."""
        ...

    @property
    def growth_max(self) -> int:
        """Cells it may need after that."""
        ...


def outstanding(running: Sequence[Resident]) -> int:
    """Cells that running sequences are sure to need."""
    return sum(one.outstanding for one in running)


def has_room(newcomer: Resident, beside: Sequence[Resident], *, free: int, shared: int = 0) -> bool:
    """Whether a newcomer may begin beside others. `free`: cells that nobody holds who runs. `shared`: so many of those it
    needs are held by one that runs and can be shared with it.
    """
    needed = newcomer.outstanding - shared + min(GROWTH_TOKENS, newcomer.growth_max)
    for one in beside:
        needed += one.outstanding + min(GROWTH_TOKENS, one.growth_max)
    return needed <= free


_R = TypeVar("_R", bound=Resident)


def choose_victim(running: Sequence[_R]) -> _R | None:
    """Who is preempted: of the tenant that holds most cells the newest, but never the oldest of all. Of tenants that hold
    the same, the one whose newest is newer. None if only one runs.
    """
    oldest = min((one.number for one in running), default=0)
    held: dict[str, int] = {}
    for one in running:
        held[one.tenant_id] = held.get(one.tenant_id, 0) + one.held
    return max(
        (one for one in running if one.number != oldest),
        key=lambda one: (held[one.tenant_id], one.number),
        default=None,
    )


class RunningMax:
    """How many may run at once: less after each preemption, slowly more again (additive both ways)."""

    def __init__(self, configured: int) -> None:
        self._configured = configured
        self._lowered: int | None = None
        """None while it is as configured."""
        self._num_quiet = 0

    @property
    def value(self) -> int:
        return self._configured if self._lowered is None else min(self._lowered, self._configured)

    def configure(self, most: int) -> None:
        self._configured = most

    def preempted(self, num_left: int) -> None:
        """One was preempted, and so many run on."""
        self._lowered = max(1, min(num_left, self.value - 1))
        self._num_quiet = 0

    def stepped(self) -> None:
        """A step is over. Those in which somebody was preempted are told by `preempted` before."""
        if self._lowered is None:
            return
        self._num_quiet += 1
        if self._num_quiet == QUIET_STEPS:
            self._num_quiet = 0
            self._lowered += 1
            if self._lowered >= self._configured:
                self._lowered = None
