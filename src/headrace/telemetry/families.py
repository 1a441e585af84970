"""Counters and histograms of plain numbers, turned into Prometheus's form when somebody scrapes.

The library's own take a lock for each number and walk all buckets, on every request; a scrape comes every
few seconds. One thread counts (the event loop), any other may scrape: copying a dictionary or a list is one
step for the interpreter, so a scrape sees each number whole, at worst one observation apart from the next.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.clock import Clock, SystemClock

Labels = tuple[str, ...]


class _Family(Collector):
    """What both kinds are: a name, a meaning, labels."""

    kind: str

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.labels = tuple(labels)
        self._documentation = documentation
        self._clock = clock or SystemClock()
        self._created_s: dict[Labels, float] = {}
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The family without numbers: the registry asks for its names."""
        return [Metric(self.name, self._documentation, self.kind)]

    def _note_created(self, values: Labels) -> None:
        assert len(values) == len(self.labels)
        self._created_s[values] = self._clock.wall_us() / 1e6

    def _named(self, values: Labels) -> dict[str, str]:
        return dict(zip(self.labels, values, strict=True))


class CounterFamily(_Family):
    """Numbers that only grow, one for each combination of label values."""

    kind = "counter"

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._values: dict[Labels, int] = {}
        super().__init__(name, documentation, labels, registry)

    def add(self, values: Labels, count: int = 1) -> None:
        """Count for these label values, which have to come from a bounded set."""
        known = self._values.get(values)
        if known is None:
            self._note_created(values)
            known = 0
        self._values[values] = known + count

    def collect(self) -> Iterable[Metric]:
        metric = Metric(self.name, self._documentation, self.kind)
        for values, count in list(self._values.items()):
            labels = self._named(values)
            metric.add_sample(f"{self.name}_total", labels, count)
            metric.add_sample(f"{self.name}_created", labels, self._created_s[values])
        return [metric]


class GaugeFamily(_Family):
    """Numbers that are read when somebody scrapes, by another thread than the one that changes them."""

    kind = "gauge"

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._read: Callable[[], Iterable[tuple[Labels, float]]] = tuple
        super().__init__(name, documentation, labels, registry)

    def read_with(self, read: Callable[[], Iterable[tuple[Labels, float]]]) -> None:
        """Say where the numbers come from: each with its label values, which have to come from a bounded set."""
        self._read = read

    def collect(self) -> Iterable[Metric]:
        metric = Metric(self.name, self._documentation, self.kind)
        for values, number in self._read():
            metric.add_sample(self.name, self._named(values), number)
        return [metric]


class HistogramFamily(_Family):
    """How observed values are spread over buckets, for each combination of label values.

    `bounds` are the buckets' upper bounds, ascending and inclusive; the last bucket, without one, is added.
    """

    kind = "histogram"

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        *,
        bounds: Sequence[float],
    ) -> None:
        self._bounds = tuple(bounds)
        self._texts: tuple[str, ...] = tuple(map(floatToGoString, (*bounds, float("inf"))))
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        super().__init__(name, documentation, labels, registry)
        if not labels:
            self._create(())  # a histogram without labels is there before its first value

    def observe(self, values: Labels, value: float) -> None:
        """Take in a value for these label values, which have to come from a bounded set."""
        counts = self._counts.get(values)
        if counts is None:
            counts = self._create(values)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[values] += value

    def _create(self, values: Labels) -> list[int]:
        self._note_created(values)
        self._sums[values] = 0.0
        counts = self._counts[values] = [0] * (len(self._bounds) + 1)
        return counts

    def collect(self) -> Iterable[Metric]:
        metric = Metric(self.name, self._documentation, self.kind)
        for values, now in list(self._counts.items()):
            labels = self._named(values)
            total = 0
            for text, count in zip(self._texts, list(now), strict=True):
                total += count
                metric.add_sample(f"{self.name}_bucket", labels | {"le": text}, total)
            metric.add_sample(f"{self.name}_count", labels, total)
            metric.add_sample(f"{self.name}_sum", labels, self._sums[values])
            metric.add_sample(f"{self.name}_created", labels, self._created_s[values])
        return [metric]
