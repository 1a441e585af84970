"""Writes docs/reference from the code: settings, errors, metrics, command line, JSON schema.

    python tools/reference.py            write
    python tools/reference.py --check    exit 1 if what is written is not what the code says

A test runs the check, so nothing can be added without its line in the documentation.
"""

import ast
import inspect
import json
import sys
import typing
from pathlib import Path
from typing import Any

import click
import msgspec
from prometheus_client import CollectorRegistry

from headrace.api import chat, refusals
from headrace.cli.main import COMMANDS, main
from headrace.config import settings as settings_module
from headrace.config.loading import schema
from headrace.config.settings import Settings
from headrace.core.metrics import WATCHED, CoreMetrics
from headrace.errors import Refusal
from headrace.telemetry.families import CounterFamily, GaugeFamily, HistogramFamily
from headrace.worker.stats import StepStats

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- Written by tools/reference.py from the code; do not edit. -->\n\n"


def settings_page() -> str:
    lines = [
        NOTE + "# Settings\n",
        "A YAML file given with `--config`, environment variables (`HEADRACE_PORT=9000`,",
        "`HEADRACE_QUEUE__LENGTH=10`) and flags; flags win over the environment, the environment over the file.",
        "The file's JSON schema is [settings.schema.json](settings.schema.json).\n",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    lines += _setting_rows(Settings, "")
    return "\n".join(lines) + "\n"


def _setting_rows(struct: Any, prefix: str) -> list[str]:
    docs = _attribute_docs(struct)
    rows: list[str] = []
    hints = typing.get_type_hints(struct, include_extras=True)
    for info in msgspec.structs.fields(struct):
        name = prefix + info.name
        inner = _struct_of(hints[info.name])
        if inner is not None and inner is not settings_module.StubTiming:
            text = docs.get(info.name, vars(inner)["__doc__"] or "")
            mark = "[]" if typing.get_origin(_bare(hints[info.name])) is list else ""
            rows.append(f"| `{name}` | section | | {_one_line(text)} |")
            rows += _setting_rows(inner, f"{name}{mark}.")
            continue
        text = docs.get(info.name) or _description(hints[info.name])
        rows.append(
            f"| `{name}` | {_type_text(hints[info.name])} | {_default_text(info)} | {_one_line(text)} |"
        )
    return rows


def _attribute_docs(struct: Any) -> dict[str, str]:
    """The strings written under the fields of a class."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[before.target.id] = str(after.value.value)
    return docs


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def _struct_of(hint: Any) -> Any:
    for part in (_bare(hint), *typing.get_args(_bare(hint))):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def _metas(hint: Any) -> list[msgspec.Meta]:
    metas = list(getattr(hint, "__metadata__", ()))
    for part in typing.get_args(_bare(hint)):
        metas += list(getattr(part, "__metadata__", ()))
    return [meta for meta in metas if isinstance(meta, msgspec.Meta)]


def _description(hint: Any) -> str:
    return "; ".join(meta.description for meta in _metas(hint) if meta.description)


def _type_text(hint: Any) -> str:
    bare = _bare(hint)
    parts = [part for part in (typing.get_args(bare) or (bare,)) if part is not type(None)]
    if typing.get_origin(bare) is typing.Literal:
        return " \\| ".join(f"`{part}`" for part in typing.get_args(bare))
    text = " \\| ".join(getattr(_bare(part), "__name__", str(part)) for part in parts)
    ranges = []
    for meta in _metas(hint):
        ranges += [f"≥ {meta.ge}"] if meta.ge is not None else []
        ranges += [f"> {meta.gt}"] if meta.gt is not None else []
        ranges += [f"≤ {meta.le}"] if meta.le is not None else []
    return f"{text}, {', '.join(ranges)}" if ranges else text


def _default_text(info: Any) -> str:
    if info.default is not msgspec.NODEFAULT:
        return "" if info.default is None else f"`{json.dumps(msgspec.to_builtins(info.default))}`"
    if info.default_factory is not msgspec.NODEFAULT:
        return f"`{json.dumps(msgspec.to_builtins(info.default_factory()))}`"
    return "required"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def errors_page() -> str:
    lines = [
        NOTE + "# Errors\n",
        'Bodies have OpenAI\'s form, `{"error": {"message", "type", "param", "code"}}`. In a stream that has begun the',
        "same object comes as the last event, and no `[DONE]` follows. `x-should-retry: false` is sent where a repeat",
        "cannot help. See [the life of a request](../life-of-a-request.md) for when each is sent.\n",
        "| status | code | type | retry | message (example) |",
        "|---|---|---|---|---|",
    ]
    rows = set()
    for refusal in every_refusal():
        retry = "no" if ("x-should-retry", "false") in refusal.headers else "yes"
        rows.add(
            (
                refusal.status,
                refusal.code,
                refusal.kind,
                retry,
                refusal.details.get("limit_type"),
                refusal.message,
            )
        )
    for status, code, kind, retry, limit, message in sorted(
        rows, key=lambda row: (row[0], row[1], str(row[4]), row[5])
    ):
        shown = f"`{code}`" + (f", `limit_type: {limit}`" if limit else "")
        lines.append(f"| {status} | {shown} | `{kind}` | {retry} | {_one_line(message)} |")
    lines += [
        "",
        "Refused by the HTTP layer, before a route is chosen: 400 `malformed_request`, 408, 413, 414, 431, 503, 505.",
    ]
    return "\n".join(lines) + "\n"


def every_refusal() -> list[Refusal]:
    """One of each kind in the catalogue, with made-up arguments."""
    made = []
    for name, function in inspect.getmembers(refusals, inspect.isfunction):
        if name.startswith("_") or function.__module__ != refusals.__name__ or name == "http_refused":
            continue
        if inspect.signature(function).return_annotation is not Refusal:
            continue
        arguments = {
            parameter.name: _example(parameter)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is inspect.Parameter.empty
        }
        made.append(function(**arguments))
    return made


_EXAMPLES: dict[str, Any] = {
    "message": "What is wrong, where, and what is allowed.",
    "model": "some-model",
    "param": "temprature",
    "allowed": "POST",
    "method": "GET",
    "path": "/v1/somewhere",
    "scope": "chat:stream",
    "limit_type": "tpm",
    "level": "tenant",
    "content_type": "text/plain",
    "request_id": "req_…",
    "status": 400,
    "bound": "requests",
    "session_id": "sess_…",
}


def _example(parameter: inspect.Parameter) -> Any:
    if parameter.name in _EXAMPLES:
        return _EXAMPLES[parameter.name]
    assert parameter.annotation in (int, float, int | None, float | None), (
        f"add an example of {parameter.name} to _EXAMPLES"
    )
    return 8


def api_page() -> str:
    lines = [
        NOTE + "# Chat requests, field by field\n",
        "`POST /v1/chat/completions`. A field that is not listed here is refused by name.\n",
        "Served: " + ", ".join(f"`{name}`" for name in sorted(chat.SERVED)) + ".\n",
        "`max_tokens`, `max_completion_tokens` and `max_new_tokens` are names of one limit. `developer` messages are",
        "`system` messages. Content is a text or a list of `text` parts.\n",
        "## Accepted without an effect\n",
        "| field | why |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in chat.NO_OPS.items()),
        "\n## Known, not served yet\n",
        "Refused with 400 `unsupported_field`, unless they hold a value that asks for nothing.\n",
        "| field | accepted values |",
        "|---|---|",
    ]
    for name in chat.UNSERVED:
        values = ["null", *(json.dumps(value) for value in chat.NEUTRAL.get(name, ()))]
        lines.append(f"| `{name}` | {', '.join(f'`{value}`' for value in values)} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    gateway, worker = CollectorRegistry(), CollectorRegistry()
    CoreMetrics(gateway).watch(dict.fromkeys(WATCHED, float))
    StepStats(worker, kv_bytes_per_token=1)
    lines = [
        NOTE + "# Metrics\n",
        "Prometheus text on the ports that `serve` prints and `headrace workers list --json` shows.\n",
    ]
    for title, registry in (("Gateway", gateway), ("Worker", worker)):
        lines += [f"## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for metric in sorted(registry.collect(), key=lambda one: one.name):
            suffix = "_total" if metric.type == "counter" else ""
            collector = registry._names_to_collectors[metric.name]
            # Ours say it themselves, the library's keep it to themselves.
            names = (
                collector.labels
                if isinstance(collector, CounterFamily | GaugeFamily | HistogramFamily)
                else ()
            )
            labels = ", ".join(names or getattr(collector, "_labelnames", ()))
            lines.append(f"| `{metric.name}{suffix}` | {metric.type} | {labels} | {metric.documentation} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    lines = [NOTE + "# Command line\n"]
    context = click.Context(main, info_name="headrace")
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        lines += _command_lines(command, click.Context(command, info_name=name, parent=context), 2)
    return "\n".join(lines) + "\n"


def _command_lines(command: click.Command, context: click.Context, depth: int) -> list[str]:
    lines = [f"{'#' * depth} {context.command_path}\n", "```", command.get_help(context), "```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            lines += _command_lines(below, click.Context(below, info_name=name, parent=context), depth + 1)
    return lines


def pages() -> dict[str, str]:
    return {
        "settings.md": settings_page(),
        "errors.md": errors_page(),
        "chat-fields.md": api_page(),
        "metrics.md": metrics_page(),
        "cli.md": cli_page(),
        "settings.schema.json": json.dumps(schema(), indent=1) + "\n",
    }


def run() -> int:
    is_check = sys.argv[1:] == ["--check"]
    stale = []
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        target = REFERENCE / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not is_check:
                target.write_text(text, encoding="utf-8")
    if is_check and stale:
        print(f"docs/reference is not what the code says: {', '.join(stale)}; run python tools/reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
