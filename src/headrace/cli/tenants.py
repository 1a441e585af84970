"""`headrace tenants`."""

from collections.abc import Callable
from typing import Any, Final, get_args
from urllib.parse import quote

import click

from headrace import bounds
from headrace.caching.slots import Mode
from headrace.cli.connection import Connection, connected
from headrace.cli.limits import level_fields, level_options
from headrace.cli.output import print_fields, print_json, print_table
from headrace.cli.paging import every_page
from headrace.config.scheduling import Isolation, ServiceClass, Sharing

_COLUMNS: Final = ("id", "name", "status", "created_ts", "updated_ts", "version")


def cache_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What the prefix cache keeps of a tenant, and with whom it is shared."""
    for option in (
        click.option(
            "--shared-prefix",
            metavar="NAME",
            help="Share prefixes marked with cache_control with the other tenants of this name; empty ends it.",
        ),
        click.option(
            "--cache",
            type=click.Choice(get_args(Mode)),
            help="What may be kept of finished requests: everything, what they mark, or nothing.",
        ),
    ):
        command = option(command)
    return command


def sharing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A tenant's part in sharing the models with others."""
    for option in (
        click.option(
            "--allow-degrade/--no-allow-degrade",
            default=None,
            help="Rather a shorter answer, or a cheaper model's, than a refusal.",
        ),
        click.option(
            "--isolation",
            type=click.Choice(get_args(Isolation)),
            help="A queue of its own by weight, one shared with all of that mode, or workers of its own.",
        ),
        click.option(
            "--priority-max",
            type=click.IntRange(0, bounds.PRIORITY_MAX),
            help="The highest priority that its requests may ask for.",
        ),
        click.option(
            "--service-class",
            type=click.Choice(get_args(ServiceClass)),
            help="The class of requests that say nothing else.",
        ),
        click.option(
            "--weight", type=click.FloatRange(0.01, 1000), help="Twice the weight is twice the service."
        ),
    ):
        command = option(command)
    return command


@click.group()
def tenants() -> None:
    """Tenants: who pays and is isolated."""


@tenants.command("create")
@click.argument("tenant")
@click.option("--name", help="A name for people.")
@cache_options
@sharing_options
@level_options
@connected
def create(
    tenant: str,
    name: str | None,
    cache: str | None,
    shared_prefix: str | None,
    server: Connection,
    **others: Any,
) -> None:
    """Create TENANT: a-z, 0-9, - and _, at most 63 characters."""
    body = {"id": tenant, "name": name, **_cache_fields(cache, shared_prefix), **_other_fields(others)}
    _show(server, server.admin("POST", "/admin/v1/tenants", body=body))


@tenants.command("list")
@connected
def list_(server: Connection) -> None:
    """List all tenants."""
    found = every_page(server, "/admin/v1/tenants", "id")
    if server.is_json:
        print_json(found)
    else:
        print_table(found, _COLUMNS)


@tenants.command("show")
@click.argument("tenant")
@connected
def show(tenant: str, server: Connection) -> None:
    """Show TENANT."""
    _show(server, server.admin("GET", _path(tenant)))


@tenants.command("update")
@click.argument("tenant")
@click.option("--name", help="The new name; empty takes it away.")
@cache_options
@sharing_options
@level_options
@click.option(
    "--remove-department", "removed", multiple=True, help="A department without keys, to take away."
)
@connected
def update(
    tenant: str,
    name: str | None,
    cache: str | None,
    shared_prefix: str | None,
    removed: tuple[str, ...],
    server: Connection,
    **others: Any,
) -> None:
    """Change TENANT. What is not named stays as it is."""
    body = _cache_fields(cache, shared_prefix) | _other_fields(others)
    if name is not None:
        body["name"] = name or None
    if removed:
        body["departments"] = body.get("departments", {}) | dict.fromkeys(removed)
    if not body:
        raise click.UsageError(
            "nothing to change: give --name, --cache, --shared-prefix, --weight or another part in sharing, "
            "a limit or a department"
        )
    _show(server, server.admin("PATCH", _path(tenant), body=body))


@tenants.command("disable")
@click.argument("tenant")
@connected
def disable(tenant: str, server: Connection) -> None:
    """Refuse all keys of TENANT from now on."""
    _show(server, server.admin("PATCH", _path(tenant), body={"status": "disabled"}))


@tenants.command("enable")
@click.argument("tenant")
@connected
def enable(tenant: str, server: Connection) -> None:
    """Accept the keys of TENANT again."""
    _show(server, server.admin("PATCH", _path(tenant), body={"status": "active"}))


def _cache_fields(cache: str | None, shared_prefix: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if cache is not None:
        fields["cache"] = cache
    if shared_prefix is not None:
        fields["shared_prefix"] = shared_prefix or None
    return fields


def _other_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The part in sharing, and limits and departments."""
    sharing = {name: given.pop(name) for name in Sharing.__struct_fields__}
    return {name: value for name, value in sharing.items() if value is not None} | level_fields(**given)


def _path(tenant: str) -> str:
    return f"/admin/v1/tenants/{quote(tenant, safe='')}"


def _show(server: Connection, tenant: dict[str, Any]) -> None:
    if server.is_json:
        print_json(tenant)
    else:
        print_fields(tenant)
