"""A worker's settings and the file together say what is loaded; what does not go together is refused."""

from pathlib import Path

import pytest

from headrace.config.settings import EngineSettings
from headrace.engine.llama import prepare_model
from headrace.engine.loading import load_engine
from headrace.errors import ModelError
from tests.engine.llama.chosen import LIBRARY

SMALL = {
    "max_batch_size": 1,
    "max_context_tokens": 64,
    "max_batch_tokens": 64,
    "threads": 1,
    "library": LIBRARY,
}


@pytest.mark.parametrize(("weights", "expected"), [("q8_0", "Q8_0"), ("bf16", "BF16")])
def test_weights_become_what_the_settings_say(
    source_model: Path, tmp_path: Path, weights: str, expected: str
) -> None:
    engine = load_engine(str(source_model), EngineSettings(**SMALL, weights=weights), cache=tmp_path)  # type: ignore[arg-type]
    assert engine.info.quantization == expected
    engine.shutdown()


def test_reproducible_answers_are_computed_with_q8_0(source_model: Path, tmp_path: Path) -> None:
    engine = load_engine(str(source_model), EngineSettings(**SMALL, reproducible=True), cache=tmp_path)  # type: ignore[arg-type]
    assert engine.info.quantization == "Q8_0"
    engine.shutdown()


def test_other_weights_are_refused_where_answers_are_to_be_reproducible(
    source_model: Path, tmp_path: Path
) -> None:
    made = prepare_model(source_model, tmp_path, library=LIBRARY, weights="bf16")
    settings = EngineSettings(**SMALL, reproducible=True)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"verified with Q8_0 weights only.*BF16"):
        load_engine(str(made.path), settings, cache=tmp_path)
