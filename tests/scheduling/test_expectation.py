"""What is expected of a request, from those before it."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.expectation import Expectations


def test_the_first_of_all_is_expected_to_write_as_much_as_it_may() -> None:
    assert Expectations().output_tokens("a", 500) == 500


def test_a_tenant_is_known_by_its_own_last_answers_a_new_one_by_everybodys() -> None:
    expectations = Expectations()
    for _ in range(30):
        expectations.answered("short", 10)
        expectations.answered("long", 1000)
    assert expectations.output_tokens("short", 4096) == 10
    assert expectations.output_tokens("long", 4096) == 1000
    assert 10 < expectations.output_tokens("new", 4096) < 1000
    for _ in range(15):
        expectations.answered("short", 2000)
    assert expectations.output_tokens("short", 4096) > 1800, "a change is caught within a dozen answers"


def test_tenants_heard_of_longest_ago_are_forgotten() -> None:
    expectations = Expectations(tenants_max=2)
    for tenant in ("a", "b", "a", "c"):
        expectations.answered(tenant, 7 if tenant != "b" else 700)
    assert expectations.output_tokens("a", 1000) == 7
    assert expectations.output_tokens("b", 1000) < 700


def test_prompts_are_guessed_by_how_many_bytes_a_token_had() -> None:
    expectations = Expectations()
    assert expectations.prompt_tokens(400) == 100
    for _ in range(60):
        expectations.counted(1000, 500)
    assert expectations.prompt_tokens(400) == 200


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9))),
    st.integers(0, 10**9),
    st.integers(1, 10**9),
)
def test_never_more_than_can_be_and_never_nothing(
    seen: list[tuple[int, int]], bound: int, maximum: int
) -> None:
    expectations = Expectations()
    for count, tokens in seen:
        expectations.counted(count, tokens)
        expectations.answered("t", tokens)
    assert 1 <= expectations.prompt_tokens(bound) <= max(1, bound)
    assert 1 <= expectations.output_tokens("t", maximum) <= maximum
