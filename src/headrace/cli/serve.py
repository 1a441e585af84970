"""`headrace serve`."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from headrace.config.loading import load_settings
from headrace.config.settings import BUILTIN_MODEL, BUILTIN_PATH, Settings
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
@click.option("--upstream-key-env", type=str, help="Environment variable that holds the upstream's API key.")
@click.option("--workers", type=int, help="Worker processes for the model.  [default: 1]")
@click.option("--batch-size", type=int, help="Requests that run together in a worker.  [default: 32]")
@click.option("--context", type=int, help="Tokens of prompt and answer of one request.  [default: 2048]")
@click.option("--threads", type=int, help="Compute threads of a worker.  [default: cores - 1]")
@click.option(
    "--library",
    type=click.Choice(["wheel", "native"]),
    help="The library that computes; native is what 'headrace engine build' made.  [default: wheel]",
)
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
        text = (
            msgspec.json.encode(announcement).decode()
            if is_json
            else _welcome(announcement) + _advice(settings)
        )
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
        if config is not None and load_settings(file=config).models:
            names = ", ".join(f"--{flag.removesuffix('_path').replace('_', '-')}" for flag in given)
            raise SetupError(f"{names}: {config} says which models to serve; change that there")
        overrides["models"] = _models(given)
    return load_settings(
        file=config, environment=os.environ, overrides=overrides, origins=_ORIGINS if given else {}
    )


def _models(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The models that the flags ask for. They replace the file's."""
    if "upstream" in given:
        return _upstream_models(given)
    if "upstream_key_env" in given:
        raise SetupError("--upstream-key-env goes with --upstream")
    path = given.get("model_path")
    model: dict[str, Any] = {
        "id": given.get("model_id", _name_of(path) if path else BUILTIN_MODEL),
        "path": path or BUILTIN_PATH,
    }
    if "workers" in given:
        model["workers"] = given["workers"]
    engine = {setting: given[flag] for flag, setting in _ENGINE_FLAGS.items() if flag in given}
    return [model | {"engine": engine}] if engine else [model]


_ORIGINS = {
    "models[0].id": "--model-id (or the name of the --model file)",
    "models[0].upstream": "--upstream",
    "models[0].workers": "--workers",
    "models[0].engine.max_batch_size": "--batch-size",
    "models[0].engine.max_context_tokens": "--context",
    "models[0].engine.threads": "--threads",
    "models[0].engine.library": "--library",
}
"""Which flag a setting comes from, for messages."""

_ENGINE_FLAGS = {
    "batch_size": "max_batch_size",
    "context": "max_context_tokens",
    "threads": "threads",
    "library": "library",
    "chat_template": "chat_template",
}


def _name_of(path: str) -> str:
    """A model id made from a file's name: what cannot stand in one becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._:@-]+", "-", Path(path).stem).lstrip("-._:@") or "model"


def _upstream_models(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The model named by `--model-id`, or all that the upstream lists."""
    useless = [flag for flag in ("model_path", "workers", *_ENGINE_FLAGS) if flag in given]
    if useless:
        names = ", ".join(f"--{flag.removesuffix('_path').replace('_', '-')}" for flag in useless)
        raise SetupError(f"{names}: not with --upstream, where another server runs the model")
    shared: dict[str, Any] = {name: given[name] for name in ("upstream", "upstream_key_env") if name in given}
    ids = [given["model_id"]] if "model_id" in given else _listed(given)
    return [{"id": model_id, **shared} for model_id in ids]


def _listed(given: dict[str, Any]) -> list[str]:
    import httpx

    url = given["upstream"].rstrip("/") + "/models"
    key = os.environ.get(given.get("upstream_key_env", ""), "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(url, headers=headers, timeout=10)
        reply.raise_for_status()
        ids = [str(model["id"]) for model in reply.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"{url} does not list its models ({error}); name the one to serve with --model-id"
        ) from None
    if not ids:
        raise SetupError(f"{url} lists no model; name the one to serve with --model-id")
    return ids


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


def _advice(settings: Settings) -> str:
    """How this machine could do more; empty if it could not. Without models in the settings the built-in one is served."""
    from headrace.engine.llama.builds import MANIFEST, Q8_0_FLAGS, native_directory
    from headrace.engine.llama.preflight import processor_flags

    is_embedded = not settings.models or any(
        model.upstream is None and model.engine.stub is None and model.engine.library == "wheel"
        for model in settings.models
    )
    try:
        flags = processor_flags()
    except OSError:
        return ""
    # With AMX llama.cpp multiplies by kernels that were never measured here.
    if not is_embedded or not flags >= Q8_0_FLAGS or "amx_int8" in flags:
        return ""
    is_made = (native_directory() / MANIFEST).exists()
    make_it = "" if is_made else " after 'headrace engine build' (two minutes)"
    return f"\nThis processor has AVX-512: '--library native'{make_it} reads prompts in about four times as fast.\n"
