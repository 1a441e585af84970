"""Compiles the llama.cpp of the pinned package for the processor at hand; about a minute and a half on two cores.

    source package (pinned by version and SHA-256) ──▶ static archives ──▶ one shared library ──▶ checked ──▶ in place

The package is the one whose wheel headrace embeds, so declarations and layouts are the same; they are checked against the
result all the same, in a process of its own, before it takes the place of one that was there.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.engine.llama import definitions, preflight
from headrace.engine.llama.builds import (
    MANIFEST,
    NATIVE_FILE,
    Build,
    Manifest,
    find_native,
    instructions_of,
)
from headrace.errors import PlatformError

Say = Callable[[str], None]

ARCHIVE: Final = f"{definitions.PACKAGE}-{definitions.PACKAGE_VERSION}.tar.gz"
_SOURCE: Final = f"{definitions.PACKAGE}-{definitions.PACKAGE_VERSION}/thirdparty/llama.cpp"
_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_POSITION_INDEPENDENT_CODE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DGGML_OPENMP=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
)
_ARCHIVES: Final = (
    "src/libllama.a",
    "ggml/src/libggml.a",
    "ggml/src/libggml-cpu.a",
    "ggml/src/libggml-base.a",
)
_SAID_CHARACTERS_MAX: Final = 3_000
"""Of the end of what a tool said that failed."""
_CHECK = (
    "import sys; from pathlib import Path;"
    "from headrace.engine.llama.builds import find_native; from headrace.engine.llama.library import Library;"
    "Library(find_native(Path(sys.argv[1])))"
)


def compile_native(
    directory: Path, *, source: Path | None = None, jobs: int | None = None, say: Say
) -> Build:
    """Compile the library and put it into `directory`, in place of what was there.

    `source`: the package's source archive; None fetches it with pip. `jobs`: compilers at once; None: one for each core.
    Raises `PlatformError` with what has to change; then nothing has been replaced.
    """
    preflight.check_platform(sys.platform, platform.machine())
    preflight.check_openmp()
    compiler = _tool("c++", "g++", "clang++")
    cmake = _tool("cmake")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headrace-engine-", dir=directory.parent) as scratch:
        place = Path(scratch)
        archive = source if source is not None else _fetch(place, say)
        preflight.check_digest(archive, definitions.SOURCE_SHA256)
        say(f"compiling for this processor with {compiler}; this takes minutes")
        library = _compile(_unpack(archive, place), place, cmake=cmake, compiler=compiler, jobs=jobs)
        made = place / "made"
        made.mkdir()
        library.rename(made / NATIVE_FILE)
        with (made / NATIVE_FILE).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        manifest = Manifest(
            package_version=definitions.PACKAGE_VERSION,
            source_sha256=definitions.SOURCE_SHA256,
            library_sha256=sha256,
            instructions=instructions_of(preflight.processor_flags()),
            compiler=_first_line(_run([compiler, "--version"], place)),
        )
        (made / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        say("checking its functions, structs and defaults")
        _run([sys.executable, "-c", _CHECK, str(made)], place)
        _replace(directory, made, place)
    return find_native(directory)


def _tool(*names: str) -> str:
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise PlatformError(
        f"Compiling needs {names[0]}, which is not installed. Debian and Ubuntu: apt install cmake g++. "
        "Fedora and RHEL: dnf install cmake gcc-c++."
    )


def _fetch(place: Path, say: Say) -> Path:
    """The source package, fetched the way the wheel was. pip compares its SHA-256 before it looks into it."""
    say(f"fetching the source of {definitions.PACKAGE} {definitions.PACKAGE_VERSION} (38 MB)")
    wanted = place / "wanted.txt"
    wanted.write_text(
        f"{definitions.PACKAGE}=={definitions.PACKAGE_VERSION} --hash=sha256:{definitions.SOURCE_SHA256}\n"
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--require-hashes", "--no-deps", "--no-binary", definitions.PACKAGE]
    try:
        _run([*command, "--dest", str(place), "--requirement", str(wanted)], place)
    except PlatformError as error:
        raise PlatformError(
            f"{error}\nWithout a package index: get {ARCHIVE} elsewhere and name it with --source."
        ) from error
    return place / ARCHIVE


def _unpack(archive: Path, place: Path) -> Path:
    with tarfile.open(archive) as packed:
        members = [one for one in packed.getmembers() if one.name.startswith(f"{_SOURCE}/")]
        packed.extractall(place / "source", members, filter="data")
    return place / "source" / _SOURCE


def _compile(source: Path, place: Path, *, cmake: str, compiler: str, jobs: int | None) -> Path:
    build = place / "build"
    cores = len(os.sched_getaffinity(0))
    options = (*_OPTIONS, f"-DCMAKE_CXX_COMPILER={compiler}")
    _run([cmake, "-S", str(source), "-B", str(build), *options], place)
    _run([cmake, "--build", str(build), "--target", "llama", "--parallel", str(jobs or cores)], place)
    library = place / NATIVE_FILE
    archives = [str(build / one) for one in _ARCHIVES]
    whole = ["-Wl,--whole-archive", *archives, "-Wl,--no-whole-archive"]
    # `now`: what is missing is said here, and not in the middle of a request.
    end = ["-fopenmp", "-pthread", "-ldl", "-lm", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,--strip-debug"]
    _run([compiler, "-shared", "-o", str(library), *whole, *end], place)
    return library


def _run(command: Sequence[str], place: Path) -> str:
    """What a tool said. Raises `PlatformError` with the end of that if it failed."""
    done = subprocess.run(  # noqa: S603 -- the commands of this module, none from outside
        command,
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise PlatformError(
            f"{Path(command[0]).name} failed ({done.returncode}):\n{done.stdout[-_SAID_CHARACTERS_MAX:].strip()}"
        )
    return done.stdout


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _replace(directory: Path, made: Path, place: Path) -> None:
    """Put `made` where `directory` is. Who has the old library open goes on with it."""
    if directory.exists():
        directory.rename(place / "old")
    made.rename(directory)
