"""How much prefill a step takes."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.steps import CHUNK_GRAIN, PrefillPace, StepLimits, share_out

LIMITS = StepLimits(batch_tokens_max=512, target_step_ms=200.0, idle_step_ms=500.0)


def test_before_anything_is_known_the_token_budget_alone_decides() -> None:
    assert PrefillPace(LIMITS).portion(num_decoding=0) == 512
    assert PrefillPace(LIMITS).portion(num_decoding=32) == 480


def test_a_portion_keeps_the_step_to_its_target_time() -> None:
    pace = PrefillPace(LIMITS)
    pace.observe_prefill(512, 0.512)  # one token a millisecond
    pace.observe_decode(0.050)
    assert pace.portion(num_decoding=4) == 128  # 150 ms left, rounded down to the grain
    assert pace.portion(num_decoding=0) == 480  # nobody waits for a token: 500 ms


def test_prefill_goes_on_even_when_decoding_alone_fills_the_step() -> None:
    pace = PrefillPace(LIMITS)
    pace.observe_prefill(512, 0.512)
    pace.observe_decode(0.900)
    assert pace.portion(num_decoding=32) == CHUNK_GRAIN


def test_short_calls_say_nothing_about_speed() -> None:
    pace = PrefillPace(LIMITS)
    pace.observe_prefill(1, 10.0)
    pace.observe_prefill(512, 0.0)
    assert pace.portion(num_decoding=0) == 512


@given(st.lists(st.integers(1, 700), max_size=20), st.integers(1, 512))
def test_shares_are_first_come_first_served_and_use_the_portion_up(
    remaining: list[int], portion: int
) -> None:
    shares = share_out(remaining, portion)
    assert sum(shares) == min(portion, sum(remaining))
    assert all(share == rest for share, rest in zip(shares[:-1], remaining, strict=False))
    assert all(share > 0 for share in shares)
