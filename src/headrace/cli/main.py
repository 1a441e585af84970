"""`headrace`: the group of all commands, each loaded only when it is used.

`headrace --help` lists the table below and imports none of the commands, so it stays fast.
"""

import importlib
from typing import Final

import click

COMMANDS: Final = {
    "serve": ("headrace.cli.serve:serve", "Serve a model: API, admin API and workers, until Ctrl-C."),
    "worker": ("headrace.cli.worker:worker", "Run one worker by itself."),
    "tenants": ("headrace.cli.tenants:tenants", "Tenants: create, list, show, update, disable, enable."),
    "keys": ("headrace.cli.keys:keys", "API keys: create, list, revoke."),
    "usage": ("headrace.cli.usage:usage", "Usage: reports, and the record of one request."),
    "ledger": ("headrace.cli.ledger:ledger", "The ledger: verify that it is whole."),
    "simulate": ("headrace.cli.simulate:simulate", "Simulate a fleet: traces or loads under queue policies."),
    "models": ("headrace.cli.models:models", "Models the running server offers."),
    "queue": ("headrace.cli.queue:queue", "Who waits for the running server's models, and why."),
    "workers": ("headrace.cli.workers:workers", "Workers of the running server."),
    "engine": ("headrace.cli.engine:engine", "The library that computes: compile it for this processor."),
    "completion": ("headrace.cli.completion:completion", "Print the script for shell completion."),
}
"""Name: where the command is, and its line in the help."""


class LazyGroup(click.Group):
    """A group that imports a command when it is called for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headrace", prog_name="headrace")
def main() -> None:
    """Self-hosted LLM serving: gateway, fair scheduler, workers, and a ledger that proves every number."""
