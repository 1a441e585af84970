"""`headrace models`."""

from typing import Any

import click

from headrace.cli.connection import Connection, connected
from headrace.cli.output import print_json, print_table


@click.group()
def models() -> None:
    """Models."""


@models.command("list")
@click.option("--url", envvar="HEADRACE_URL", help="Address of the API, for use with --key.")
@click.option("--key", envvar="HEADRACE_API_KEY", help="A tenant's key: list what it may use.")
@connected
def list_(url: str | None, key: str | None, server: Connection) -> None:
    """List the models that the running server offers."""
    found = _of_key(server, url, key) if key else _of_workers(server)
    if server.is_json:
        print_json(found)
    elif key:
        print_table(found, ("id", "owned_by"))
    else:
        print_table(found, ("id", "workers", "ready"))


def _of_key(server: Connection, url: str | None, key: str) -> list[dict[str, Any]]:
    reply = server.request("GET", url or str(server.server()["url"]), "/v1/models", key)
    models: list[dict[str, Any]] = reply["data"]
    return models


def _of_workers(server: Connection) -> list[dict[str, Any]]:
    """Without a tenant's key: the models that have workers."""
    by_model: dict[str, dict[str, Any]] = {}
    for worker in server.admin("GET", "/admin/v1/workers")["data"]:
        model = by_model.setdefault(worker["model"], {"id": worker["model"], "workers": 0, "ready": 0})
        model["workers"] += 1
        model["ready"] += worker["status"] == "ready"
    return list(by_model.values())
