"""`headrace usage`."""

from typing import Any
from urllib.parse import quote

import click

from headrace.cli.connection import Connection, connected
from headrace.cli.output import print_fields, print_json, print_table


@click.group()
def usage() -> None:
    """What was used, from the ledger."""


@usage.command("report")
@click.option("--tenant", help="Only this tenant.")
@click.option("--key", help="Only the key with this id (jti).")
@click.option("--model", help="Only this model.")
@click.option("--from", "from_", metavar="TIME", help="From this date or time on (UTC without a zone).")
@click.option("--to", metavar="TIME", help="Up to this date or time, itself not included.")
@click.option(
    "--group-by", help="tenant, key, model, user, department, day, hour, outcome; several with commas."
)
@connected
def report(server: Connection, from_: str | None, group_by: str | None, **filters: str | None) -> None:
    """Sum operations, tokens used and charged, refusals and errors."""
    query = {**filters, "from": from_, "group_by": group_by}
    found = server.admin("GET", "/admin/v1/usage", query=query)
    if server.is_json:
        print_json(found)
        return
    rows: list[dict[str, Any]] = found["data"]
    print_table(rows, list(found["total"] if not rows else rows[0]))
    if found["truncated"]:
        click.echo("there are more groups than are shown; narrow the report", err=True)


@usage.command("show")
@click.argument("request_id")
@connected
def show(request_id: str, server: Connection) -> None:
    """Show the final record of one request."""
    record = server.admin("GET", f"/admin/v1/usage/{quote(request_id, safe='')}")
    if server.is_json:
        print_json(record)
    else:
        print_fields(record)
