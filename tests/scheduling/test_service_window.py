"""What tenants got lately, and how even that was."""

import pytest

from headrace.scheduling.service_window import BACKLOG_US_MIN, FLOWS_MAX, WINDOW_US, ServiceWindow

SECOND = 1_000_000
BOTH = {"a": 1.0, "b": 1.0}


def test_service_counts_as_it_is_computed_and_once() -> None:
    window = ServiceWindow()
    window.look(1 * SECOND, running={}, waiting={})
    window.look(2 * SECOND, running={"a": 30.0}, waiting={})
    assert window.received(2 * SECOND) == {"a": 30.0}
    window.settled("a", 50.0)
    window.look(3 * SECOND, running={}, waiting={})
    assert window.received_by("a", 3 * SECOND) == 50.0
    window.look(3 * SECOND + 1, running={"a": 99.0}, waiting={})
    assert window.received_by("a", 3 * SECOND) == 50.0, "too soon after the last look"
    assert window.received_by("a", 3 * SECOND + WINDOW_US - 1) == 20.0, "the first slice is too old"
    assert window.received(3 * SECOND + WINDOW_US) == {}


def test_what_was_stopped_is_not_counted_again_when_it_goes_on() -> None:
    window = ServiceWindow()
    for second, running in enumerate(({}, {"a": 40.0}, {}, {"a": 40.0}, {"a": 50.0}), 1):
        window.look(second * SECOND, running=running, waiting={})
    assert window.received(5 * SECOND) == {"a": 50.0}


def served(window: ServiceWindow, seconds: int, waiting: dict[str, float], **costs: float) -> None:
    """So many seconds in which each gets so much in each."""
    start = window._looked_us
    for second in range(1, seconds + 1):
        for flow, cost in costs.items():
            window.settled(flow, cost)
        window.look(start + second * SECOND, running={}, waiting=waiting)


def test_even_by_weight_is_one_and_everything_for_one_of_two_is_a_half() -> None:
    even = ServiceWindow()
    served(even, 10, {"a": 1.0, "b": 3.0}, a=10.0, b=30.0)
    assert even.jain(10 * SECOND) == pytest.approx(1.0)
    uneven = ServiceWindow()
    served(uneven, 10, BOTH, a=10.0)
    assert uneven.jain(10 * SECOND) == pytest.approx(0.5)
    assert uneven.jain(10 * SECOND + WINDOW_US) == 1.0, "forgotten"


def test_who_asks_for_little_says_nothing_about_fairness() -> None:
    window = ServiceWindow()
    served(window, 10, {"a": 1.0}, a=100.0, b=1.0)
    assert window.jain(10 * SECOND) == 1.0


def test_a_newcomer_is_compared_by_the_time_since_it_came_and_not_too_soon() -> None:
    window = ServiceWindow()
    served(window, 20, {"a": 1.0}, a=10.0)
    served(window, BACKLOG_US_MIN // SECOND, BOTH, a=10.0)
    assert window.jain(window._looked_us) == 1.0, "b waited at one end of the first of these seconds only"
    served(window, 1, BOTH, a=10.0)
    assert window.jain(window._looked_us) < 0.6
    served(window, 30, BOTH, a=10.0, b=12.0)
    assert window.jain(window._looked_us) > 0.98


def test_after_a_long_time_without_a_look_nobody_knows_who_waited() -> None:
    window = ServiceWindow()
    window.look(1 * SECOND, running={}, waiting=BOTH)
    window.settled("a", 10.0)
    window.look(40 * SECOND, running={}, waiting=BOTH)
    assert window.jain(40 * SECOND) == 1.0
    assert window.received_by("a", 40 * SECOND) == 10.0


def test_what_is_remembered_is_bounded() -> None:
    window = ServiceWindow()
    for number in range(FLOWS_MAX + 5):
        window.settled(f"t{number}", 1.0)
    window.look(SECOND, running={}, waiting={})
    assert len(window.received(SECOND)) == FLOWS_MAX
    for second in range(2, 300):
        window.look(second * SECOND, running={}, waiting={})
    assert len(window._slices) <= WINDOW_US // SECOND + 1
