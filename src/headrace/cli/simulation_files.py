"""Files that `headrace simulate` writes."""

from collections.abc import Iterable
from pathlib import Path

from headrace.errors import SetupError


def check_folder(path: Path | None) -> None:
    """Whether a file can be there, before work is done for it. Raises `SetupError`."""
    if path is not None and not path.parent.is_dir():
        raise SetupError(f"cannot write {path}: there is no directory {path.parent}")


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Raises `SetupError`."""
    try:
        with path.open("wb") as out:
            out.writelines(lines)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error
