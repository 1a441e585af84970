"""The options for limits of several commands. What names and values may be, the server says."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import click

Limit = tuple[str, int | float | None]
NamedLimit = tuple[str, Limit]
Values = dict[str, int | float | None]
NAMES = "rps, concurrency, streams, tpm, max_prompt_tokens, max_total_tokens, gpu_memory_gb"


class LimitType(click.ParamType[Limit]):
    """`tpm=1000`, `rps=2.5`; `tpm=none` takes a limit away."""

    name = "name=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Limit:
        """The limit's name and its value."""
        limit = _parsed(str(value))
        if limit is None:
            self.fail(f"{value!r} is not like tpm=1000, rps=2.5 or tpm=none", param, ctx)
        return limit


class NamedLimitType(click.ParamType[NamedLimit]):
    """`sales:tpm=1000`: a limit of something that has a name. The name may have `:` and `=` in it."""

    name = "name:limit=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> NamedLimit:
        """The thing's name and the limit."""
        before, _, number = str(value).rpartition("=")
        name, _, limit_name = before.rpartition(":")
        limit = _parsed(f"{limit_name}={number}")
        if not name or not limit_name or limit is None:
            self.fail(f"{value!r} is not like NAME:tpm=1000 or NAME:tpm=none", param, ctx)
        return name, limit


def _parsed(text: str) -> Limit | None:
    name, separator, value = text.partition("=")
    if not separator:
        return None
    if value.lower() == "none":
        return name, None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return name, int(number) if number.is_integer() else number


limit_option = click.option(
    "--limit",
    "limits",
    type=LimitType(),
    multiple=True,
    help=f"A limit, as in tpm=1000; tpm=none takes it away. May be repeated. Names: {NAMES}.",
)


def level_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The limits of a tenant and of what is inside it. `level_fields` makes the body of them."""
    for option in (
        click.option(
            "--model-limit",
            "model_limits",
            type=NamedLimitType(),
            multiple=True,
            help="What the tenant may take of one model, as in smol:tpm=1000.",
        ),
        click.option(
            "--user-limit-of",
            "users",
            type=NamedLimitType(),
            multiple=True,
            help="For one user, in place of --user-limit, as in ann:tpm=1000.",
        ),
        click.option(
            "--user-limit",
            "user_limits",
            type=LimitType(),
            multiple=True,
            help="What every single user may take, as in tpm=1000.",
        ),
        click.option(
            "--department-limit",
            "department_limits",
            type=NamedLimitType(),
            multiple=True,
            help="A limit of a department, as in sales:tpm=1000; adds the department.",
        ),
        click.option("--department", "departments", multiple=True, help="Add a department without limits."),
        limit_option,
    ):
        command = option(command)
    return command


def level_fields(
    *,
    limits: Iterable[Limit],
    departments: Iterable[str],
    department_limits: Iterable[NamedLimit],
    user_limits: Iterable[Limit],
    users: Iterable[NamedLimit],
    model_limits: Iterable[NamedLimit],
) -> dict[str, Any]:
    """The fields of a tenant that the options of `level_options` give, only those that are given."""
    fields: dict[str, dict[str, Any]] = {
        "limits": dict(limits),
        "departments": {name: {} for name in departments} | _by_name(department_limits),
        "user_limits": dict(user_limits),
        "users": _by_name(users),
        "model_limits": _by_name(model_limits),
    }
    return {name: value for name, value in fields.items() if value}


def _by_name(limits: Iterable[NamedLimit]) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for name, (limit, value) in limits:
        found.setdefault(name, {})[limit] = value
    return found
