"""`headrace queue`."""

from typing import Any, Final

import click

from headrace.cli.connection import Connection, connected
from headrace.cli.output import print_json, print_table

_MODELS: Final = (
    "model", "policy", "length", "length_max", "tokens", "running", "places", "tenants_waiting", "jain_index",
)  # fmt: skip
_TENANTS: Final = ("model", "tenant", "waiting", "running", "weight", "share", "lead", "received_60s")
_REQUESTS: Final = (
    "model", "position", "request_id", "tenant", "service_class", "priority", "tokens", "waited_ms", "reason",
)  # fmt: skip


@click.command()
@click.option("--model", help="Only the queue of this model.")
@click.option(
    "--limit", type=click.IntRange(1, 256), default=20, show_default=True, help="Requests of each model."
)
@connected
def queue(model: str | None, limit: int, server: Connection) -> None:
    """Show who waits, in the order in which they are expected to be served, and why."""
    query = {"limit": str(limit), **({"model": model} if model else {})}
    found = server.admin("GET", "/admin/v1/queue", query=query)["data"]
    if server.is_json:
        print_json(found)
        return
    print_table(found, _MODELS)
    for columns, name in ((_TENANTS, "tenants"), (_REQUESTS, "requests")):
        rows: list[dict[str, Any]] = [{"model": one["model"], **row} for one in found for row in one[name]]
        if rows:
            click.echo()
            print_table(rows, columns)
