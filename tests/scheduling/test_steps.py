"""How much prefill a step takes."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.bounds import CHUNK_GRAIN
from headrace.scheduling.steps import PrefillPace, StepLimits, share_out, share_out_chunks

LIMITS = StepLimits(batch_tokens_max=512, target_step_ms=200.0, idle_step_ms=500.0)


def test_before_anything_is_known_the_token_budget_alone_decides() -> None:
    assert PrefillPace(LIMITS).portion(num_decoding=0) == 512
    assert PrefillPace(LIMITS).portion(num_decoding=32) == 480


def test_a_portion_keeps_the_step_to_its_target_time() -> None:
    pace = PrefillPace(LIMITS)
    pace.observe_prefill(512, 0.512)  # one token a millisecond
    pace.observe_decode(0.050)
    assert pace.portion(num_decoding=4) == 128  # 150 ms left, rounded down to the grain
    assert pace.portion(num_decoding=0) == 448  # nobody waits for a token: 500 ms


def test_prefill_goes_on_even_when_decoding_alone_fills_the_step() -> None:
    pace = PrefillPace(LIMITS)
    pace.observe_prefill(512, 0.512)
    pace.observe_decode(0.900)
    assert pace.portion(num_decoding=32) == 64, "half of the target time"


def test_short_calls_say_nothing_about_speed() -> None:
    pace = PrefillPace(LIMITS)
    pace.observe_prefill(1, 10.0)
    pace.observe_prefill(512, 0.0)
    assert pace.portion(num_decoding=0) == 512


def test_what_stands_before_a_portion_is_reckoned_in() -> None:
    limits = StepLimits(batch_tokens_max=512, target_step_ms=200.0, idle_step_ms=500.0, context_cost=1 / 2000)
    pace = PrefillPace(limits)
    for _ in range(20):
        pace.observe_prefill(128, 0.128 * (1 + 64 / 2000))
        pace.observe_prefill(64, 0.064 * (1 + 6032 / 2000), context=6000)
    assert pace.portion(num_decoding=0) == 448, "a token a millisecond, behind nothing"
    assert pace.portion(num_decoding=0, context=2000) == 192, "half as many"
    assert pace.portion(num_decoding=0, context=6000) == 64


def test_an_engine_may_work_in_smaller_portions() -> None:
    pace = PrefillPace(StepLimits(batch_tokens_max=512, target_step_ms=100.0, idle_step_ms=100.0, grain=16))
    pace.observe_prefill(16, 0.05)
    assert pace.portion(num_decoding=0) == 32
    pace.observe_decode(0.2)
    assert pace.portion(num_decoding=1) == 16
    assert share_out([30, 100], 32, room=512, grain=16) == [30]
    assert share_out([10, 100], 32, room=512, grain=16) == [10, 22]


@given(st.lists(st.integers(1, 700), max_size=20), st.integers(1, 512), st.integers(0, 100))
def test_shares_are_first_come_first_served_without_fragments(
    remaining: list[int], portion: int, more: int
) -> None:
    room = portion + more
    shares = share_out(remaining, portion, room=room)
    assert sum(shares) <= min(room, portion + CHUNK_GRAIN - 1)
    assert all(share > 0 for share in shares)
    assert all(share == rest for share, rest in zip(shares[:-1], remaining, strict=False)), "in order"
    for share, rest in zip(shares[1:], remaining[1:], strict=False):
        assert share == rest or share >= CHUNK_GRAIN
    assert bool(shares) == bool(remaining), "some prompt always moves"


def test_a_rider_gets_what_its_own_context_leaves_of_the_time() -> None:
    """76 tokens behind nothing, then some of 1 000 behind 5 000, which take five times as long: not 324 of them."""
    pace = PrefillPace(
        StepLimits(
            batch_tokens_max=512, target_step_ms=400.0, idle_step_ms=400.0, grain=16, context_cost=1 / 1250
        )
    )
    pace.observe_prefill(400, 0.4 * (1 + 200 / 1250))
    costs = pace.costs([0, 5000])
    assert costs == [1.0, 5.0]
    portion = pace.portion(num_decoding=1)
    assert portion == 400
    assert share_out([76, 1000], portion, room=512, grain=16, costs=costs) == [76, 64]
    assert share_out_chunks([76, 1000], portion, room=512, chunk=64, costs=costs) == [64, 64]
    # The other way round there is time for more than the same number.
    assert share_out([30, 500], 80, room=512, grain=16, costs=pace.costs([5000, 0])) == [30, 250]


@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 8000)), min_size=1, max_size=12),
    st.integers(16, 512),
    st.integers(0, 100),
)
def test_what_is_shared_out_takes_as_long_as_the_portion(
    prompts: list[tuple[int, int]], portion: int, more: int
) -> None:
    pace = PrefillPace(
        StepLimits(batch_tokens_max=512, target_step_ms=400.0, idle_step_ms=400.0, context_cost=1 / 1250)
    )
    costs = pace.costs([context for _, context in prompts])
    remaining = [tokens for tokens, _ in prompts]
    shares = share_out(remaining, portion, room=portion + more, costs=costs)
    assert shares and sum(shares) <= portion + more
    last = costs[len(shares) - 1]
    took = sum(share * cost for share, cost in zip(shares, costs, strict=False))
    assert took < portion + CHUNK_GRAIN * max(last, 1)


def test_a_short_end_goes_with_what_comes_before_it_and_no_prompt_begins_with_a_fragment() -> None:
    assert share_out([140, 200], 128, room=512) == [140]
    assert share_out([140, 200], 128, room=128) == [128]
    assert share_out([80, 200], 128, room=512) == [80]
    assert share_out([20, 24, 18, 200], 128, room=512) == [20, 24, 18, 66]


def test_chunks_are_whole_or_a_prompts_end() -> None:
    share = share_out_chunks
    assert share([300, 100], 200, room=500, chunk=64) == [192, 64]
    assert share([300, 100], 10, room=500, chunk=64) == [64], "a waiting prompt never starves"
    assert share([30, 300], 500, room=500, chunk=64) == [30, 256]
    assert share([44], 500, room=500, chunk=64) == [44]
    assert share([300], 500, room=100, chunk=64) == [64]


@given(
    remaining=st.lists(st.integers(1, 700), min_size=1, max_size=8),
    portion=st.integers(1, 600),
    spare=st.integers(0, 100),
)
def test_every_cut_is_at_a_multiple(remaining: list[int], portion: int, spare: int) -> None:
    room = max(portion, 64) + spare
    shares = share_out_chunks(remaining, portion, room=room, chunk=64)
    assert shares and sum(shares) <= room
    for share, tokens in zip(shares, remaining, strict=False):
        assert share == tokens < 64 or (share % 64 == 0 and 0 < share <= tokens)
