"""`headrace ledger`."""

import sys
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from headrace.cli.connection import Connection, connected
from headrace.cli.output import print_fields, print_json
from headrace.errors import SetupError


@click.group()
def ledger() -> None:
    """The ledger: check it, correct it."""


@ledger.command("verify")
@click.option("--data", type=click.Path(path_type=Path), default=Path(".data"), show_default=True)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def verify(data: Path, is_json: bool) -> None:
    """Fold the journal and compare it with balances and final records. Exit status 1 if anything differs.

    Works on the files, beside a running server or without one.
    """
    from headrace.store.verify import verify_ledger

    try:
        verdict = verify_ledger(data / "ledger.db")
    except SetupError as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(2)
    if is_json:
        print_json(msgspec.to_builtins(verdict))
    else:
        fields = {
            name: value for name, value in msgspec.to_builtins(verdict).items() if name != "differences"
        }
        print_fields({**fields, "differences": len(verdict.differences)})
        for difference in verdict.differences:
            click.echo(difference)
    sys.exit(1 if verdict.differences else 0)


@ledger.command("refund")
@click.argument("request_id")
@click.option("--reason", required=True, help="Why, for the record: one line.")
@connected
def refund(request_id: str, reason: str, server: Connection) -> None:
    """Take back what the request REQUEST_ID is charged. What it used stays on record.

    Final when this returns; the same again changes nothing.
    """
    path = f"/admin/v1/usage/{quote(request_id, safe='')}/refund"
    record = server.admin("POST", path, body={"reason": reason})
    if server.is_json:
        print_json(record)
    else:
        used = f"{record['prompt_tokens']} prompt and {record['completion_tokens']} completion tokens"
        click.echo(f"refunded {request_id}: nothing of its {used} is charged any more")
