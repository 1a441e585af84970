"""What a usage report can be asked for, checked. Field names are those of the query string."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from headrace.errors import HeadraceError
from headrace.store.reports import GROUPS, UsageQuery

FILTERS: Final = ("tenant", "key", "model")
PARAMETERS: Final = (*FILTERS, "from", "to", "group_by")
VALUE_CHARACTERS_MAX: Final = 256
_MICROSECONDS = re.compile(r"[0-9]{1,17}", re.ASCII)
_TIME_FORMS: Final = (
    "a date (2026-10-01), a date and time (2026-10-01T12:00:00Z) or integer microseconds since 1970 UTC"
)


class BadQuery(HeadraceError):
    """A filter that cannot be understood. `field` is its name; the text says what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def parse_query(parameters: Mapping[str, str]) -> UsageQuery:
    """A query from the parameters of a URL or a command. Raises `BadQuery`."""
    for name in parameters:
        if name not in PARAMETERS:
            raise BadQuery(name[:64], f"unknown filter {name[:64]!r}; allowed are {', '.join(PARAMETERS)}")
    for name in FILTERS:
        if not 0 < len(parameters.get(name, "-")) <= VALUE_CHARACTERS_MAX:
            raise BadQuery(name, f"{name} has 1 to {VALUE_CHARACTERS_MAX} characters")
    from_us, to_us = (_time(name, parameters.get(name)) for name in ("from", "to"))
    if from_us is not None and to_us is not None and from_us >= to_us:
        raise BadQuery("to", "to must be later than from; the time `to` itself is not included")
    return UsageQuery(
        tenant=parameters.get("tenant"),
        key=parameters.get("key"),
        model=parameters.get("model"),
        from_us=from_us,
        to_us=to_us,
        group_by=_groups(parameters.get("group_by")),
    )


def _groups(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in GROUPS:
            raise BadQuery(
                "group_by",
                f"cannot group by {name[:64]!r}; allowed are {', '.join(GROUPS)}, several with commas between",
            )
    return names


def _time(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if _MICROSECONDS.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadQuery(name, f"{name} is {_TIME_FORMS}") from error
    if moment.tzinfo is None:
        # A date alone and a time without zone are UTC, as everything in the ledger.
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    if microseconds < 0:
        raise BadQuery(name, f"{name} is before 1970")
    return microseconds
