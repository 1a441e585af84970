"""A worker's settings and the file together say what is loaded; what does not go together is refused."""

from pathlib import Path

import pytest

from headrace.config.settings import EngineSettings
from headrace.engine.llama import convert, definitions
from headrace.engine.llama.library import Library
from headrace.engine.loading import load_engine
from headrace.engine.protocol import Sampling, Span
from headrace.errors import ModelError
from tests.engine.llama.chosen import LIBRARY

SMALL = {
    "max_batch_size": 1,
    "max_context_tokens": 64,
    "max_batch_tokens": 64,
    "threads": 1,
    "library": LIBRARY,
}


@pytest.fixture
def bf16_model(source_model: Path, library: Library, tmp_path: Path) -> Path:
    """The default model with weights of 16 bits."""
    path = tmp_path / "bf16.gguf"
    convert.convert(library, source_model, path, tensor_type=definitions.TYPE_BF16)
    return path


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_q4_1_weights_become_q8_0(source_model: Path, tmp_path: Path, is_reproducible: bool) -> None:
    settings = EngineSettings(**SMALL, reproducible=is_reproducible)  # type: ignore[arg-type]
    engine = load_engine(str(source_model), settings, cache=tmp_path)
    assert engine.info.quantization == "Q8_0"
    engine.shutdown()


def test_others_stay_as_they_are_and_go_on_alike(
    source_model: Path, bf16_model: Path, tmp_path: Path
) -> None:
    answers = []
    for path, expected in ((source_model, "Q8_0"), (bf16_model, "BF16")):
        engine = load_engine(str(path), EngineSettings(**SMALL), cache=tmp_path)  # type: ignore[arg-type]
        assert engine.info.quantization == expected
        text = "One two three four five six seven eight nine ten eleven twelve"
        prompt = engine.vocabulary.tokenize(text, is_special_parsed=False, is_start=True)
        engine.open(0, Sampling(temperature=0))
        answer = engine.forward([Span(0, 0, prompt, True)]).tokens
        while len(answer) < 8:
            answer += engine.forward([Span(0, len(prompt) + len(answer) - 1, answer[-1:], True)]).tokens
        answers.append(answer)
        engine.shutdown()
    assert answers[0] == answers[1]


def test_other_weights_are_refused_where_answers_are_to_be_reproducible(
    bf16_model: Path, tmp_path: Path
) -> None:
    settings = EngineSettings(**SMALL, reproducible=True)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"verified with Q8_0 weights only.*BF16"):
        load_engine(str(bf16_model), settings, cache=tmp_path)
