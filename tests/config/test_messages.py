"""A wrong setting is named in the words of whoever gave it."""

from pathlib import Path

import pytest

from headrace.cli.serve import _settings
from headrace.config.loading import load_settings
from headrace.errors import ConfigError, SetupError


def test_an_environment_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_PORTT: portt: there is no such setting; known are data"):
        load_settings(environment={"HEADRACE_PORTT": "3"})
    with pytest.raises(ConfigError, match=r"HEADRACE_QUEUE__LENGTH: queue.length: Expected `int`"):
        load_settings(environment={"HEADRACE_QUEUE__LENGTH": "abc"})


def test_a_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="--port: "):
        _settings(None, {"port": 99_999})
    with pytest.raises(ConfigError, match="--batch-size: "):
        _settings(None, {"batch_size": 10_000})


def test_a_blank_in_a_files_name_is_no_trouble() -> None:
    (model,) = _settings(None, {"model_path": "/m/my model (1).gguf"}).models
    assert model.id == "my-model-1-"


def test_more_kv_tokens_than_slots_hold_make_no_sense(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    engine = "max_batch_size: 2, max_context_tokens: 512, kv_tokens: {}"
    file.write_text(f"models: [{{id: a, path: builtin, engine: {{{engine.format(1025)}}}}}]\n")
    with pytest.raises(ConfigError, match=r"models\[0\] \(a\): engine.kv_tokens may not exceed .* 1024"):
        load_settings(file=file)
    file.write_text(f"models: [{{id: a, path: builtin, engine: {{{engine.format(1024)}}}}}]\n")
    assert load_settings(file=file).models[0].engine.kv_tokens == 1024


def test_flags_do_not_silently_replace_the_models_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("models: [{id: a, path: builtin}]\n")
    with pytest.raises(SetupError, match=r"--context: .* says which models to serve"):
        _settings(file, {"context": 512})
    assert _settings(file, {"port": 1}).models[0].id == "a"
    file.write_text("port: 5\n")
    assert _settings(file, {"context": 512}).models[0].engine.max_context_tokens == 512
