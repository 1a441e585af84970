"""What is drawn of a run."""

import numpy as np
import pytest

from headrace.simulate.curves import OTHERS, curves, most_served
from headrace.simulate.fleet import simulate
from headrace.simulate.measure import Window, measure
from headrace.simulate.outcome import Setup
from headrace.simulate.workload import LOADS, merged

WINDOW = Window(duration_s=120, warm_up_s=0)


def test_service_over_time_is_what_the_figures_sum_up() -> None:
    outcome = simulate(Setup(name="fair"), merged(LOADS["weighted"](), 120))
    names = most_served(outcome, 2)
    found = curves(outcome, WINDOW, names)
    assert [one.tenant for one in found.tenants] == [*names, OTHERS]
    assert found.name == "fair"
    assert found.times_s.tolist() == [30, 60, 90]
    figures = measure(outcome, WINDOW)
    served = {one.tenant: one for one in figures.tenants}
    for one in found.tenants[:2]:
        assert len(one.ttft_s) == served[one.tenant].served
        assert one.ttft_s.tolist() == sorted(one.ttft_s)
        assert one.ttft_s[-1] == pytest.approx(served[one.tenant].ttft_s.max)
        # Two windows side by side are the whole time.
        assert (one.service_per_s[0] + one.service_per_s[2]) / 2 == pytest.approx(
            served[one.tenant].service_per_s
        )
    total = sum(one.service_per_s for one in found.tenants)
    assert (total[0] + total[2]) / 2 == pytest.approx(sum(one.service_per_s for one in figures.tenants))


def test_who_asked_for_most_comes_first_and_nobody_is_left_over() -> None:
    outcome = simulate(Setup(name="x"), merged(LOADS["overload"](), 60))
    assert most_served(outcome, 8) == ["c2", "c1"]
    assert [one.tenant for one in curves(outcome, WINDOW, ["c2", "c1"]).tenants] == ["c2", "c1"]


def test_a_window_shorter_than_a_step_is_one_point() -> None:
    outcome = simulate(Setup(name="x"), merged(LOADS["overload"](), 2))
    found = curves(outcome, Window(duration_s=2, warm_up_s=0), ["c1"])
    assert found.times_s.tolist() == [1.0]
    assert np.isfinite(found.tenants[0].service_per_s).all()
