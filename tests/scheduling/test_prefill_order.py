"""Short prompts before long ones, and never less than a quarter for the oldest."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.bounds import CHUNK_GRAIN
from headrace.scheduling.prefill_order import OLDEST_PART, PrefillOrder, without_long_rider
from headrace.scheduling.steps import share_out, share_out_chunks


def test_the_shortest_first_and_of_equals_the_oldest() -> None:
    order = PrefillOrder()
    assert order.order("abcd", [6000, 50, 20, 50]) == [2, 1, 3, 0]
    assert order.order("", []) == []


def test_the_oldest_has_a_quarter() -> None:
    order = PrefillOrder()
    firsts = []
    for _ in range(9):
        first = "ab"[order.order("ab", [6000, 50])[0]]
        order.took(first, 64)
        firsts.append(first)
    assert "".join(firsts) == "babbbabbb"


def test_who_had_all_for_itself_can_wait() -> None:
    order = PrefillOrder()
    order.order("a", [6000])
    order.took("a", 640)
    for _ in range(30):
        assert order.order("ab", [5360, 50]) == [1, 0]
        order.took("b", 50)
    # Another one is the oldest now, and what the first had is not its.
    assert order.order("cb", [900, 50]) == [1, 0]
    order.took("b", 50)
    assert order.order("cb", [900, 50]) == [0, 1]


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
    """A newcomer at every step: the oldest is done after the tokens that it has, four times over."""
    portion = CHUNK_GRAIN * grains
    left = dict(enumerate(prompts))
    arrivals = iter(newcomers)
    order = PrefillOrder()
    steps = since = given_out = 0
    oldest = 0
    while any(place in left for place in range(len(prompts))):
        places = list(left)
        if places[0] != oldest:
            oldest, since, given_out = places[0], left[places[0]], 0
        since = since or left[oldest]
        turn = order.order(places, [left[place] for place in places])
        ordered = [left[places[at]] for at in turn]
        if is_chunked:
            shares = share_out_chunks(ordered, portion, room=portion + CHUNK_GRAIN, chunk=CHUNK_GRAIN)
        else:
            shares = share_out(ordered, portion, room=portion + CHUNK_GRAIN)
        shares = without_long_rider(shares, ordered, portion=portion)
        assert shares, "every step reads something in"
        for at, share in zip(turn, shares, strict=False):
            order.took(places[at], share)
            given_out += share
            left[places[at]] -= share
            if not left[places[at]]:
                del left[places[at]]
        assert given_out <= since / OLDEST_PART + 2 * (portion + CHUNK_GRAIN) or oldest not in left
        newcomer = next(arrivals, None)
        if newcomer is not None:
            left[1000 + steps] = newcomer
        steps += 1
