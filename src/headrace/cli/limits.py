"""The option `--limit NAME=VALUE` of several commands. What names and values may be, the server says."""

import click

Limit = tuple[str, int | float | None]


class LimitType(click.ParamType[Limit]):
    """`tpm=1000`, `rps=2.5`; `tpm=none` takes a limit away."""

    name = "name=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Limit:
        """The limit's name and its value."""
        name, separator, text = str(value).partition("=")
        if separator and text.lower() == "none":
            return name, None
        try:
            number = float(text)
        except ValueError:
            self.fail(f"{value!r} is not like tpm=1000, rps=2.5 or tpm=none", param, ctx)
        return name, int(number) if number.is_integer() else number


limit_option = click.option(
    "--limit",
    "limits",
    type=LimitType(),
    multiple=True,
    help="A limit, as in tpm=1000; tpm=none takes it away. May be repeated. "
    "Names: rps, concurrency, streams, tpm, max_prompt_tokens, max_total_tokens.",
)
