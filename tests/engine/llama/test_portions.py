"""Short portions of prompts are filled up to whole tiles where that takes less time, and nothing else comes of it."""

import pytest

from headrace.engine.llama import LlamaEngine
from headrace.engine.llama.portions import PLAIN_ROWS, TILE_ROWS, Tiles
from headrace.engine.protocol import Sampling, Span

GREEDY = Sampling(temperature=0)
HELD = 6 * TILE_ROWS
ROWS = 50


def text_of(engine: LlamaEngine, length: int) -> list[int]:
    words = " ".join(f"river {number} and stone" for number in range(length))
    return engine.vocabulary.tokenize(words, is_special_parsed=False, is_start=True)[:length]


def read_in(engine: LlamaEngine, slot: int, tokens: list[int]) -> None:
    engine.open(slot, GREEDY)
    for start in range(0, len(tokens), 128):
        engine.forward([Span(slot, start, tokens[start : start + 128], False)])


def go_on(engine: LlamaEngine, slot: int, held: int, token: int, count: int) -> list[int]:
    answer = [token]
    while len(answer) < count:
        answer += engine.forward([Span(slot, held + len(answer) - 1, answer[-1:], True)]).tokens
    return answer


@pytest.mark.parametrize(
    ("rows", "start", "padding"),
    [(1, 6000, 0), (2, 6000, 0), (21, 6000, 0), (22, 6000, 42), (29, 1500, 0), (30, 1500, 34), (63, 0, 0), (63, 100, 1), (64, 6000, 0)],
)  # fmt: skip
def test_a_portion_is_filled_up_where_the_tile_is_faster_than_its_rows(
    rows: int, start: int, padding: int
) -> None:
    assert Tiles(553.0, 17.3).padding(rows, start=start) == padding


def test_what_was_filled_up_is_forgotten_and_changes_no_bit(engine: LlamaEngine) -> None:
    tokens = text_of(engine, HELD + ROWS)
    read_in(engine, 0, tokens[:HELD])
    span = Span(0, HELD, tokens[HELD:], True)
    padding = engine._padding(span)
    if engine._tiles is None:
        assert padding == 0
        pytest.skip("attention of ours fills nothing up")
    assert padding == TILE_ROWS - ROWS
    (token,) = engine.forward([span]).tokens
    logits = engine._context.logits(1).tobytes()
    assert engine.held(0) == HELD + ROWS
    answer = go_on(engine, 0, HELD + ROWS, token, 6)

    # Once more, filled up with other tokens: nobody looks at them.
    engine.close(0, keep=HELD)
    engine.open(0, GREEDY, held=HELD)
    engine._batch.fill([span], padding=padding)
    engine._batch._tokens[ROWS:TILE_ROWS] = range(1000, 1000 + padding)
    engine._context.decode(engine._batch)
    assert engine._context.logits(1).tobytes() == logits
    engine._context.cut(0, HELD + ROWS)
    engine._lengths[0] = HELD + ROWS
    assert go_on(engine, 0, HELD + ROWS, token, 6) == answer


def test_what_else_runs_does_not_matter(engine: LlamaEngine) -> None:
    tokens = text_of(engine, HELD + ROWS)
    read_in(engine, 0, tokens[:HELD])
    (alone,) = engine.forward([Span(0, HELD, tokens[HELD:], True)]).tokens
    logits = engine._context.logits(1).tobytes()
    read_in(engine, 5, tokens[:HELD])
    engine.open(2, GREEDY)
    engine.forward([Span(2, 0, tokens[:40], False)])
    done = engine.forward([Span(2, 40, tokens[40:41], True), Span(5, HELD, tokens[HELD:], True)])
    assert done.tokens[1] == alone
    assert engine._context.logits(1).tobytes() == logits


def test_at_the_end_of_a_slot_there_is_no_room_and_none_is_taken(engine: LlamaEngine) -> None:
    whole = engine.info.context_tokens
    tokens = text_of(engine, whole)
    read_in(engine, 1, tokens[: whole - ROWS])
    span = Span(1, whole - ROWS, tokens[whole - ROWS :], True)
    assert engine._padding(span) == 0
    engine.forward([span])
    assert engine.held(1) == whole


def test_the_engine_says_what_its_portions_cost(engine: LlamaEngine) -> None:
    assert engine.info.portion_grain == (PLAIN_ROWS if engine._tiles is None else TILE_ROWS)
    assert 1 / 4000 < engine.info.context_cost < 1 / 1000
