"""`headrace models`."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from headrace.cli.connection import Connection, connected
from headrace.cli.output import print_fields, print_json, print_table
from headrace.config.scheduling import SchedulingSettings
from headrace.request.controls import Controls


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


@models.command("update")
@click.argument("model")
@click.option(
    "--set",
    "changes",
    multiple=True,
    required=True,
    metavar="NAME=VALUE",
    help="Of: "
    + ", ".join((*Controls.__struct_fields__, *SchedulingSettings.__struct_fields__))
    + ". VALUE none goes back to the settings; may repeat.",
)
@connected
def update(model: str, changes: tuple[str, ...], server: Connection) -> None:
    """Change how MODEL's workers work and who is next in its queue, from now until the server ends."""
    body: dict[str, Any] = {}
    for change in changes:
        name, found, value = change.partition("=")
        if not found or not name or not value:
            raise click.UsageError(f"--set {change}: give NAME=VALUE or NAME=none")
        body[name] = _value(value)
    shown = server.admin("PATCH", f"/admin/v1/models/{quote(model, safe='/')}", body=body)
    if server.is_json:
        print_json(shown)
    else:
        print_fields(shown)


@models.command("inspect")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--batch-size", multiple=True, type=click.IntRange(1, 256), help="Requests at once; may repeat."
)
@click.option("--context", multiple=True, type=click.IntRange(64), help="Tokens of each; may repeat.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def inspect(
    file: Path | None, batch_size: tuple[int, ...], context: tuple[int, ...], *, is_json: bool
) -> None:
    """Show a GGUF FILE's geometry, its memory for each token, and what fits here. Without FILE: the built-in model."""
    # Only here: loading the library takes time that other commands do not need.
    from headrace.engine.builtin import builtin_model_path
    from headrace.engine.llama.inspect import as_plain, inspect_model
    from headrace.errors import SetupError

    try:
        report = inspect_model(
            file or builtin_model_path(),
            sequences=batch_size or (1, 8, 32, 64),
            contexts=context or (2048, 4096, 8192, 32768, 131072),
        )
    except SetupError as error:
        raise click.ClickException(str(error)) from None
    plain = as_plain(report)
    if is_json:
        print_json(plain)
        return
    fits = plain.pop("fits")
    print_fields(plain)
    if fits:
        click.echo()
        print_table(fits, tuple(fits[0]))


def _value(text: str) -> Any:
    """What a `--set` means. The server checks what it is worth."""
    words = {"none": None, "true": True, "false": False}
    if text in words:
        return words[text]
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return text


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
