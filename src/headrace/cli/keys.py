"""`headrace keys`."""

import re
from typing import Final
from urllib.parse import quote

import click

from headrace.cli.connection import Connection, connected
from headrace.cli.limits import Limit, limit_option
from headrace.cli.output import print_fields, print_json, print_table
from headrace.cli.paging import every_page

_COLUMNS: Final = (
    "jti",
    "kind",
    "tenant",
    "department",
    "user",
    "name",
    "scopes",
    "created_ts",
    "expires_ts",
    "revoked_ts",
)
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "": 1}
_DURATION = re.compile(r"([0-9]{1,12})([smhd]?)", re.ASCII)


class Duration(click.ParamType[int]):
    """Seconds, or a number with s, m, h or d behind it."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Seconds."""
        match = _DURATION.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a duration like 3600, 90m, 12h or 30d", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


@click.group()
def keys() -> None:
    """API keys of tenants."""


@keys.command("create")
@click.argument("tenant")
@click.option("--department", help="The department of the tenant that the key belongs to.")
@click.option("--user", help="Bind the key to an end user.")
@click.option("--name", help="A name for people.")
@click.option("--scope", "scopes", multiple=True, help="A scope of the key; may be given several times.")
@click.option("--expires-in", type=Duration(), help="Lifetime, like 3600, 12h or 30d.  [default: 90d]")
@limit_option
@connected
def create(
    tenant: str,
    department: str | None,
    user: str | None,
    name: str | None,
    scopes: tuple[str, ...],
    expires_in: int | None,
    limits: tuple[Limit, ...],
    server: Connection,
) -> None:
    """Create a key of TENANT. It is shown this once and kept nowhere."""
    body = {
        "tenant": tenant,
        "department": department,
        "user": user,
        "name": name,
        "scopes": list(scopes) or None,
        "expires_in_s": expires_in,
        "limits": dict(limits),
    }
    issued = server.admin("POST", "/admin/v1/keys", body=body)
    if server.is_json:
        print_json(issued)
    else:
        print_fields(issued)


@keys.command("list")
@click.option("--tenant", help="Only keys of this tenant.")
@connected
def list_(tenant: str | None, server: Connection) -> None:
    """List keys, oldest first: what they claim, never the keys themselves."""
    found = every_page(server, "/admin/v1/keys", "jti", tenant=tenant)
    if server.is_json:
        print_json(found)
    else:
        print_table(found, _COLUMNS)


@keys.command("revoke")
@click.argument("jti")
@connected
def revoke(jti: str, server: Connection) -> None:
    """Revoke the key with the id JTI. In force when this returns."""
    server.admin("DELETE", f"/admin/v1/keys/{quote(jti, safe='')}")
    if server.is_json:
        print_json({"jti": jti, "revoked": True})
    else:
        click.echo(f"revoked {jti}")
