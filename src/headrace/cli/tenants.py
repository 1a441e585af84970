"""`headrace tenants`."""

from typing import Any, Final
from urllib.parse import quote

import click

from headrace.cli.connection import Connection, connected
from headrace.cli.limits import level_fields, level_options
from headrace.cli.output import print_fields, print_json, print_table
from headrace.cli.paging import every_page

_COLUMNS: Final = ("id", "name", "status", "created_ts", "updated_ts", "version")


@click.group()
def tenants() -> None:
    """Tenants: who pays and is isolated."""


@tenants.command("create")
@click.argument("tenant")
@click.option("--name", help="A name for people.")
@level_options
@connected
def create(tenant: str, name: str | None, server: Connection, **levels: Any) -> None:
    """Create TENANT: a-z, 0-9, - and _, at most 63 characters."""
    body = {"id": tenant, "name": name, **level_fields(**levels)}
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
@level_options
@click.option(
    "--remove-department", "removed", multiple=True, help="A department without keys, to take away."
)
@connected
def update(
    tenant: str, name: str | None, removed: tuple[str, ...], server: Connection, **levels: Any
) -> None:
    """Change TENANT. Limits that are not named stay as they are."""
    body = level_fields(**levels)
    if name is not None:
        body["name"] = name or None
    if removed:
        body["departments"] = body.get("departments", {}) | dict.fromkeys(removed)
    if not body:
        raise click.UsageError("nothing to change: give --name, a limit or a department")
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


def _path(tenant: str) -> str:
    return f"/admin/v1/tenants/{quote(tenant, safe='')}"


def _show(server: Connection, tenant: dict[str, Any]) -> None:
    if server.is_json:
        print_json(tenant)
    else:
        print_fields(tenant)
