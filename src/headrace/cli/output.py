"""What commands print: JSON for programs, aligned text for people."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click


def print_json(value: Any) -> None:
    """One JSON document, indented."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Columns under their names, numbers to the right. Fields that end in `_ts` are shown as times."""
    shown = [[cell(column, row.get(column)) for column in columns] for row in rows]
    titles = [column.removesuffix("_ts") for column in columns]
    widths = [max(map(len, values)) for values in zip(titles, *shown, strict=True)]
    is_number = [
        bool(rows)
        and not column.endswith("_ts")
        and all(isinstance(row.get(column), int | float) for row in rows if row.get(column) is not None)
        for column in columns
    ]
    for line in (titles, *shown):
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        ]
        click.echo("  ".join(padded).rstrip())


def print_fields(value: Mapping[str, Any]) -> None:
    """One field a line; of a table of limits by name, each name on a line of its own."""
    width = max(map(len, value), default=0)
    for name, field in value.items():
        entries = field if isinstance(field, Mapping) else {}
        if entries and all(isinstance(entry, Mapping) for entry in entries.values()):
            lines = [f"{_printable(entry)}: {cell(name, limits)}" for entry, limits in entries.items()]
        else:
            lines = [cell(name, field)]
        for title, line in zip((name, *[""] * (len(lines) - 1)), lines, strict=True):
            click.echo(f"{title.ljust(width)}  {line}")


def cell(name: str, value: Any) -> str:
    """A value as text on one line; nothing is a dash."""
    if value is None or value == [] or value == {}:
        return "-"
    if name.endswith("_ts") and isinstance(value, int):
        return datetime.fromtimestamp(value / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, list):
        return _printable(",".join(map(str, value)))
    if isinstance(value, Mapping):
        return _printable(" ".join(f"{name}={entry}" for name, entry in value.items()))
    return _printable(str(value))


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
