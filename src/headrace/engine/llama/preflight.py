"""Is this machine one the embedded library runs on? Asked before the library is loaded.

Loading first would answer by crashing: a missing instruction set is an illegal instruction in the
middle of a request, a missing libgomp a linker message that names no package.
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path

from cffi import FFI

from headrace.engine.llama import definitions
from headrace.errors import PlatformError

_PROCESSOR_FILE = Path("/proc/cpuinfo")
_NO_ALTERNATIVE = "The second back end (llama-cpp-python) is not available yet, so headrace cannot go on."


def refusal(reason: str) -> PlatformError:
    """A refusal that also says that there is nothing to fall back to."""
    return PlatformError(f"{reason} {_NO_ALTERNATIVE}")


def check_platform(system: str, machine: str) -> None:
    """Refuse operating systems and processors the pinned build has not been verified on."""
    if (system, machine) in definitions.LIBRARY_SHA256:
        return
    if system == "win32":
        raise refusal(
            "The embedded engine does not run on Windows: "
            f"the {definitions.PACKAGE} library for it exports no C interface."
        )
    raise refusal(
        f"The embedded engine is not verified with this build on {system} {machine}; only Linux x86_64 is."
    )


def check_processor(cpuinfo: str) -> None:
    """Refuse x86-64 processors without the instruction sets the library was compiled for.

    `cpuinfo` is the text of /proc/cpuinfo.
    """
    flags = flags_in(cpuinfo)
    missing = [flag.upper() for flag in definitions.PROCESSOR_FLAGS if flag not in flags]
    if missing:
        raise refusal(f"The embedded engine needs a processor with {', '.join(missing)}; this one lacks it.")


def flags_in(cpuinfo: str) -> frozenset[str]:
    """The flags of the first processor in a text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def processor_flags() -> frozenset[str]:
    """The flags of this machine's processor."""
    return flags_in(_PROCESSOR_FILE.read_text())


def check_openmp(library: str = "libgomp.so.1") -> None:
    """Refuse when GNU OpenMP, which the library links but does not bring along, is not installed."""
    try:
        FFI().dlopen(library)
    except OSError as error:
        raise refusal(
            f"The embedded engine needs {library}, which is not installed ({error}). "
            "Debian and Ubuntu: apt install libgomp1. Fedora and RHEL: dnf install libgomp. "
            "Alpine: apk add libgomp."
        ) from error


def check_version(installed: str | None) -> None:
    """Refuse any version of the package but the pinned one. None: the package is not installed."""
    if installed is None:
        raise refusal(
            f"The package {definitions.PACKAGE} is not installed; "
            f"headrace needs exactly {definitions.PACKAGE}=={definitions.PACKAGE_VERSION}."
        )
    if installed != definitions.PACKAGE_VERSION:
        raise refusal(
            f"{definitions.PACKAGE} {installed} is installed; "
            f"headrace was verified with exactly {definitions.PACKAGE_VERSION}."
        )


def digest(path: Path) -> str:
    """The SHA-256 of a file (0.1 s for 106 MB)."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PlatformError(f"{path} cannot be read: {error.strerror}.") from error


def check_digest(library: Path, expected: str) -> None:
    """Refuse a library file whose SHA-256 is not the pinned one."""
    found = digest(library)
    if found != expected:
        raise PlatformError(
            f"The library {library} is not the verified build: SHA-256 {found}, expected {expected}."
        )


def find_library() -> Path:
    """Where the wheel put its library, found without importing the package."""
    spec = importlib.util.find_spec(definitions.PACKAGE)
    if spec is None or spec.origin is None:
        raise refusal(f"The package {definitions.PACKAGE} is not installed.")
    return Path(spec.origin).with_name(definitions.LIBRARY_FILE)


def check_base(system: str, machine: str) -> None:
    """What any library of ours needs of a machine."""
    check_platform(system, machine)
    check_processor(_PROCESSOR_FILE.read_text())
    check_openmp()


def check_machine(system: str, machine: str) -> Path:
    """All checks in turn, the cheap ones first; the library's path when every one passes."""
    check_base(system, machine)
    check_version(_installed_version())
    library = find_library()
    check_digest(library, definitions.LIBRARY_SHA256[system, machine])
    return library


def check_this_machine() -> Path:
    """`check_machine` for the machine this process runs on."""
    return check_machine(sys.platform, platform.machine())


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version(definitions.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
