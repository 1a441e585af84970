"""The engine model: times, memory, cache."""

import pytest

from headrace.simulate.cache import PrefixCache
from headrace.simulate.engine import Engine, EngineModel, Sequence
from headrace.simulate.workload import Arrival


def arrival(prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Arrival:
    return Arrival(arrival_us=0, tenant="t", prompt_tokens=prompt, output_tokens=output, blocks=blocks)


def serve(engine: Engine, *arrivals: Arrival) -> dict[int, tuple[int, int]]:
    """(first token, last token) of each, all taken up at once."""
    sequences = [Sequence(number, one) for number, one in enumerate(arrivals)]
    for sequence in sequences:
        engine.start(sequence, 0)
    last = {}
    while not engine.is_idle:
        _, ended = engine.run(1e15)
        last.update({sequence.number: round(engine.now_us) for sequence in ended})
    return {sequence.number: (sequence.first_us, last[sequence.number]) for sequence in sequences}


def test_one_request_takes_what_the_timing_says() -> None:
    model = EngineModel(
        prefill="whole", prefill_us_per_token=10, decode_us=100, decode_us_per_context_token=1,
        decode_us_per_sequence=5,
    )  # fmt: skip
    engine = Engine("r", model)
    # 4 prompt tokens at 10; the first token comes with them, then two steps over 5 and 6 tokens of context.
    assert serve(engine, arrival(4, 3)) == {0: (40, 40 + 105 + 5 + 105 + 6)}
    assert engine.busy_us == engine.now_us


def test_an_answer_of_one_token_ends_with_the_prompt() -> None:
    engine = Engine("r", EngineModel(prefill_us_per_token=10))
    assert serve(engine, arrival(4, 1)) == {0: (40, 40)}


def test_together_is_faster_than_one_after_the_other() -> None:
    alone = serve(Engine("r", EngineModel()), arrival(100, 50))[0][1]
    together = serve(Engine("r", EngineModel()), *[arrival(100, 50)] * 8)
    assert max(last for _, last in together.values()) < 4 * alone


def test_a_long_prompt_is_read_in_beside_short_ones_and_yields_to_them() -> None:
    load = [arrival(6000, 2), *[arrival(50, 2)] * 4]
    in_order = serve(Engine("r", EngineModel()), *load)
    by_length = serve(Engine("r", EngineModel(reads_short_first=True)), *load)
    assert max(by_length[number][0] for number in range(1, 5)) < in_order[1][0] / 5
    assert by_length[0][0] < in_order[0][0] * 1.2


def test_memory_is_planned_to_the_step_in_which_it_is_fullest() -> None:
    engine = Engine("r", EngineModel(kv_tokens=100, prefill="whole"))
    engine.start(Sequence(0, arrival(20, 20)), 0)
    # Together 40 + 20 prompt and, when the shorter ends after 10, 10 more of each.
    assert engine.fits(arrival(59, 10))
    assert not engine.fits(arrival(61, 10))


@pytest.mark.parametrize("prefill", ["chunked", "whole"])
def test_a_warm_prefix_is_not_computed_again(prefill: str) -> None:
    model = EngineModel(prefill=prefill, cache_blocks=10)  # type: ignore[arg-type]
    engine = Engine("r", model)
    serve(engine, arrival(1100, 1, (1, 2, 3)))
    cold_us = engine.now_us
    assert engine.match(arrival(1100, 1, (1, 2, 9))) == 1024
    serve(engine, arrival(1100, 1, (1, 2, 9)))
    assert engine.now_us - cold_us == pytest.approx(76 * model.prefill_us_per_token)
    assert engine.hit_tokens == 1024


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    cache = PrefixCache(3)
    cache.use((1, 2))
    cache.use((3,))
    cache.use((1, 2))
    cache.use((4,))
    assert (cache.match((1, 2)), cache.match((3,)), cache.match((4,))) == (2, 0, 1)
    assert PrefixCache(None).use((1,)) == 0
