"""Files that cannot be served are refused with the reason, before memory is taken."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.llama import LlamaEngine, LlamaSettings, PreparedModel, definitions, memory, model
from headrace.engine.llama.gguf import GgufFile
from headrace.engine.llama.library import Library
from headrace.errors import ConfigError, MemoryShortage, ModelError
from tests.engine.llama.chosen import LIBRARY
from tests.engine.llama.gguf_writer import Value, write_head

DECODER: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.context_length": 512,
}


def load(path: Path, **settings: Any) -> LlamaEngine:
    defaults: dict[str, Any] = {"sequences": 2, "context_tokens": 256, "batch_tokens": 64, "threads": 1}
    return LlamaEngine.load(LlamaSettings(library=LIBRARY, model_path=path, **(defaults | settings)))


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(path, **settings)
    return str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.gguf")


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)


def test_something_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in refusal(tmp_path / "pipe")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"<!doctype html>"])
def test_something_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "not a GGUF file" in refusal(path)


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF" + b"\xff" * 200, b"GGUF\x03\0\0\0" + b"\x01" * 60])
def test_garbage_behind_the_magic(tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "corrupt or truncated: " in refusal(path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("size", "words"), [(1_000_000, "corrupt or truncated"), (50_000_000, "is truncated")]
)
def test_a_truncated_file(
    source_model: Path, tmp_path: Path, size: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    with source_model.open("rb") as source, path.open("wb") as target:
        target.write(source.read(size))
    assert words in refusal(path)
    assert capfd.readouterr().err == ""


def test_corrupt_weights(prepared: PreparedModel, library: Library, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(prepared.path, path)
    with GgufFile(library, path) as file:
        tensor = file.tensors[-5]
        place = file.data_offset + tensor.offset
    with path.open("r+b") as raw:
        raw.seek(place)
        raw.write(b"\xff" * tensor.size)
    assert "cannot be loaded" in refusal(path)


def test_no_architecture(tmp_path: Path) -> None:
    assert "does not say its architecture" in refusal(write_head(tmp_path / "m.gguf", {"general.name": "x"}))


def test_no_attention_decoder(tmp_path: Path) -> None:
    keys: dict[str, Value] = {"general.architecture": "mamba", "mamba.block_count": 2}
    assert "does not describe an attention decoder" in refusal(write_head(tmp_path / "m.gguf", keys))


def test_an_architecture_the_library_does_not_know(tmp_path: Path) -> None:
    keys = {key.replace("llama", "novel"): value for key, value in DECODER.items()}
    path = write_head(tmp_path / "m.gguf", keys | {"general.architecture": "novel"})
    text = refusal(path)
    assert "cannot be loaded" in text
    assert "novel" in text.split("know): ")[1]


def test_one_of_several_parts(tmp_path: Path) -> None:
    assert "one of 3 parts" in refusal(write_head(tmp_path / "m.gguf", DECODER | {"split.count": 3}))


def test_a_file_without_weights_or_vocabulary(tmp_path: Path) -> None:
    assert "cannot be loaded" in refusal(write_head(tmp_path / "m.gguf", DECODER))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"has_encoder": True}, "has an encoder"),
        ({"has_decoder": False}, "has an encoder"),
        ({"is_recurrent": True}, "recurrent or hybrid"),
        ({"is_hybrid": True}, "recurrent or hybrid"),
        ({"is_diffusion": True}, "diffusion"),
        ({"vocabulary": definitions.VOCABULARY_NONE}, "no vocabulary"),
    ],
)
def test_kinds_that_cannot_be_served(answers: dict[str, Any], words: str) -> None:
    kind: dict[str, Any] = {
        "has_encoder": False,
        "has_decoder": True,
        "is_recurrent": False,
        "is_hybrid": False,
        "is_diffusion": False,
        "vocabulary": 2,
    } | answers
    api = SimpleNamespace(
        llama_model_has_encoder=lambda _: kind["has_encoder"],
        llama_model_has_decoder=lambda _: kind["has_decoder"],
        llama_model_is_recurrent=lambda _: kind["is_recurrent"],
        llama_model_is_hybrid=lambda _: kind["is_hybrid"],
        llama_model_is_diffusion=lambda _: kind["is_diffusion"],
        llama_model_get_vocab=lambda _: None,
        llama_vocab_type=lambda _: kind["vocabulary"],
    )
    fake: Any = SimpleNamespace(api=api)
    with pytest.raises(ModelError, match=words):
        model._check_kind(fake, Path("m.gguf"), None)


def test_memory_shortage_is_found_before_loading(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 500 << 20)
    monkeypatch.setattr(model, "_load", lambda *_: pytest.fail("must not load"))
    with pytest.raises(MemoryShortage, match=r"KV cache 1440, .* only 500 MiB"):
        load(prepared.path, sequences=32, context_tokens=2048)


def test_the_estimate_covers_what_the_library_takes(prepared: PreparedModel, library: Library) -> None:
    """The KV part must be exact: it is the largest and it is ours to compute."""
    settings = LlamaSettings(
        library=LIBRARY, model_path=prepared.path, sequences=4, context_tokens=300, threads=1
    )
    engine = LlamaEngine.load(settings)
    with GgufFile(library, prepared.path) as file:
        demand = model.estimate(memory.read_shape(file), settings)
    assert demand.kv == engine.info.kv_bytes == 4 * 512 * engine.info.kv_bytes_per_token
    assert demand.weights == engine.info.weights_bytes
    engine.shutdown()


def test_a_context_longer_than_the_model_was_trained_for(prepared: PreparedModel) -> None:
    with pytest.raises(ConfigError, match="at most 8192"):
        load(prepared.path, sequences=1, context_tokens=8193)


@pytest.mark.parametrize(
    "settings",
    [
        {"sequences": 0},
        {"sequences": 257},
        {"context_tokens": 0},
        {"batch_tokens": 0},
        {"threads": 0},
        {"sequences": 100, "batch_tokens": 64},
    ],
)
def test_settings_out_of_range(prepared: PreparedModel, settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        load(prepared.path, **settings)


def test_loading_says_nothing_on_stderr(prepared: PreparedModel, capfd: pytest.CaptureFixture[str]) -> None:
    engine = load(prepared.path)
    engine.shutdown()
    assert capfd.readouterr().err == ""


def test_numbers_given_per_layer(tmp_path: Path, library: Library) -> None:
    keys = DECODER | {"llama.attention.head_count_kv": [1, 3], "llama.attention.key_length": 32}
    with GgufFile(library, write_head(tmp_path / "m.gguf", keys)) as file:
        shape = memory.read_shape(file)
        assert shape.kv_bytes_per_token == (1 + 3) * (32 + 16) * 2
        assert file.numbers("llama.attention.head_count_kv", 3) is None
        assert file.number("general.architecture") is None
        assert file.text("llama.block_count") is None
