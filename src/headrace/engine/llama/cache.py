"""A directory for files that were expensive to make, safe against crashes and concurrent makers."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.errors import ModelError


class ModelCache:
    """One file in a cache directory and, next to it, its SHA-256 in the format of `sha256sum -c`.

    The file appears by renaming, so nobody sees a part of it; one that does not match its SHA-256 is
    made again; only one process makes it, the others wait for the lock.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self._sidecar = directory / f"{name}.sha256"
        self._lock = directory / f"{name}.lock"
        self._unfinished = directory / f"{name}.unfinished"

    def obtain(self, digest: Callable[[Path], str], make: Callable[[Path], str]) -> tuple[str, bool]:
        """The file's SHA-256 and whether it was there already; made by `make(path)` when it was not.

        `make` gets a path that does not exist and returns the SHA-256 of what it wrote there.
        Raises `ModelError` when the directory cannot be used.
        """
        # Without the lock first: a cache that is complete may be read-only.
        known = self._intact(digest)
        if known is not None:
            return known, True
        try:
            with self._locked():
                known = self._intact(digest)
                if known is not None:
                    return known, True
                return self._fill(make), False
        except OSError as error:
            raise ModelError(
                f"The converted model cannot be written to {self.path.parent}: {error.strerror or error}. "
                "Make room there, or set another cache directory."
            ) from error

    def _intact(self, digest: Callable[[Path], str]) -> str | None:
        """The SHA-256 of the file when it matches its sidecar, else None."""
        try:
            recorded = self._sidecar.read_text(errors="replace").split(" ", 1)[0]
        except OSError:
            return None
        if not self.path.is_file():
            return None
        return recorded if digest(self.path) == recorded else None

    def _fill(self, make: Callable[[Path], str]) -> str:
        # Whoever holds the lock may remove what a maker that died left behind.
        self._unfinished.unlink(missing_ok=True)
        try:
            sha256 = make(self._unfinished)
            _flush(self._unfinished)
            self._unfinished.replace(self.path)
            self._unfinished.write_text(f"{sha256}  {self.path.name}\n")
            _flush(self._unfinished)
            self._unfinished.replace(self._sidecar)
            _flush(self.path.parent)
        finally:
            with contextlib.suppress(OSError):
                self._unfinished.unlink(missing_ok=True)
        return sha256

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _flush(path: Path) -> None:
    """Make sure a file or a directory's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
