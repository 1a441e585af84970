"""`headrace engine`: the library that computes."""

import signal
import sys
from pathlib import Path
from typing import Any

import click

from headrace.cli.output import print_fields, print_json


@click.group()
def engine() -> None:
    """The library that computes: the wheel's, or one compiled for this processor."""


@engine.command()
@click.option(
    "--source",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The package's source archive (xllamacpp, .tar.gz).  [default: fetched with pip]",
)
@click.option("--jobs", type=click.IntRange(1, 1024), help="Compilers at once.  [default: one for each core]")
def build(source: Path | None, jobs: int | None) -> None:
    """Compile the library for this machine's processor, for use with `library: native`."""
    # Only here, like the other imports of the engine: other commands do not need it.
    from headrace.engine.llama.builds import native_directory
    from headrace.engine.llama.compile import compile_native
    from headrace.errors import SetupError

    # So that it, too, leaves nothing lying about.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        made = compile_native(
            native_directory(), source=source, jobs=jobs, say=lambda line: click.echo(line, err=True)
        )
    except SetupError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        advice = " Build as the user who installed headrace." if isinstance(error, PermissionError) else ""
        raise click.ClickException(f"{native_directory()} cannot be written: {error}.{advice}") from None
    click.echo(
        f"{made.path}\nUse it: headrace serve --library native, or `library: native` of a model's engine."
    )


@engine.command()
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def show(*, is_json: bool) -> None:
    """Show which libraries there are and whether this machine can use them."""
    libraries = [_shown("wheel"), _shown("native")]
    if is_json:
        print_json({"libraries": libraries})
        return
    for number, one in enumerate(libraries):
        if number:
            click.echo()
        print_fields(one)


def _shown(library: Any) -> dict[str, Any]:
    from headrace.engine.llama.builds import find_build
    from headrace.errors import SetupError

    try:
        found = find_build(library)
    except (SetupError, OSError) as error:
        return {"library": library, "usable": False, "reason": str(error)}
    return {
        "library": library,
        "usable": True,
        "name": found.name,
        "path": str(found.path),
        "sha256": found.sha256,
        "kernels": sorted(found.kernels),
    }
