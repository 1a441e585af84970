"""What the flags of `serve` make of the settings."""

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.serve import _advice, _settings
from headrace.config.loading import load_settings
from headrace.engine.llama.builds import Q8_0_FLAGS
from headrace.errors import ConfigError, SetupError
from tests.gateway.scripted_upstream import scripted_upstream


def models(**flags: Any) -> list[dict[str, Any]]:
    return [
        {"id": one.id, "path": one.path, "upstream": one.upstream} for one in _settings(None, flags).models
    ]


def test_without_flags_the_builtin_model_is_left_to_the_server() -> None:
    assert models(port=None, json=None) == []


def test_a_model_by_path_is_called_after_its_file() -> None:
    (model,) = _settings(None, {"model_path": "/m/tiny-Q8_0.gguf", "batch_size": 4, "threads": 2}).models
    assert (model.id, model.path, model.engine.max_batch_size, model.engine.threads) == (
        "tiny-Q8_0",
        "/m/tiny-Q8_0.gguf",
        4,
        2,
    )


def test_engine_flags_alone_mean_the_builtin_model() -> None:
    (model,) = _settings(None, {"context": 512}).models
    assert (model.path, model.engine.max_context_tokens) == ("builtin", 512)


def test_an_upstreams_models_are_found_or_named() -> None:
    with scripted_upstream() as upstream:
        url = f"http://127.0.0.1:{upstream.server_address[1]}/v1"
        assert [model["id"] for model in models(upstream=url)] == ["first", "second"]
        assert models(upstream=url, model_id="mine") == [{"id": "mine", "path": None, "upstream": url}]


def test_an_upstream_that_does_not_answer_asks_for_a_name() -> None:
    with pytest.raises(SetupError, match="--model-id"):
        models(upstream="http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"upstream": "http://h/v1", "model_id": "m", "batch_size": 4, "model_path": "x"},
            "--model, --batch-size",
        ),
        ({"upstream_key_env": "X"}, "goes with --upstream"),
    ],
)
def test_flags_that_do_not_go_together(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        models(**flags)


def test_values_are_checked_like_those_of_a_file() -> None:
    with pytest.raises(ConfigError, match="port"):
        models(port=70_000)


@pytest.mark.parametrize(
    ("flags", "model", "expected"),
    [
        (Q8_0_FLAGS, None, True),
        (Q8_0_FLAGS, {}, True),
        (Q8_0_FLAGS - {"avx512_vnni"}, None, False),
        (Q8_0_FLAGS | {"amx_int8"}, None, False),
        (Q8_0_FLAGS, {"engine": {"library": "native"}}, False),
        (Q8_0_FLAGS, {"path": None, "engine": {"stub": {}}}, False),
        (Q8_0_FLAGS, {"path": None, "upstream": "http://127.0.0.1:9/v1"}, False),
    ],
)
def test_a_processor_that_could_do_more_is_pointed_out_where_a_library_for_it_would_be_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: frozenset[str],
    model: dict[str, Any] | None,
    expected: bool,
) -> None:
    monkeypatch.setattr("headrace.engine.llama.builds.native_directory", lambda: tmp_path)
    monkeypatch.setattr("headrace.engine.llama.preflight.processor_flags", lambda: flags)
    models = [] if model is None else [{"id": "m", "path": "builtin"} | model]
    advice = _advice(load_settings(overrides={"models": models}))
    assert ("headrace engine build" in advice) is expected
    (tmp_path / "build.json").touch()
    advice = _advice(load_settings(overrides={"models": models}))
    assert "headrace engine build" not in advice
    assert ("--library native" in advice) is expected
