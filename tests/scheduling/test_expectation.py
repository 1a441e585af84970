"""What is expected of a request, from those before it."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.expectation import RECENT_ANSWERS, Expectations


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


# --- longest recent answers: LI-6 -------------------------------------------------------------------------------


def test_the_longest_recent_answer_is_predicted_and_a_jump_caught_with_the_first_long_one() -> None:
    outputs = Expectations()
    assert outputs.longest_output("a") is None
    for _ in range(100):
        outputs.answered("a", 128)
    assert outputs.longest_output("a") == 128
    outputs.answered("a", 2048)
    assert outputs.longest_output("a") == 2048
    assert outputs.longest_output("b") is None, "what others write says nothing of a tenant's"
    for _ in range(RECENT_ANSWERS - 1):
        outputs.answered("a", 128)
    assert outputs.longest_output("a") == 2048
    outputs.answered("a", 128)
    assert outputs.longest_output("a") == 128


def test_what_was_broken_off_says_only_how_long_it_was_at_least() -> None:
    outputs = Expectations()
    outputs.broken_off("a", 50)
    assert outputs.longest_output("a") is None, "how long it would have become nobody knows"
    outputs.answered("a", 100)
    for _ in range(100):
        outputs.broken_off("a", 1)
    assert outputs.longest_output("a") == 100
    outputs.broken_off("a", 300)
    assert outputs.longest_output("a") == 300


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=100))
def test_the_window_is_that_of_a_plain_list(answers: list[tuple[int, bool]]) -> None:
    outputs = Expectations()
    recent: list[int] = []
    for tokens, is_whole in answers:
        (outputs.answered if is_whole else outputs.broken_off)("a", tokens)
        if is_whole or (recent and tokens > max(recent)):
            recent = [*recent, tokens][-RECENT_ANSWERS:]
        assert outputs.longest_output("a") == (max(recent) if recent else None)


def test_windows_are_bounded_in_tenants() -> None:
    outputs = Expectations(tenants_max=2)
    for tenant in "abac":
        outputs.answered(tenant, 5)
    assert (outputs.longest_output("a"), outputs.longest_output("b"), outputs.longest_output("c")) == (
        5,
        None,
        5,
    )
