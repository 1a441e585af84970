"""Short prompts before long ones, and the oldest every fourth time."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.bounds import CHUNK_GRAIN
from headrace.scheduling.prefill_order import OLDEST_EVERY, prefill_order, without_long_rider
from headrace.scheduling.steps import share_out, share_out_chunks


def test_the_shortest_first_and_of_equals_the_oldest() -> None:
    assert prefill_order([6000, 50, 20, 50], portions_before=0) == [2, 1, 3, 0]
    assert prefill_order([], portions_before=OLDEST_EVERY - 1) == []


def test_every_fourth_portion_is_for_the_oldest() -> None:
    firsts = [prefill_order([6000, 50, 20], portions_before=turn)[0] for turn in range(8)]
    assert firsts == [2, 2, 2, 0, 2, 2, 2, 0]


def test_no_piece_of_a_long_prompt_holds_up_those_that_end() -> None:
    assert without_long_rider([40, 24], [40, 6000], portion=64) == [40]
    assert without_long_rider([40, 24], [40, 256], portion=64) == [40, 24], "not long"
    assert without_long_rider([64], [6000], portion=64) == [64], "nobody waits for it"
    assert without_long_rider([24, 40], [24, 40], portion=64) == [24, 40]


@given(
    st.lists(st.integers(1, 7000), min_size=1, max_size=8),
    st.integers(1, 8),
    st.lists(st.integers(1, 300), max_size=100),
    st.booleans(),
)
def test_everybody_is_read_in_whoever_comes_meanwhile(
    prompts: list[int], grains: int, newcomers: list[int], is_chunked: bool
) -> None:
    """A newcomer at every step: the oldest is done after the portions that its length takes, times `OLDEST_EVERY`."""
    portion = 64 * grains
    left = dict(enumerate(prompts))
    arrivals = iter(newcomers)
    bound = (sum(-(-tokens // portion) + 1 for tokens in prompts) + 1) * OLDEST_EVERY
    steps = 0
    while any(place in left for place in range(len(prompts))):
        places = list(left)
        order = prefill_order([left[place] for place in places], portions_before=steps)
        ordered = [left[places[at]] for at in order]
        if is_chunked:
            shares = share_out_chunks(ordered, portion, room=portion + 64, chunk=64)
        else:
            shares = share_out(ordered, portion, room=portion + CHUNK_GRAIN)
        shares = without_long_rider(shares, ordered, portion=portion)
        for at, share in zip(order, shares, strict=False):
            left[places[at]] -= share
            if not left[places[at]]:
                del left[places[at]]
        newcomer = next(arrivals, None)
        if newcomer is not None:
            left[1000 + steps] = newcomer
        steps += 1
        assert steps <= bound
