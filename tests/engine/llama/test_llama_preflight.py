"""Machines and library files that are not the verified ones are refused with a reason."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.llama import definitions, preflight
from headrace.errors import PlatformError


def test_this_machine_passes_and_names_the_wheels_library() -> None:
    path = preflight.check_this_machine()
    assert path.name == definitions.LIBRARY_FILE
    assert path.parent.name == definitions.PACKAGE


@pytest.mark.parametrize(
    ("system", "machine", "words"),
    [
        ("linux", "aarch64", "not verified with this build on linux aarch64"),
        ("darwin", "arm64", "not verified with this build on darwin arm64"),
        ("win32", "AMD64", "does not run on Windows"),
    ],
)
def test_other_platforms_are_refused(system: str, machine: str, words: str) -> None:
    with pytest.raises(PlatformError, match=words) as caught:
        preflight.check_platform(system, machine)
    assert "llama-cpp-python) is not available yet" in str(caught.value)


def test_missing_instruction_sets_are_named() -> None:
    with pytest.raises(PlatformError, match=r"FMA, BMI2"):
        preflight.check_processor("processor : 0\nflags\t\t: fpu sse4_2 avx avx2\n")


def test_a_processor_with_all_instruction_sets_passes() -> None:
    preflight.check_processor("flags\t\t: fpu avx2 fma bmi2\n")


def test_missing_openmp_names_the_package_to_install() -> None:
    with pytest.raises(PlatformError, match="libgomp1"):
        preflight.check_openmp("libgomp-of-nowhere.so.1")


def test_openmp_of_this_machine_is_found() -> None:
    preflight.check_openmp()


@pytest.mark.parametrize("version", [None, "2026.11.1", "2026.10.11550"])
def test_other_versions_are_refused_naming_the_pinned_one(version: str | None) -> None:
    with pytest.raises(PlatformError, match=definitions.PACKAGE_VERSION):
        preflight.check_version(version)


def test_a_changed_library_file_is_refused(tmp_path: Path) -> None:
    changed = tmp_path / "library.so"
    changed.write_bytes(b"something else")
    with pytest.raises(PlatformError, match="not the verified build: SHA-256"):
        preflight.check_digest(changed, "0" * 64)


def test_a_missing_library_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="cannot be read"):
        preflight.check_digest(tmp_path / "nothing.so", "0" * 64)


def test_finding_the_library_does_not_import_the_package() -> None:
    code = (
        "import sys; from headrace.engine.llama.library import open_library; open_library('wheel');"
        "sys.exit('xllamacpp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
