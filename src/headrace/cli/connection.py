"""How a command finds the running server and talks to its admin API.

`DATA/run/server.json` and `DATA/run/admin.key`, which `headrace serve` writes, or `--admin-url` and
`--admin-key` (`HEADRACE_ADMIN_URL`, `HEADRACE_ADMIN_KEY`).

Exit status: 0 done, 1 refused by the server, 2 wrong usage, 3 no server running.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import click

EXIT_REFUSED: Final = 1
EXIT_NO_SERVER: Final = 3
TIMEOUT_SECONDS: Final = 30.0

P = ParamSpec("P")
R = TypeVar("R")


class Connection:
    """The running server as the options of a command describe it."""

    def __init__(self, *, data: Path, admin_url: str | None, admin_key: str | None, is_json: bool) -> None:
        self._data = data
        self._admin_url = admin_url
        self._admin_key = admin_key
        self.is_json = is_json

    def admin(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        """The JSON reply of the admin API, None without content. Ends the command when refused."""
        if self._admin_url is not None and self._admin_key is None:
            # The key file belongs to the server of the data directory; it is not sent anywhere else.
            raise click.UsageError("--admin-url needs --admin-key (or HEADRACE_ADMIN_KEY)")
        url = self._admin_url or str(self.server()["admin_url"])
        key = self._admin_key or self._key_file()
        return self.request(method, url, path, key, query=query, body=body)

    def server(self) -> dict[str, Any]:
        """What `serve` wrote about itself. Ends the command when there is nothing."""
        path = self._data / "run" / "server.json"
        try:
            server = json.loads(path.read_bytes())
        except FileNotFoundError:
            _no_server(f"no server is running on the data directory {self._data} ({path} is not there)")
        except (OSError, ValueError) as error:
            _no_server(f"{path} cannot be read: {error}")
        if not isinstance(server, dict) or not {"url", "admin_url"} <= server.keys():
            _no_server(f"{path} is not what `headrace serve` writes")
        return server

    def request(
        self,
        method: str,
        url: str,
        path: str,
        key: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        """One HTTP call with a bearer key."""
        import httpx

        given = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            response = httpx.request(
                method,
                url.rstrip("/") + path,
                params=given,
                json=body,
                headers={"authorization": f"Bearer {key}"},
                timeout=TIMEOUT_SECONDS,
                trust_env=False,
            )
            reply = response.json() if response.content else None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise click.UsageError(f"{url!r} is not a URL: {error}") from error
        except httpx.TransportError as error:
            _no_server(f"the server at {url} does not answer: {error}")
        except ValueError:
            fail(f"the server at {url} answered {response.status_code} without JSON", EXIT_REFUSED)
        if response.status_code >= 400:
            self._refused(response.status_code, reply)
        return reply

    def _key_file(self) -> str:
        path = self._data / "run" / "admin.key"
        try:
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            _no_server(f"{path} cannot be read: {error}")

    def _refused(self, status: int, reply: Any) -> NoReturn:
        if self.is_json:
            click.echo(json.dumps(reply))
        problem = reply if isinstance(reply, dict) else {}
        if isinstance(problem.get("error"), dict):  # /v1 answers in OpenAI's form
            problem = {"detail": problem["error"].get("message"), "code": problem["error"].get("code")}
        fail(f"{problem.get('detail') or status} [{problem.get('code') or status}]", EXIT_REFUSED)


def connected(command: Callable[P, R]) -> Callable[..., R]:
    """Adds the options that find the server and hands the command a `Connection` as `server`."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> R:
        server = Connection(
            data=options.pop("data"),
            admin_url=options.pop("admin_url"),
            admin_key=options.pop("admin_key"),
            is_json=options.pop("is_json"),
        )
        return command(*arguments, server=server, **options)  # type: ignore[arg-type]

    for option in (
        click.option("--json", "is_json", is_flag=True, help="Print JSON."),
        click.option("--admin-key", envvar="HEADRACE_ADMIN_KEY", help="Admin key."),
        click.option("--admin-url", envvar="HEADRACE_ADMIN_URL", help="Address of the admin API."),
        click.option(
            "--data",
            type=click.Path(path_type=Path),
            default=Path(".data"),
            envvar="HEADRACE_DATA",
            show_default=True,
            help="Data directory of the running server.",
        ),
    ):
        run = option(run)
    return run


def fail(message: str, status: int) -> NoReturn:
    """Says why on standard error and ends the command."""
    click.echo(f"headrace: {message}", err=True)
    sys.exit(status)


def _no_server(message: str) -> NoReturn:
    fail(f"{message}\nstart one with: headrace serve", EXIT_NO_SERVER)
