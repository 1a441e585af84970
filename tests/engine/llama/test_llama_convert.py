"""A model file is converted once, correctly, and only when that is worthwhile."""

import errno
import hashlib
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.llama import PreparedModel, convert, definitions, prepare_model
from headrace.engine.llama.builds import Build
from headrace.engine.llama.cache import ModelCache
from headrace.engine.llama.gguf import GgufFile
from headrace.engine.llama.library import Library
from headrace.errors import ModelError


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_hello(path: Path) -> str:
    path.write_bytes(b"hello")
    return sha256(path)


def test_the_default_model_becomes_the_pinned_file(prepared: PreparedModel) -> None:
    assert prepared.was_converted
    assert not prepared.was_reused
    assert prepared.source_sha256 is not None
    assert prepared.sha256 == definitions.CONVERTED_SHA256["q8_0"]
    assert sha256(prepared.path) == prepared.sha256
    assert prepared.source_sha256[:16] in prepared.path.name
    assert "Q8_0" in prepared.path.name


def test_tensors_are_q8_0_and_the_embedding_is_as_shipped(
    prepared: PreparedModel, source_model: Path, library: Library
) -> None:
    with GgufFile(library, source_model) as before, GgufFile(library, prepared.path) as after:
        assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
        assert not list(after.tensors_of_type(definitions.TYPE_Q4_1))
        assert after.number("general.file_type") == 7
        assert after.text("general.name") == before.text("general.name")
        after.check_complete()
        contents = []
        for file in (before, after):
            tensor = next(tensor for tensor in file.tensors if tensor.name == "token_embd.weight")
            with file.path.open("rb") as raw:
                raw.seek(file.data_offset + tensor.offset)
                contents.append(raw.read(tensor.size))
        assert contents[0] == contents[1]


def test_as_bf16_it_becomes_the_other_pinned_file_without_a_quantized_tensor(
    source_model: Path, library: Library, tmp_path: Path
) -> None:
    made = prepare_model(source_model, tmp_path, weights="bf16")
    assert made.sha256 == definitions.CONVERTED_SHA256["bf16"]
    assert "BF16" in made.path.name
    with GgufFile(library, source_model) as before, GgufFile(library, made.path) as after:
        after.check_complete()
        assert {tensor.type for tensor in after.tensors} == {definitions.TYPE_BF16, definitions.TYPE_F32}
        for name in ("token_embd.weight", "blk.3.ffn_up.weight"):
            expected, found = (values_of(library, file, name) for file in (before, after))
            assert np.abs(expected - found).max() <= np.abs(expected).max() * 2.0**-8


def values_of(library: Library, file: GgufFile, name: str) -> np.ndarray:
    """A tensor's first row in single precision."""
    tensor = next(tensor for tensor in file.tensors if tensor.name == name)
    count = tensor.shape[0]
    with file.path.open("rb") as raw:
        raw.seek(file.data_offset + tensor.offset)
        packed = raw.read(library.api.ggml_row_size(tensor.type, count))
    if tensor.type == definitions.TYPE_BF16:
        return (np.frombuffer(packed, np.uint16).astype(np.uint32) << 16).view(np.float32)
    values = np.empty(count, np.float32)
    is_q8_0 = tensor.type == definitions.TYPE_Q8_0
    widen = library.api.dequantize_row_q8_0 if is_q8_0 else library.api.dequantize_row_q4_1
    widen(library.ffi.from_buffer(packed), library.ffi.cast("float *", values.ctypes.data), count)
    return values


def test_weights_are_what_the_library_and_the_setting_ask_for(
    source_model: Path, library: Library, tmp_path: Path
) -> None:
    with GgufFile(library, source_model) as source:
        fast = Build(path=tmp_path, name="", sha256="", has_wide_kernels=True, multiplies_bf16=True)
        for build, weights, expected in (
            (
                library.build,
                "auto",
                definitions.TYPE_BF16 if library.build.multiplies_bf16 else definitions.TYPE_Q8_0,
            ),
            (fast, "auto", definitions.TYPE_BF16),
            (fast, "q8_0", definitions.TYPE_Q8_0),
            (library.build, "bf16", definitions.TYPE_BF16),
        ):
            assert convert._target_type(source, build, weights) == expected
    made = prepare_model(source_model, tmp_path, weights="q8_0")
    with GgufFile(library, made.path) as other:
        # What is Q8_0 was made so on purpose; only who asks for it gets it rewritten.
        assert convert._target_type(other, fast, "auto") is None
        assert convert._target_type(other, fast, "q8_0") is None
        assert convert._target_type(other, fast, "bf16") == definitions.TYPE_BF16


def test_auto_leaves_large_models_small(
    source_model: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "BF16_PARAMETERS_MAX", 100_000_000)
    fast = Build(path=source_model, name="", sha256="", has_wide_kernels=True, multiplies_bf16=True)
    with GgufFile(library, source_model) as source:
        assert convert._target_type(source, fast, "auto") == definitions.TYPE_Q8_0


def test_a_second_start_uses_the_file_that_is_there(prepared: PreparedModel, source_model: Path) -> None:
    before = prepared.path.stat()
    again = prepare_model(source_model, prepared.path.parent)
    assert again.was_reused
    assert (again.path, again.sha256) == (prepared.path, prepared.sha256)
    assert prepared.path.stat().st_ino == before.st_ino


def test_a_damaged_file_is_made_anew_and_progress_is_told(
    prepared: PreparedModel, source_model: Path, tmp_path: Path
) -> None:
    for path in prepared.path.parent.iterdir():
        shutil.copy(path, tmp_path / path.name)
    damaged = tmp_path / prepared.path.name
    with damaged.open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"damage")
    progress: list[float] = []
    repaired = prepare_model(source_model, tmp_path, on_progress=progress.append)
    assert not repaired.was_reused
    assert sha256(damaged) == prepared.sha256
    assert progress == sorted(progress)
    assert progress[-1] == 1.0


def test_another_quantization_is_used_as_it_is(prepared: PreparedModel, tmp_path: Path) -> None:
    result = prepare_model(prepared.path, tmp_path)
    assert result == PreparedModel(
        path=prepared.path, was_converted=False, was_reused=False, source_sha256=None, sha256=None
    )
    assert not list(tmp_path.iterdir())


def test_a_source_with_values_that_are_no_numbers_is_refused_and_leaves_nothing(
    source_model: Path, library: Library, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    shutil.copy(source_model, broken)
    with GgufFile(library, broken) as file:
        tensor = next(file.tensors_of_type(definitions.TYPE_Q4_1))
        place = file.data_offset + tensor.offset
    with broken.open("r+b") as raw:
        raw.seek(place)
        raw.write(b"\xff" * 40)
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="no numbers"):
        prepare_model(broken, cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_an_unusable_cache_directory_is_a_model_error(source_model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("not a directory")
    with pytest.raises(ModelError, match="cannot be written") as caught:
        prepare_model(source_model, blocked)
    assert "another cache directory" in str(caught.value)


def test_a_full_disk_is_a_model_error_and_leaves_no_part(tmp_path: Path) -> None:
    def make(path: Path) -> str:
        path.write_bytes(b"half a mod")
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = ModelCache(tmp_path, "model.gguf")
    with pytest.raises(ModelError, match="No space left on device"):
        cache.obtain(sha256, make)
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf.lock"}


def test_what_a_dead_maker_left_behind_is_removed(tmp_path: Path) -> None:
    (tmp_path / "model.gguf.unfinished").write_bytes(b"half")
    cache = ModelCache(tmp_path, "model.gguf")
    digest, was_there = cache.obtain(sha256, write_hello)
    assert not was_there
    assert digest == sha256(cache.path)
    assert not (tmp_path / "model.gguf.unfinished").exists()


def test_a_file_without_its_digest_is_made_anew(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, "model.gguf")
    cache.path.write_bytes(b"who knows")
    assert cache.obtain(sha256, write_hello) == (hashlib.sha256(b"hello").hexdigest(), False)


def test_of_many_makers_at_once_one_makes_it(tmp_path: Path) -> None:
    made: list[Path] = []
    results: list[tuple[str, bool]] = []

    def make(path: Path) -> str:
        made.append(path)
        return write_hello(path)

    def obtain() -> None:
        results.append(ModelCache(tmp_path, "model.gguf").obtain(sha256, make))

    threads = [threading.Thread(target=obtain) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert sorted(was_there for _, was_there in results) == [False] + [True] * 7


def test_a_missing_source_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        prepare_model(tmp_path / "none.gguf", tmp_path / "cache")
    with pytest.raises(ModelError, match="cannot be read"):
        convert.file_sha256(tmp_path / "none.gguf")
