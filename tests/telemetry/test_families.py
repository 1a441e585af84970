"""Our families say the same as the library's would."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from headrace.telemetry.families import CounterFamily, HistogramFamily

BOUNDS = (0.005, 0.25, 1, 60)
VALUES = (0.0, 0.005, 0.0051, 0.25, 1.0, 59.9, 60.0, 61.0, 1e9)


def lines(registry: CollectorRegistry) -> list[str]:
    """The text of a scrape, without the times at which things were made."""
    text = generate_latest(registry).decode()
    assert "_created" in text
    return [line.rpartition(" ")[0] if "_created{" in line else line for line in text.splitlines()]


def test_a_counter_is_exposed_as_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = CounterFamily("replies", "Replies.", ["route", "status"], ours)
    other = Counter("replies", "Replies.", ["route", "status"], registry=theirs)
    for route, status, count in (("/a", "200", 1), ("/a", "500", 3), ('/"b\n', "200", 7), ("/a", "200", 5)):
        mine.add((route, status), count)
        other.labels(route, status).inc(count)
    assert lines(ours) == lines(theirs)
    assert ours.get_sample_value("replies_total", {"route": "/a", "status": "200"}) == 6


def test_a_histogram_is_exposed_as_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = HistogramFamily("wait_seconds", "Waits.", ["model"], ours, bounds=BOUNDS)
    other = Histogram("wait_seconds", "Waits.", ["model"], registry=theirs, buckets=BOUNDS)
    for model in ("a", "b"):
        for value in VALUES:
            mine.observe((model,), value)
            other.labels(model).observe(value)
    assert lines(ours) == lines(theirs)


def test_a_histogram_without_labels_is_there_from_the_start() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    HistogramFamily("wait_seconds", "Waits.", [], ours, bounds=BOUNDS)
    Histogram("wait_seconds", "Waits.", registry=theirs, buckets=BOUNDS)
    mine, other = (generate_latest(one).decode().splitlines() for one in (ours, theirs))
    assert mine[:-1] == other[:-1]
    assert mine[-1].startswith("wait_seconds_created ")
