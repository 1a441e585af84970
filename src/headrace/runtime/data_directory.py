"""The data directory: one server at a time, private to its user.

DATA/control.db      tenants, keys (claims only), public signing keys
DATA/ledger.db       journal and final records
DATA/secrets/        private signing keys
DATA/models/         weights converted to a faster form
DATA/progress/       what running workers note of their attempts
DATA/run/            of the running server: server.json, admin.key
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from headrace.errors import SetupError

_SOCKETS_PREFIX = "headrace-"
_SOCKETS_FILE = "sockets"


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """`server.json`: where the command line finds the server of this directory."""

    url: str
    admin_url: str
    metrics_url: str
    pid: int
    started_ts: int


class DataDirectory:
    """Holds the directory for this process. A context manager; raises `SetupError` on entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self.sockets = Path()
        """A short-named directory for Unix sockets, whose paths may be 107 bytes long at most."""

    def __enter__(self) -> Self:
        try:
            for directory in (self.path, self.path / "run", self.path / "progress", self.path / "models"):
                directory.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._lock = os.open(self.path / "run" / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = "it is not a directory" if self.path.is_file() else error.strerror
            raise SetupError(f"the data directory {self.path} cannot be used: {reason}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise SetupError(
                f"another headrace server is running on the data directory {self.path}; "
                "stop it or choose another one with --data"
            ) from None
        self._sweep()
        self.sockets = Path(tempfile.mkdtemp(prefix=_SOCKETS_PREFIX))
        self._write(_SOCKETS_FILE, str(self.sockets).encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove_traces()
        os.close(self._lock)

    def remove_traces(self) -> None:
        """What only a running server has."""
        for name in ("server.json", "admin.key"):
            (self.path / "run" / name).unlink(missing_ok=True)
        shutil.rmtree(self.sockets, ignore_errors=True)
        (self.path / "run" / _SOCKETS_FILE).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove the sockets of a server that was killed."""
        try:
            left = Path((self.path / "run" / _SOCKETS_FILE).read_text())
        except FileNotFoundError:
            return
        if left.name.startswith(_SOCKETS_PREFIX) and left.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(left, ignore_errors=True)

    def announce(self, server: RunningServer, *, admin_key: str) -> None:
        """Let the command line find this server."""
        self._write("admin.key", admin_key.encode() + b"\n")
        self._write("server.json", msgspec.json.format(msgspec.json.encode(server)) + b"\n")

    def progress_files(self, suffix: str) -> list[Path]:
        return sorted((self.path / "progress").glob(f"*{suffix}"))

    def _write(self, name: str, content: bytes) -> None:
        """Whole or not at all, readable by this user only."""
        fresh = self.path / "run" / f".{name}.{secrets.token_hex(4)}"
        descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        fresh.rename(self.path / "run" / name)
