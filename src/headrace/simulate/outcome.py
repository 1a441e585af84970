"""What a run is given, and what comes of it."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from headrace.scheduling.policy import QueuePolicy
from headrace.simulate.engine import EngineModel
from headrace.simulate.workload import Arrival

Prediction = Literal["exact", "half", "none"]
"""What is known of an answer's length when it is granted: all, all give or take a half, nothing (then it is
charged as it grows)."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and how it is shared."""

    name: str
    policy: QueuePolicy = QueuePolicy()
    prediction: Prediction = "exact"
    engine: EngineModel = EngineModel()
    workers: int = 1
    queue_length: int = 10_000_000
    has_preemption: bool = False
    """Running requests are stopped for those whose tenant has less than its share (`fair` only)."""
    seed: int = 0


class Served(msgspec.Struct, gc=False):
    """What became of one arrival. Times in microseconds; 0 where it did not come to that."""

    granted_us: int = 0
    """For the first time."""
    waited_us: int = 0
    """In the queue, also after it was stopped."""
    first_us: int = 0
    last_us: int = 0
    cached_tokens: int = 0
    expected_output_tokens: int = 0
    """What the queue was told."""
    replica: str | None = None
    is_refused: bool = False
    num_preemptions: int = 0
    """How often it was stopped for another."""
    lost_tokens: int = 0
    """That had been computed when it was stopped, and were computed again."""


class Outcome(msgspec.Struct):
    """A run."""

    setup: Setup
    arrivals: Sequence[Arrival]
    served: list[Served]
    end_us: int
    """When the last one was served."""
    busy_share: float | None = None
    """Part of the time, until the end, that the engines computed. None where nobody knows."""
    slot_share: float | None = None
    """Part of all slots, over that time, that were taken."""


def decisions(outcome: Outcome) -> Iterator[tuple[Arrival, Served]]:
    """Every request with what was decided of it, in order of arrival."""
    yield from zip(outcome.arrivals, outcome.served, strict=True)
