"""`headrace workers`."""

from typing import Final

import click

from headrace.cli.connection import Connection, connected
from headrace.cli.output import print_json, print_table

_COLUMNS: Final = (
    "id", "model", "kind", "status", "address", "pid", "running", "slots", "restarts", "ready_ts", "last_error",
)  # fmt: skip


@click.group()
def workers() -> None:
    """Workers: the replicas that compute."""


@workers.command("list")
@connected
def list_(server: Connection) -> None:
    """List all workers, as of now."""
    found = server.admin("GET", "/admin/v1/workers")["data"]
    if server.is_json:
        print_json(found)
    else:
        print_table(found, _COLUMNS)
