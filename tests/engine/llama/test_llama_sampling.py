"""Sampling against brute force, in the order temperature, top_p, draw."""

from collections import Counter

import numpy as np
import pytest

from headrace.engine.llama.sampling import Logits, _draw_from_all, greedy_tokens, sample_token, uniform_number
from headrace.engine.protocol import Sampling
from headrace.errors import EngineFault

VOCABULARY = 49_152


def random_logits(seed: int, size: int = VOCABULARY, spread: float = 3.0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def nucleus(logits: Logits, temperature: float, top_p: float) -> set[int]:
    """The smallest set of most probable tokens that reaches `top_p`, the slow way."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order]) / weights.sum()
    return set(order[: int(np.searchsorted(sums, top_p)) + 1].tolist())


def draws(logits: Logits, sampling: Sampling, count: int) -> list[int]:
    return [sample_token(logits, sampling, position) for position in range(count)]


def test_greedy_takes_the_largest_of_each_row() -> None:
    rows = np.stack([random_logits(seed) for seed in range(5)])
    assert greedy_tokens(rows) == [int(row.argmax()) for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(1)
    assert sample_token(logits, Sampling(temperature=temperature, seed=9), 3) == int(logits.argmax())


@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 40, "top_p": 0.7}, {"temperature": 1.7, "top_p": 0.95}],
)
def test_same_seed_and_logits_give_the_same_tokens(options: dict[str, float]) -> None:
    logits = random_logits(2)
    sampling = Sampling(seed=1234, **options)  # type: ignore[arg-type]
    first = draws(logits, sampling, 50)
    assert draws(logits, sampling, 50) == first
    other = Sampling(seed=1235, **options)  # type: ignore[arg-type]
    assert draws(logits, other, 50) != first


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_only_tokens_of_the_nucleus_are_drawn(top_p: float, spread: float) -> None:
    logits = random_logits(3, spread=spread)
    allowed = nucleus(logits, 0.8, top_p)
    sampling = Sampling(temperature=0.8, top_p=top_p, seed=5)
    # Float32 sums may move the border by a token in a nucleus of thousands.
    strays = [token for token in draws(logits, sampling, 200) if token not in allowed]
    assert len(strays) <= 1


def test_a_small_nucleus_is_exact_and_all_of_it_is_drawn() -> None:
    logits = np.full(1000, -20.0, dtype=np.float32)
    logits[[7, 70, 700]] = [3.0, 2.0, 1.0]
    # Probabilities 0.665, 0.245, 0.090: the first two reach 0.9.
    assert set(draws(logits, Sampling(top_p=0.9, seed=1), 500)) == {7, 70}
    assert set(draws(logits, Sampling(top_p=0.92, seed=1), 500)) == {7, 70, 700}
    assert set(draws(logits, Sampling(top_p=0.6, seed=1), 500)) == {7}


def test_temperature_comes_before_top_p() -> None:
    logits = np.full(1000, -50.0, dtype=np.float32)
    logits[[7, 70, 700]] = [3.0, 2.0, 1.0]
    # At temperature 0.5 the probabilities are 0.867, 0.117, 0.016: the first alone reaches 0.8.
    assert set(draws(logits, Sampling(temperature=0.5, top_p=0.8, seed=1), 300)) == {7}
    assert set(draws(logits, Sampling(temperature=1.0, top_p=0.8, seed=1), 300)) == {7, 70}


@pytest.mark.parametrize("top_k", [1, 2, 40, 5000])
def test_only_the_top_k_are_drawn(top_k: int) -> None:
    logits = random_logits(4)
    allowed = set(np.argsort(-logits)[:top_k].tolist())
    assert set(draws(logits, Sampling(top_k=top_k, seed=2), 200)) <= allowed


def test_equal_logits_at_the_border_of_top_k_are_taken_by_index() -> None:
    logits = np.zeros(300, dtype=np.float32)
    assert set(draws(logits, Sampling(top_k=3, seed=2), 300)) == {0, 1, 2}


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9999}, {"top_k": 999}])
def test_frequencies_follow_the_probabilities(options: dict[str, float]) -> None:
    logits = np.full(1000, -30.0, dtype=np.float32)
    probabilities = {3: 0.5, 300: 0.3, 600: 0.15, 999: 0.05}
    for token, probability in probabilities.items():
        logits[token] = np.log(probability)
    sampling = Sampling(seed=11, **options)  # type: ignore[arg-type]
    counts = Counter(draws(logits, sampling, 4000))
    assert set(counts) == set(probabilities)
    for token, probability in probabilities.items():
        # Four standard deviations of a binomial count.
        spread = 4 * (4000 * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - 4000 * probability) < spread


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(1000, -np.inf, dtype=np.float32)
    logits[[10, 20]] = 0.0
    for sampling in (Sampling(seed=1), Sampling(seed=1, top_p=0.99), Sampling(seed=1, top_k=100)):
        assert set(draws(logits, sampling, 100)) == {10, 20}


def test_a_vocabulary_that_is_no_multiple_of_the_block_is_drawn_to_its_end() -> None:
    logits = np.full(1001, -50.0, dtype=np.float32)
    logits[1000] = 5.0
    assert set(draws(logits, Sampling(seed=1), 50)) == {1000}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(top_k=5), Sampling(top_p=0.5)])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logits_that_are_no_numbers_are_a_fault(bad: float, sampling: Sampling) -> None:
    logits = random_logits(5)
    logits[123] = bad
    with pytest.raises(EngineFault, match="not finite"):
        sample_token(logits, sampling, 1)
    with pytest.raises(EngineFault, match="not finite"):
        greedy_tokens(np.stack([random_logits(6), logits]))


@pytest.mark.parametrize("seed", range(20))
def test_rounding_never_leads_to_a_token_without_weight(seed: int) -> None:
    weights = np.exp(random_logits(seed, 3000))
    weights[-700:] = 0
    for uniform in (0.0, 1.0 - 2.0**-53, 1.0 - 2.0**-25):
        assert weights[_draw_from_all(weights, uniform)] > 0


def test_all_tokens_masked_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="not finite"):
        greedy_tokens(np.full((1, 100), -np.inf, dtype=np.float32))


def test_uniform_numbers_are_spread_over_the_unit_interval() -> None:
    numbers = np.array([uniform_number(seed, position) for seed in range(40) for position in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(set(numbers.tolist())) == len(numbers)
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert counts.min() > 300
    assert counts.max() < 500


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**63), 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= uniform_number(seed, 0) < 1
