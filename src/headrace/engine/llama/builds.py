"""Which library computes: the one in the pinned wheel, or one that was compiled here for this very processor.

The wheel's runs on any x86-64 processor with AVX2, and therefore uses nothing newer. `headrace engine build`
(`headrace.engine.llama.compile`) compiles the same source with everything this processor has. Its answers differ in the
last bits, as between any two kernels, so which one is used is a setting and never chosen by what happens to be there.
"""

import hashlib
import platform
import re
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from headrace.config.settings import EngineLibrary
from headrace.engine.llama import definitions, preflight
from headrace.errors import PlatformError

MANIFEST: Final = "build.json"
RECIPE: Final = 3
"""Grows when the way a library is compiled changes: one that was compiled in another way has to be made anew."""
Kernel = Literal["attention", "bf16", "q8_0"]
"""Flash attention, and products with weights of a type."""
KERNELS: Final = Path(__file__).with_name("native")
"""Sources of ours that are linked in front of llama.cpp's own. Whoever changes them has to compile anew."""
Q8_0_FLAGS: Final = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "f16c"})
"""A processor with these, as /proc/cpuinfo spells them, runs the one for Q8_0 weights."""
_MAKE_IT: Final = "'headrace engine build' makes one; 'library: wheel' does without."
_INSTRUCTIONS: Final = re.compile(
    r"avx|amx|apx|xop|tbm|s?sse|fma|f16c|bmi|gfni|v?aes|v?pclmul|movbe|movdir|popcnt|abm|adx|sha_ni"
)
"""Flags of /proc/cpuinfo that name instructions a compiler may use when it is told to use all there are."""


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """A library that may be loaded: it is what it should be, and this processor can run it."""

    path: Path
    name: str
    """Of the library and where it comes from, for people."""
    sha256: str
    kernels: frozenset[Kernel] = frozenset()
    """Those of ours that this processor can run (`native/`)."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written beside a library that was compiled here."""

    recipe: int
    package_version: str
    """Of the source."""
    library: Annotated[str, msgspec.Meta(pattern=r"^libheadrace-llama-[0-9a-f]{1,64}\.so$")]
    """Name of the file."""
    library_sha256: str
    kernels_sha256: str
    """Of the sources of ours, see `kernels_digest`."""
    instructions: list[str]
    """All that the processor had on which it was compiled, as /proc/cpuinfo spells them."""
    kernels: list[Kernel]
    compiler: str


def native_directory() -> Path:
    """Where a compiled library is kept: inside the environment that headrace runs from."""
    return Path(sys.prefix) / "share" / "headrace" / "engine"


def find_build(library: EngineLibrary) -> Build:
    """The library that a setting asks for, checked. Raises `PlatformError` with what has to change."""
    return _wheel() if library == "wheel" else find_native(native_directory())


def find_native(directory: Path) -> Build:
    """The library in `directory`, checked like the wheel's: by version, processor and SHA-256."""
    preflight.check_base(sys.platform, platform.machine())
    manifest = read_manifest(directory)
    if manifest is None:
        raise PlatformError(f"There is no library compiled for this machine in {directory}. {_MAKE_IT}")
    if (manifest.package_version, manifest.recipe) != (definitions.PACKAGE_VERSION, RECIPE):
        raise PlatformError(
            f"The library in {directory} was compiled from {definitions.PACKAGE} {manifest.package_version} (recipe "
            f"{manifest.recipe}); headrace was verified with exactly {definitions.PACKAGE_VERSION} (recipe {RECIPE}). "
            f"{_MAKE_IT}"
        )
    if manifest.kernels_sha256 != kernels_digest(KERNELS):
        raise PlatformError(
            f"The library in {directory} was compiled with other kernels of headrace. {_MAKE_IT}"
        )
    instructions = frozenset(manifest.instructions)
    if not instructions >= set(definitions.PROCESSOR_FLAGS):
        raise PlatformError(
            f"{directory / MANIFEST} is not what was written: no processor is named. {_MAKE_IT}"
        )
    missing = sorted(instructions - preflight.processor_flags())
    if missing:
        raise PlatformError(
            f"The library in {directory} was compiled on a processor that also has {', '.join(missing).upper()}; this one "
            f"would stop at the first such instruction. {_MAKE_IT}"
        )
    path = directory / manifest.library
    try:
        found = preflight.digest(path)
    except PlatformError as error:
        raise PlatformError(f"{error} {_MAKE_IT}") from error
    if found != manifest.library_sha256:
        raise PlatformError(
            f"The library {path} was changed since it was compiled: SHA-256 {found}. {_MAKE_IT}"
        )
    return Build(
        path=path,
        name=f"{definitions.BACKEND_NAME}, compiled here as {found[:16]}",
        sha256=manifest.library_sha256,
        kernels=frozenset(manifest.kernels),
    )


def read_manifest(directory: Path) -> Manifest | None:
    """What is said beside the library in `directory`; None if there is none. Raises `PlatformError` for what is no
    manifest.
    """
    path = directory / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PlatformError(f"{path} cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise PlatformError(f"{path} is not what was written: {error}. {_MAKE_IT}") from error


def kernels_digest(directory: Path) -> str:
    """SHA-256 of the sources there: their names and what they say. Raises `PlatformError` where they cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in sorted(directory.iterdir()):
            if path.suffix in {".cpp", ".h"}:
                text = path.read_bytes()
                digest.update(f"{path.name}\0{len(text)}\0".encode() + text)
    except OSError as error:
        raise PlatformError(f"headrace's kernels in {directory} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def instructions_of(flags: frozenset[str]) -> list[str]:
    """Of all a processor's flags those that name instructions, sorted."""
    return sorted(flag for flag in flags if _INSTRUCTIONS.match(flag))


def _wheel() -> Build:
    return Build(
        path=preflight.check_this_machine(),
        name=definitions.BACKEND_NAME,
        sha256=definitions.LIBRARY_SHA256[sys.platform, platform.machine()],
    )
