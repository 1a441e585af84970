"""The real library and the real default model, loaded once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engine.builtin import builtin_model_path
from headrace.engine.llama import LlamaEngine, LlamaSettings, PreparedModel, prepare_model
from headrace.engine.llama.library import Library, open_library
from tests.engine.llama.chosen import LIBRARY


@pytest.fixture(scope="session")
def source_model() -> Path:
    """The default model as shipped."""
    path = builtin_model_path()
    if not path.is_file():
        pytest.fail(f"{path} is missing: run make install")
    return path


@pytest.fixture(scope="session")
def prepared(source_model: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """The default model converted, in a cache directory of this test run."""
    return prepare_model(source_model, tmp_path_factory.mktemp("converted"), library=LIBRARY)


@pytest.fixture(scope="session")
def library() -> Library:
    return open_library(LIBRARY)


@pytest.fixture(scope="session")
def shared_engine(prepared: PreparedModel) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(
        LlamaSettings(
            model_path=prepared.path,
            sequences=8,
            context_tokens=512,
            batch_tokens=128,
            threads=1,
            library=LIBRARY,
        )
    )
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared_engine: LlamaEngine) -> Iterator[LlamaEngine]:
    """The shared engine with all slots closed before and after."""
    yield shared_engine
    for slot in range(shared_engine.info.sequences):
        shared_engine.close(slot)
