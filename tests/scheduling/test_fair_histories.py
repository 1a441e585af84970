"""The fair queue over a thousand histories (`make simulate-fair`: ten thousand), and the proof that they would find a bug."""

import pytest

from tests.scheduling.fair_bugs import planted
from tests.scheduling.fair_histories import BUGS, History, first_violation

SEEDS = 1000


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_nothing_is_found(first: int) -> None:
    assert first_violation(range(first, first + 100)) == (100, None)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    with planted(bug):
        count, found = first_violation(range(10))
    assert found is not None
    assert count <= 3


def test_histories_are_full_of_life() -> None:
    """Those in which nothing happens would prove nothing."""
    seen: dict[str, int] = {}
    for seed in range(10):
        history = History(seed)
        history.run()
        for kind, number in history.happened.items():
            seen[kind] = seen.get(kind, 0) + number
    assert min(seen[kind] for kind in ("send", "end", "cancel")) > 300
    assert min(seen[kind] for kind in ("crash", "come_back", "refuse", "have_room")) > 30


def test_the_same_seed_is_the_same_history() -> None:
    histories = [History(7), History(7)]
    for history in histories:
        history.run()
    assert histories[0].happened == histories[1].happened
    assert histories[0].counter == histories[1].counter
