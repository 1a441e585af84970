"""A library that was compiled here is used where it is what it should be and this processor can run it; else not, with a
reason."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.engine.llama import compile as compiling
from headrace.engine.llama import definitions, preflight
from headrace.engine.llama.builds import (
    KERNELS,
    MANIFEST,
    RECIPE,
    Build,
    Kernel,
    Manifest,
    find_build,
    find_native,
    instructions_of,
    kernels_digest,
)
from headrace.engine.llama.compile import compile_native
from headrace.engine.llama.kernels import GGML, WIDE, WIDE_BF16, WIDE_Q8_0, kernels_of
from headrace.engine.llama.library import Library
from headrace.errors import PlatformError
from tests.engine.llama.chosen import LIBRARY

Q8_0 = definitions.FILE_TYPE_BY_TENSOR_TYPE[definitions.TYPE_Q8_0]
BF16 = definitions.FILE_TYPE_BY_TENSOR_TYPE[definitions.TYPE_BF16]


FILE = "libheadrace-llama-0.so"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The wheel's library under a manifest, as if it had been compiled here."""
    made = tmp_path / "engine"
    made.mkdir()
    shutil.copy(preflight.find_library(), made / FILE)
    describe(made)
    return made


def describe(directory: Path, **changes: Any) -> None:
    facts: dict[str, Any] = {
        "recipe": RECIPE,
        "package_version": definitions.PACKAGE_VERSION,
        "library": FILE,
        "library_sha256": hashlib.sha256((directory / FILE).read_bytes()).hexdigest(),
        "instructions": list(definitions.PROCESSOR_FLAGS),
        "kernels_sha256": kernels_digest(KERNELS),
        "kernels": [],
        "compiler": "g++ 12",
    }
    (directory / MANIFEST).write_bytes(msgspec.json.encode(Manifest(**(facts | changes))))


def test_a_library_that_fits_is_loaded(directory: Path) -> None:
    build = find_native(directory)
    assert build.path == directory / FILE
    assert "compiled here" in build.name
    # In a process of its own: what the library was given to call back must outlive it.
    command = [sys.executable, "-c", compiling._CHECK, str(directory)]
    assert subprocess.run(command, check=False).returncode == 0


def test_none_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(
        PlatformError, match=r"no library compiled for this machine.*headrace engine build.*library: wheel"
    ):
        find_native(tmp_path)


def test_one_of_another_version_is_refused(directory: Path) -> None:
    describe(directory, package_version="2026.1.1")
    with pytest.raises(PlatformError, match=rf"xllamacpp 2026.1.1 .*{definitions.PACKAGE_VERSION}"):
        find_native(directory)


def test_one_that_was_compiled_in_another_way_is_refused(directory: Path) -> None:
    describe(directory, recipe=RECIPE - 1)
    with pytest.raises(
        PlatformError, match=rf"recipe {RECIPE - 1}\).*recipe {RECIPE}\).*headrace engine build"
    ):
        find_native(directory)


def test_one_with_other_kernels_of_ours_is_refused(directory: Path) -> None:
    describe(directory, kernels_sha256="0" * 64)
    with pytest.raises(
        PlatformError, match=r"compiled with other kernels of headrace.*headrace engine build"
    ):
        find_native(directory)


def test_only_sources_count_as_kernels(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(KERNELS, tmp_path / "native"))
    (copied / "__pycache__").mkdir()
    (copied / "matmul.cpp~").write_text("// being edited")
    assert kernels_digest(copied) == kernels_digest(KERNELS)
    (copied / "tiles.h").write_text("// other")
    assert kernels_digest(copied) != kernels_digest(KERNELS)
    with pytest.raises(PlatformError, match="cannot be read: No such file"):
        kernels_digest(tmp_path / "none")


def test_kernels_go_by_what_the_compiler_says_of_the_processor() -> None:
    wide = {"__AVX512F__", "__AVX512BW__", "__AVX512DQ__", "__F16C__"}
    vnni = {"__AVX512VNNI__", "__AVX512VL__"}
    assert compiling._kernels_for({"__AVX2__", "__F16C__"}) == []
    assert compiling._kernels_for(wide) == ["attention"]
    assert compiling._kernels_for(wide | vnni | {"__AVX512BF16__"}) == ["attention", "bf16", "q8_0"]
    assert compiling._kernels_for(wide | vnni | {"__AMX_INT8__"}) == ["attention"]


def test_no_file_outside_of_the_directory_is_loaded(directory: Path) -> None:
    shutil.copy(directory / FILE, directory.parent / FILE)
    describe(directory, library=f"../{FILE}")
    with pytest.raises(PlatformError, match="is not what was written"):
        find_native(directory)


def test_one_for_a_processor_that_has_more_is_refused_before_it_is_loaded(directory: Path) -> None:
    describe(directory, instructions=["avx2", "fma", "bmi2", "avx1024f", "amx_fp64"])
    with pytest.raises(PlatformError, match=r"also has AMX_FP64, AVX1024F"):
        find_native(directory)


def test_a_manifest_without_a_processor_is_refused(directory: Path) -> None:
    describe(directory, instructions=["avx2"])
    with pytest.raises(PlatformError, match="no processor is named"):
        find_native(directory)


def test_a_manifest_that_may_not_be_read_says_so_and_does_not_advise_to_build(directory: Path) -> None:
    (directory / MANIFEST).unlink()
    (directory / MANIFEST).mkdir()
    with pytest.raises(PlatformError, match=r"cannot be read: Is a directory\.$"):
        find_native(directory)


def test_a_changed_library_is_refused(directory: Path) -> None:
    with (directory / FILE).open("ab") as file:
        file.write(b"!")
    with pytest.raises(
        PlatformError, match=r"was changed since it was compiled: SHA-256.*headrace engine build"
    ):
        find_native(directory)


@pytest.mark.parametrize("text", [b"", b"{", b'{"package_version": 7}', b'{"unknown": true}'])
def test_a_manifest_that_is_none_is_refused(directory: Path, text: bytes) -> None:
    (directory / MANIFEST).write_bytes(text)
    with pytest.raises(PlatformError, match=r"build\.json is not what was written.*headrace engine build"):
        find_native(directory)


def test_only_flags_that_name_instructions_count() -> None:
    flags = frozenset(
        {"fpu", "avx2", "avx512_bf16", "fma", "constant_tsc", "hypervisor", "sse4_2", "amx_tile", "nopl"}
    )
    assert instructions_of(flags) == ["amx_tile", "avx2", "avx512_bf16", "fma", "sse4_2"]


def a_build(*kernels: Kernel) -> Build:
    return Build(path=Path("x"), name="x", sha256="", kernels=frozenset(kernels))


def test_kernels_follow_the_build_and_the_weights() -> None:
    best = a_build("attention", "bf16", "q8_0")
    assert kernels_of(best, BF16, threads=1) == WIDE_BF16
    assert kernels_of(best, Q8_0, threads=1) == WIDE_Q8_0
    assert kernels_of(a_build("attention"), BF16, threads=1) == WIDE
    assert kernels_of(a_build("attention", "bf16"), Q8_0, threads=1).single_rows_max == 4
    assert kernels_of(a_build(), BF16, threads=1) == GGML
    assert kernels_of(a_build(), Q8_0, threads=2) == GGML
    assert kernels_of(a_build(), Q8_0, threads=1) == msgspec.structs.replace(GGML, single_rows_max=4)


# --- compiling ------------------------------------------------------------------------------------------


def nothing(_line: str) -> None:
    pass


def test_another_source_is_not_unpacked(tmp_path: Path) -> None:
    source = tmp_path / "source.tar.gz"
    with tarfile.open(source, "w:gz"):
        pass
    with pytest.raises(PlatformError, match=rf"is not the source package {compiling.ARCHIVE}: SHA-256"):
        compile_native(tmp_path / "engine", source=source, say=nothing)
    assert [path.name for path in (tmp_path / "engine").iterdir()] == [".lock"]


def test_a_machine_without_tools_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlatformError, match=r"needs cmake.*apt install cmake make g\+\+"):
        compile_native(tmp_path / "engine", say=nothing)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a source package whose only file is this CMakeLists.txt, and takes it for the pinned one."""

    def make(text: str) -> Path:
        folder = tmp_path / "packed" / compiling._SOURCE
        folder.mkdir(parents=True)
        (folder / "CMakeLists.txt").write_text(text)
        path = tmp_path / "source.tar.gz"
        with tarfile.open(path, "w:gz") as packed:
            packed.add(
                tmp_path / "packed" / compiling._SOURCE.split("/", 1)[0], compiling._SOURCE.split("/", 1)[0]
            )
        monkeypatch.setattr(definitions, "SOURCE_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
        return path

    return make


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None, reason="needs cmake and g++"
)
def test_what_the_compiler_says_is_shown_and_the_old_library_stays(
    directory: Path, source: Callable[[str], Path]
) -> None:
    before = find_native(directory)
    package = source(
        'cmake_minimum_required(VERSION 3.14)\nproject(x CXX)\nmessage(FATAL_ERROR "no such luck")\n'
    )
    with pytest.raises(PlatformError, match=r"cmake failed \(1\)(?s:.*)no such luck"):
        compile_native(directory, source=package, say=nothing)
    assert find_native(directory) == before
    assert sorted(path.name for path in directory.iterdir()) == [".lock", MANIFEST, FILE]


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None, reason="needs cmake and g++"
)
def test_a_library_that_lacks_functions_does_not_take_the_old_ones_place(
    directory: Path, source: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = find_native(directory)
    parts = "\n".join(
        f"add_library({name} STATIC x.cpp)\n"
        f"set_target_properties({name} PROPERTIES ARCHIVE_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}}/{folder})"
        for name, folder in (("ggml", "ggml/src"), ("ggml-cpu", "ggml/src"), ("ggml-base", "ggml/src"))
    )
    package = source(
        "cmake_minimum_required(VERSION 3.14)\nproject(x CXX)\n"
        f'file(WRITE ${{CMAKE_CURRENT_SOURCE_DIR}}/x.cpp "")\n{parts}\nadd_library(llama STATIC x.cpp)\n'
        "set_target_properties(llama PROPERTIES ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/src)\n"
        "add_dependencies(llama ggml ggml-cpu ggml-base)\n"
    )
    # Ours cannot be compiled without the rest of that source.
    monkeypatch.setattr(compiling, "_compile_kernels", lambda *_: [])
    with pytest.raises(PlatformError, match="lacks functions headrace calls") as caught:
        compile_native(directory, source=package, say=nothing)
    assert "Traceback" not in str(caught.value)
    assert find_native(directory) == before
    assert sorted(path.name for path in directory.iterdir()) == [".lock", MANIFEST, FILE]


def test_two_builds_do_not_get_in_each_others_way(directory: Path) -> None:
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PlatformError, match="Another build is under way"):
            compile_native(directory, say=nothing)


def test_what_a_killed_build_left_goes(directory: Path, tmp_path: Path) -> None:
    left = directory / "headrace-engine-abc"
    left.mkdir()
    (left / "file").write_text("x")
    with pytest.raises(PlatformError, match="cannot be read"):
        compile_native(directory, source=tmp_path / "nothing", say=nothing)
    assert not left.exists()


def test_the_new_one_counts_and_the_one_before_stays_for_who_is_just_starting(
    directory: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    for number in range(1, 4):
        made.mkdir()
        library = made / f"libheadrace-llama-{number}.so"
        library.write_bytes(bytes([number]))
        os.utime(library, (number, number + 2**31))
        (made / MANIFEST).write_text(str(number))
        compiling._put(directory, library, made / MANIFEST)
        assert (directory / MANIFEST).read_text() == str(number)
        shutil.rmtree(made)
    assert sorted(path.name for path in directory.glob("*.so")) == [
        "libheadrace-llama-2.so",
        "libheadrace-llama-3.so",
    ]


@pytest.mark.skipif(LIBRARY != "native", reason="only where one was compiled: make test-native")
def test_the_one_compiled_here_passes_and_is_another_than_the_wheels(library: Library) -> None:
    build = find_build("native")
    assert build.sha256 != find_build("wheel").sha256
    assert library.build == build
