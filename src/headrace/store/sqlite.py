"""Opening SQLite files: permissions, write-ahead log, schema versions.

A schema is a tuple of SQL scripts; script *n* brings version *n - 1* to *n*, each in one transaction.
A file written by a newer headrace is refused rather than guessed at.
"""

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from headrace.errors import SetupError

CACHE_KIB: Final = 8 * 1024
_CREATE_VERSIONS = "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER PRIMARY KEY) STRICT"


def open_database(
    path: Path, schema: Sequence[str], *, synchronous: str, timeout_s: float = 0.0
) -> sqlite3.Connection:
    """A read-write connection in autocommit mode, the file created with mode 0600 and brought up to date.

    `synchronous` is SQLite's level (`NORMAL`, `FULL`), `timeout_s` how long a statement waits for a lock.
    Raises `SetupError` when the file cannot be opened, is damaged or has a newer schema.
    """
    assert synchronous in ("NORMAL", "FULL")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(path)
        connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise SetupError(f"cannot open {path}: {error}") from error
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA trusted_schema=OFF")
        _migrate(connection, path, schema)
    except sqlite3.Error as error:
        connection.close()
        raise SetupError(f"cannot use {path}: {error}") from error
    except SetupError:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    """Make the file, private, if there is none.

    A file that is there must not even be opened and closed: closing any descriptor of a file ends all POSIX
    locks that this process has on it, those of SQLite's connections as well. Then another program that opens
    and closes the database takes itself for the last one and removes the write-ahead log under us.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return


def open_read_only(path: Path, *, timeout_s: float = 1.0) -> sqlite3.Connection:
    """A connection that cannot write. Raises `SetupError` when the file is missing or no database."""
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=timeout_s, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    try:
        connection.execute("PRAGMA query_only=ON")
    except sqlite3.Error as error:
        connection.close()
        raise SetupError(f"cannot read {path}: {error}") from error
    return connection


def _migrate(connection: sqlite3.Connection, path: Path, schema: Sequence[str]) -> None:
    connection.execute(_CREATE_VERSIONS)
    (version,) = connection.execute("SELECT coalesce(max(version), 0) FROM schema_version").fetchone()
    if version > len(schema):
        raise SetupError(
            f"{path} has schema version {version}, written by a newer headrace; "
            f"this one knows versions up to {len(schema)}"
        )
    for number in range(version + 1, len(schema) + 1):
        record = f"INSERT INTO schema_version VALUES ({number})"  # noqa: S608
        connection.executescript(f"BEGIN IMMEDIATE;{schema[number - 1]};{record};COMMIT")
