"""`headrace serve`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from headrace.config.loading import load_settings
from headrace.config.settings import BUILTIN_MODEL, Settings
from headrace.engine.builtin import builtin_model_path
from headrace.errors import HeadraceError, SetupError


@click.command()
@click.option(
    "--config", type=click.Path(path_type=Path), envvar="HEADRACE_CONFIG", help="YAML file with settings."
)
@click.option("--data", type=str, help="Directory of ledger, keys and tenants.  [default: .data]")
@click.option("--host", type=str, help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port of the API; 0 takes a free one.  [default: 8080]")
@click.option("--admin-port", type=int, help="Port of the admin API; 0 takes a free one.  [default: 8081]")
@click.option("--model", "model_path", type=str, help="A GGUF file to serve instead of the built-in model.")
@click.option("--model-id", type=str, help="The name clients ask for.")
@click.option("--upstream", type=str, help="Base URL of an OpenAI-compatible server to stand in front of.")
@click.option("--workers", type=int, help="Worker processes for the model.  [default: 1]")
@click.option("--batch-size", type=int, help="Requests that run together in a worker.  [default: 32]")
@click.option("--context", type=int, help="Tokens of prompt and answer of one request.  [default: 2048]")
@click.option("--threads", type=int, help="Compute threads of a worker.  [default: cores - 1]")
@click.option("--chat-template", type=str, help="Jinja file that replaces the model's chat template.")
@click.option(
    "--log-format", type=click.Choice(["json", "console"]), help="Form of the log on standard error."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--json", "is_json", is_flag=True, help="When ready, print one JSON line instead of text.")
def serve(config: Path | None, is_json: bool, **flags: Any) -> None:
    """Serve a model: API, admin API and workers, until Ctrl-C."""
    from headrace.runtime.serve import Announcement
    from headrace.runtime.serve import serve as run
    from headrace.telemetry.logs import configure_logs

    def announce(announcement: Announcement) -> None:
        text = msgspec.json.encode(announcement).decode() if is_json else _welcome(announcement)
        click.echo(text)
        sys.stdout.flush()

    try:
        settings = _settings(config, flags)
        configure_logs(level=settings.log.level, fmt=settings.log.format, process="gateway")
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run(settings, builtin_model=builtin_model_path(), announce=announce))
    except SetupError as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(2)
    except HeadraceError as error:
        click.echo(f"headrace: {error}", err=True)
        sys.exit(1)


def _settings(config: Path | None, flags: dict[str, Any]) -> Settings:
    given = {name: value for name, value in flags.items() if value is not None}
    overrides: dict[str, Any] = {
        name: given.pop(name) for name in ("data", "host", "port", "admin_port") if name in given
    }
    for flag, setting in (("log_format", "log.format"), ("log_level", "log.level")):
        if flag in given:
            overrides[setting] = given.pop(flag)
    if given:
        overrides["models"] = [_model(given)]
    return load_settings(file=config, environment=os.environ, overrides=overrides)


def _model(given: dict[str, Any]) -> dict[str, Any]:
    """One model from the flags. They replace the file's models."""
    if "upstream" in given and "model_path" in given:
        raise SetupError("--model and --upstream exclude each other")
    model: dict[str, Any] = {}
    if "upstream" in given:
        if "model_id" not in given:
            raise SetupError("--upstream needs --model-id: the model's name, as the upstream knows it")
        model = {"id": given["model_id"], "upstream": given["upstream"]}
    else:
        path = given.get("model_path")
        name = Path(path).stem if path else BUILTIN_MODEL
        model = {"id": given.get("model_id", name), "path": path or "builtin"}
    if "workers" in given:
        model["workers"] = given["workers"]
    engine = {
        setting: given[flag]
        for flag, setting in (
            ("batch_size", "max_batch_size"),
            ("context", "max_context_tokens"),
            ("threads", "threads"),
            ("chat_template", "chat_template"),
        )
        if flag in given
    }
    if engine:
        model["engine"] = engine
    return model


def _loop_factory() -> Any:
    """uvloop's event loops: half the cost per request of asyncio's own."""
    import uvloop

    return uvloop.new_event_loop


def _welcome(announcement: Any) -> str:
    return f"""
headrace is ready.

  API        {announcement.url}/v1
  model      {announcement.model}
  key        {announcement.key}
  admin API  {announcement.admin_url}
  metrics    {announcement.metrics_url}

Try it:

  curl {announcement.url}/v1/chat/completions \\
    -H 'Authorization: Bearer {announcement.key}' \\
    -H 'Content-Type: application/json' \\
    -d '{{"model": "{announcement.model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 80}}'

Ctrl-C finishes what runs and stops.
"""
