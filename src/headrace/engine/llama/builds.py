"""Which library computes: the one in the pinned wheel, or one that was compiled here for this very processor.

The wheel's runs on any x86-64 processor with AVX2, and therefore uses nothing newer. `headrace engine build`
(`headrace.engine.llama.compile`) compiles the same source with everything this processor has. Its answers differ in the
last bits, as between any two kernels, so which one is used is a setting and never chosen by what happens to be there.
"""

import platform
import re
import sys
from pathlib import Path
from typing import Final

import msgspec

from headrace.config.settings import EngineLibrary
from headrace.engine.llama import definitions, preflight
from headrace.errors import PlatformError

MANIFEST: Final = "build.json"
NATIVE_FILE: Final = "libheadrace-llama.so"
_MAKE_IT: Final = "'headrace engine build' makes one; 'library: wheel' does without."
_INSTRUCTIONS: Final = re.compile(
    r"avx|amx|s?sse|fma|f16c|bmi|gfni|v?aes|v?pclmul|movbe|movdir|popcnt|abm|adx|sha_ni"
)
"""Flags of /proc/cpuinfo that name instructions a compiler may use when it is told to use all there are."""


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """A library that may be loaded: it is what it should be, and this processor can run it."""

    path: Path
    name: str
    """Of the library and where it comes from, for people."""
    sha256: str
    instructions: frozenset[str]
    """Instruction sets that it was compiled for, as /proc/cpuinfo spells them."""

    @property
    def has_wide_kernels(self) -> bool:
        """Whether its matrix kernels use 512-bit vectors."""
        return "avx512f" in self.instructions

    @property
    def multiplies_bf16(self) -> bool:
        """Whether it multiplies 16-bit brain floats without widening them first."""
        return "avx512_bf16" in self.instructions


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written beside a library that was compiled here."""

    package_version: str
    """Of the source."""
    source_sha256: str
    library_sha256: str
    instructions: list[str]
    """All that the processor had on which it was compiled."""
    compiler: str


def native_directory() -> Path:
    """Where a compiled library is kept: inside the environment that headrace runs from."""
    return Path(sys.prefix) / "share" / "headrace" / "engine"


def find_build(library: EngineLibrary) -> Build:
    """The library that a setting asks for, checked. Raises `PlatformError` with what has to change."""
    return _wheel() if library == "wheel" else find_native(native_directory())


def find_native(directory: Path) -> Build:
    """The library in `directory`, checked like the wheel's: by version, processor and SHA-256."""
    preflight.check_platform(sys.platform, platform.machine())
    preflight.check_openmp()
    manifest = read_manifest(directory)
    if manifest is None:
        raise PlatformError(f"There is no library compiled for this machine in {directory}. {_MAKE_IT}")
    if manifest.package_version != definitions.PACKAGE_VERSION:
        raise PlatformError(
            f"The library in {directory} was compiled from {definitions.PACKAGE} {manifest.package_version}; headrace was "
            f"verified with exactly {definitions.PACKAGE_VERSION}. {_MAKE_IT}"
        )
    instructions = frozenset(manifest.instructions)
    missing = sorted(instructions - preflight.processor_flags())
    if missing:
        raise PlatformError(
            f"The library in {directory} was compiled on a processor that also has {', '.join(missing).upper()}; this one "
            f"would stop at the first such instruction. {_MAKE_IT}"
        )
    path = directory / NATIVE_FILE
    preflight.check_digest(path, manifest.library_sha256)
    return Build(
        path=path,
        name=f"{definitions.BACKEND_NAME}, compiled here",
        sha256=manifest.library_sha256,
        instructions=instructions,
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
    except (OSError, msgspec.DecodeError) as error:
        raise PlatformError(f"{path} cannot be read: {error}. {_MAKE_IT}") from error


def instructions_of(flags: frozenset[str]) -> list[str]:
    """Of all a processor's flags those that name instructions, sorted."""
    return sorted(flag for flag in flags if _INSTRUCTIONS.match(flag))


def _wheel() -> Build:
    path = preflight.check_this_machine()
    return Build(
        path=path,
        name=definitions.BACKEND_NAME,
        sha256=definitions.LIBRARY_SHA256[sys.platform, platform.machine()],
        instructions=frozenset(definitions.PROCESSOR_FLAGS),
    )
