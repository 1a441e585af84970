"""`headrace completion`: the script that teaches a shell to complete headrace's commands."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash:  headrace completion bash >> ~/.bashrc
    zsh:   headrace completion zsh >> ~/.zshrc
    fish:  headrace completion fish > ~/.config/fish/completions/headrace.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "headrace", "_HEADRACE_COMPLETE").source())
