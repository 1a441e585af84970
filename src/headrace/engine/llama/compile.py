"""Compiles the llama.cpp of the pinned package for the processor at hand; about a minute and a half on two cores.

    source package (pinned by version and SHA-256) ──▶ static archives ─┐
    kernels of ours (`native/`) ─────────────────────▶ objects ─────────┴▶ one shared library ──▶ checked ──▶ in place

The kernels stand in front of functions of llama.cpp: the linker gives them the calls (`--wrap`), and they hand on what is not
theirs. Nothing of its source is changed.

The package is the one whose wheel headrace embeds, so declarations and layouts are the same; they are checked against the
result all the same, in a process of its own, before it takes the place of one that was there.

Libraries lie in the directory under names of their own; the manifest says which one counts and is replaced in one step. So
whoever starts meanwhile finds either, and a build that is stopped anywhere leaves what was there.
"""

import contextlib
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.engine.llama import definitions, preflight
from headrace.engine.llama.builds import (
    KERNELS,
    MANIFEST,
    RECIPE,
    Build,
    Kernel,
    Manifest,
    find_native,
    instructions_of,
    kernels_digest,
)
from headrace.engine.llama.memory import available_bytes
from headrace.errors import PlatformError

Say = Callable[[str], None]

ARCHIVE: Final = f"{definitions.PACKAGE}-{definitions.PACKAGE_VERSION}.tar.gz"
_SOURCE: Final = f"{definitions.PACKAGE}-{definitions.PACKAGE_VERSION}/thirdparty/llama.cpp"
# Whoever changes these lets `RECIPE` grow.
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
_WRAPPED: Final = ("llamafile_sgemm", "ggml_compute_forward_flash_attn_ext")
_KERNEL_OPTIONS: Final = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-DNDEBUG")
_WIDE: Final = frozenset({"__AVX512F__", "__AVX512BW__", "__AVX512DQ__", "__F16C__"})
_KERNEL_NEEDS: Final[dict[Kernel, frozenset[str]]] = {
    "attention": _WIDE,
    "bf16": _WIDE | {"__AVX512BF16__"},
    "q8_0": _WIDE | {"__AVX512VNNI__", "__AVX512VL__"},
}
_LINKED: Final = ("-fopenmp", "-pthread", "-ldl", "-lm", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,--strip-debug")
"""With what is missing said at once (`defs`, `now`), and not in the middle of a request."""
_KEPT_VARIABLES: Final = re.compile(
    r"PATH|HOME|USER|LANG|LC_.*|TMPDIR|LD_LIBRARY_PATH|PIP_.*|(?i:.*_proxy)|SSL_CERT_.*"
)
"""What the tools get of the environment: nothing that would change what is compiled, or for which processor."""
_BUILD_TOOLS: Final = """\
setuptools==84.2.1
cython==3.3.1
versioneer==0.29
"""
"""pip runs the package's own build script to learn what it is, with these."""
_COMPILER_BYTES: Final = 2 << 30
"""Memory that one compiler may take."""
_SAID_CHARACTERS_MAX: Final = 3_000
"""Of the end of what a tool said that failed."""
_SCRATCH: Final = "headrace-engine-"
_CHECK: Final = """
import sys
from pathlib import Path
from headrace.engine.llama.builds import find_native
from headrace.engine.llama.library import Library
from headrace.errors import PlatformError
try:
    Library(find_native(Path(sys.argv[1])))
except PlatformError as error:
    sys.exit(str(error))
"""


def compile_native(
    directory: Path, *, source: Path | None = None, jobs: int | None = None, say: Say
) -> Build:
    """Compile the library and put it into `directory`, in place of what was there.

    `source`: the package's source archive; None fetches it with pip. `jobs`: compilers at once; None: one for each core,
    as far as there is memory. Raises `PlatformError` with what has to change, `OSError` where `directory` cannot be
    written; then nothing has been replaced.
    """
    preflight.check_base(sys.platform, platform.machine())
    tools = {name: _tool(name) for name in ("cmake", "make", "gcc", "g++")}
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    with _alone(directory), tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
        place = Path(scratch)
        archive = source if source is not None else _fetch(place, say)
        if (found := preflight.digest(archive)) != definitions.SOURCE_SHA256:
            raise PlatformError(
                f"{archive} is not the source package {ARCHIVE}: SHA-256 {found}, not {definitions.SOURCE_SHA256}."
            )
        say(f"compiling for this processor with {tools['g++']}; this takes minutes")
        made = place / "made"
        made.mkdir()
        library = made / "library.so"
        # A copy: what is compiled is what is described, whoever saves a file meanwhile.
        kernels = shutil.copytree(KERNELS, place / "kernels")
        _compile(_unpack(archive, place), kernels, library, place, tools, jobs=jobs)
        manifest = _describe(library, kernels, place, tools["g++"])
        library = library.rename(made / manifest.library)
        library.chmod(0o755)
        noted = made / MANIFEST
        noted.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        noted.chmod(0o644)
        say("checking its functions, structs and defaults")
        _run([sys.executable, "-c", _CHECK, str(made)], place)
        _put(directory, library, noted)
    return find_native(directory)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One at a time. What one left behind that was killed goes."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlatformError(f"Another build is under way in {directory}.") from None
        for left in directory.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PlatformError(
            f"Compiling needs {name}, which is not installed. Debian and Ubuntu: apt install cmake make g++. "
            "Fedora and RHEL: dnf install cmake make gcc-c++."
        )
    return found


def _fetch(place: Path, say: Say) -> Path:
    """The source package, fetched the way the wheel was. pip compares its SHA-256 before it looks into it."""
    say(f"fetching the source of {definitions.PACKAGE} {definitions.PACKAGE_VERSION} (38 MB)")
    wanted, build_tools = place / "wanted.txt", place / "build-tools.txt"
    wanted.write_text(
        f"{definitions.PACKAGE}=={definitions.PACKAGE_VERSION} --hash=sha256:{definitions.SOURCE_SHA256}\n"
    )
    build_tools.write_text(_BUILD_TOOLS)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--require-hashes", "--no-deps", "--no-binary", definitions.PACKAGE]
    try:
        _run(
            [*command, "--dest", str(place), "--requirement", str(wanted)],
            place,
            PIP_CONSTRAINT=str(build_tools),
            PIP_BUILD_CONSTRAINT=str(build_tools),
        )
    except PlatformError as error:
        raise PlatformError(
            f"{error}\nWithout a package index: get {ARCHIVE} elsewhere and name it with --source."
        ) from error
    return place / ARCHIVE


def _unpack(archive: Path, place: Path) -> Path:
    with tarfile.open(archive) as packed:
        # Python 3.11 has had the filter since 3.11.4. The archive is known to the last bit in any case.
        if hasattr(tarfile, "data_filter"):
            packed.extraction_filter = tarfile.data_filter
        members = [one for one in packed.getmembers() if one.name.startswith(f"{_SOURCE}/")]
        packed.extractall(place / "source", members)  # noqa: S202 -- a pinned archive
    return place / "source" / _SOURCE


def _compile(
    source: Path, copied: Path, library: Path, place: Path, tools: dict[str, str], *, jobs: int | None
) -> None:
    build = place / "build"
    at_once = jobs or max(1, min(len(os.sched_getaffinity(0)), available_bytes() // _COMPILER_BYTES))
    # Without the paths of this place in it, the same compiler makes the same library again.
    no_paths = f"-ffile-prefix-map={place}=."
    chosen = (
        f"-DCMAKE_C_COMPILER={tools['gcc']}",
        f"-DCMAKE_CXX_COMPILER={tools['g++']}",
        f"-DCMAKE_C_FLAGS={no_paths}",
        f"-DCMAKE_CXX_FLAGS={no_paths}",
    )
    generator = ("-G", "Unix Makefiles")
    _run([tools["cmake"], *generator, "-S", str(source), "-B", str(build), *_OPTIONS, *chosen], place)
    _run([tools["cmake"], "--build", str(build), "--target", "llama", "--parallel", str(at_once)], place)
    kernels = _compile_kernels(source, copied, tools["g++"], no_paths)
    whole = ["-Wl,--whole-archive", *(str(build / one) for one in _ARCHIVES), "-Wl,--no-whole-archive"]
    wrapped = [f"-Wl,--wrap={name}" for name in _WRAPPED]
    _run([tools["g++"], "-shared", "-o", str(library), *kernels, *whole, *wrapped, *_LINKED], place)


def _compile_kernels(source: Path, place: Path, compiler: str, no_paths: str) -> list[str]:
    """The objects of our kernels, whose sources are in `place`."""
    ggml = source / "ggml"
    included = [f"-I{one}" for one in (ggml / "include", ggml / "src", ggml / "src" / "ggml-cpu")]
    objects = []
    for one in sorted(place.glob("*.cpp")):
        objects.append(str(one.with_suffix(".o")))
        _run([compiler, *_KERNEL_OPTIONS, no_paths, *included, "-c", str(one), "-o", objects[-1]], place)
    return objects


def _describe(library: Path, kernels: Path, place: Path, compiler: str) -> Manifest:
    sha256 = preflight.digest(library)
    # What the compiler knows of the processor, which may be less than the processor has.
    macros = set(_run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull], place).split())
    return Manifest(
        recipe=RECIPE,
        package_version=definitions.PACKAGE_VERSION,
        library=f"libheadrace-llama-{sha256[:16]}.so",
        library_sha256=sha256,
        instructions=instructions_of(preflight.processor_flags()),
        kernels_sha256=kernels_digest(kernels),
        kernels=_kernels_for(macros),
        compiler=_run([compiler, "--version"], place).strip().split("\n", 1)[0],
    )


def _kernels_for(macros: set[str]) -> list[Kernel]:
    """Those of ours that are compiled for a processor, by what a compiler says of it: the conditions in the sources."""
    kernels = [kernel for kernel, needs in _KERNEL_NEEDS.items() if macros >= needs]
    # With AMX ggml keeps Q8_0 weights in a form of its own.
    return [kernel for kernel in kernels if kernel != "q8_0" or "__AMX_INT8__" not in macros]


def _run(command: Sequence[str], place: Path, **variables: str) -> str:
    """What a tool said. Raises `PlatformError` with the end of that if it failed."""
    environment = {name: value for name, value in os.environ.items() if _KEPT_VARIABLES.fullmatch(name)}
    done = subprocess.run(  # noqa: S603 -- the commands of this module, none from outside
        command,
        cwd=place,
        env=environment | variables,
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


def _put(directory: Path, library: Path, manifest: Path) -> None:
    """Let this library be the one that counts. The one before stays for those who are just starting with it."""
    before = set(directory.glob("*.so"))
    latest = max(before, key=lambda path: path.stat().st_mtime, default=None)
    for path in (library, manifest):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    library.replace(directory / library.name)
    manifest.replace(directory / manifest.name)
    for path in before - {latest, directory / library.name}:
        path.unlink()
