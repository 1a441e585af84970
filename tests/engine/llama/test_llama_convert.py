"""A model file is converted once, correctly, and only when that is worthwhile."""

import errno
import hashlib
import shutil
import threading
from pathlib import Path

import pytest

from headrace.engine.llama import PreparedModel, convert, definitions, prepare_model
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
    assert prepared.sha256 == definitions.CONVERTED_SHA256
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
