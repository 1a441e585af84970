"""The private signing key: one file, mode 0600, in a directory of mode 0700.

Made complete before it gets its name, so a crash leaves either no key or a whole one. Wider permissions,
a foreign owner or damage are refused at start-up: a signing key that others can read signs for anyone.
"""

import os
import stat
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from headrace.errors import SetupError
from headrace.identity.signing import SigningKey

SIGNING_KEY_FILE: Final = "signing-key.pem"
_SIZE_MAX: Final = 4096


def load_or_create_signing_key(directory: Path) -> SigningKey:
    """The signing key kept in `directory`, made on first use. Raises `SetupError`."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory, directory.stat(), "700")
        path = directory / SIGNING_KEY_FILE
        if not os.path.lexists(path):
            return _write(directory, SigningKey.generate(), replace=False)
        return _load(path)
    except OSError as error:
        raise SetupError(f"cannot use the signing key in {directory}: {error}") from error


def replace_signing_key(directory: Path) -> SigningKey:
    """A new signing key in place of the old one, whose private half is gone after this.

    Raises `SetupError` when the file cannot be written; the old key is still there then.
    """
    try:
        return _write(directory, SigningKey.generate(), replace=True)
    except OSError as error:
        raise SetupError(f"cannot write a signing key in {directory}: {error}") from error


def _load(path: Path) -> SigningKey:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SetupError(f"{path} is not a regular file")
        _check_private(path, status, "600")
        text = file.read(_SIZE_MAX)
    try:
        private_key = load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SetupError(f"{path} is damaged: it holds no private key. Restore it from a backup") from error
    if not isinstance(private_key, Ed25519PrivateKey):
        raise SetupError(f"{path} holds a key of another kind; an Ed25519 key is needed")
    return SigningKey(private_key)


def _write(directory: Path, signing_key: SigningKey, *, replace: bool) -> SigningKey:
    text = signing_key.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = directory / SIGNING_KEY_FILE
    unfinished = directory / f".{SIGNING_KEY_FILE}.new"
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    if replace:
        unfinished.replace(path)
    else:
        os.link(unfinished, path)  # fails, rather than overwrites, when another process was faster
        unfinished.unlink()
    _sync_directory(directory)
    return signing_key


def _check_private(path: Path, status: os.stat_result, mode: str) -> None:
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SetupError(
            f"{path} can be read or written by others (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"do `chmod {mode} {path}`, and rotate the signing key if someone may have read it"
        )
    if status.st_uid != os.geteuid():
        raise SetupError(f"{path} belongs to user {status.st_uid}, headrace runs as user {os.geteuid()}")


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
