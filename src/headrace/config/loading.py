"""From file, environment and flags to one `Settings`: flags over environment over file over defaults.

A mistake is refused with the place it stands at and what is allowed; nothing is ignored.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from headrace.bounds import CHUNK_GRAIN
from headrace.config.settings import DEBUG_CELLS, EngineSettings, ModelSettings, Settings
from headrace.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "HEADRACE_"
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
NOT_SETTINGS: Final = frozenset({"HEADRACE_ADMIN_URL", "HEADRACE_ADMIN_KEY", "HEADRACE_CONFIG", DEBUG_CELLS})
"""Variables with our prefix that the command line and the workers read themselves."""


def load_settings(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    origins: Mapping[str, str] | None = None,
) -> Settings:
    """The settings. Raises `ConfigError`.

    Environment: `HEADRACE_PORT=9000`; two underscores step into a section, `HEADRACE_QUEUE__LENGTH=10`.
    Values are YAML, so numbers are numbers. `origins` names where overrides came from, for messages.
    """
    came_from = dict(origins or {})
    tree: dict[str, Any] = {} if file is None else _read(file)
    for name, value in (environment or {}).items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS and not _is_test(name):
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            came_from[".".join(path)] = name
            _put(tree, path, _value(name, value), where=name)
    for dotted, value in (overrides or {}).items():
        came_from.setdefault(dotted, f"--{dotted.split('.')[-1].replace('_', '-')}")
        _put(tree, dotted.split("."), value, where=f"--{dotted.replace('_', '-')}")
    try:
        settings = msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(_explained(str(error), file=file, came_from=came_from)) from None
    _check(settings)
    return settings


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: not YAML: {getattr(error, 'problem', error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: the file must hold settings as 'name: value' lines")
    return tree


def _value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{name}: {text!r} is not a YAML value") from None


def _put(tree: dict[str, Any], path: list[str], value: Any, *, where: str) -> None:
    for name in path[:-1]:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{where}: '{name}' is not a section")
        tree = below
    tree[path[-1]] = value


def _is_test(name: str) -> bool:
    return name.startswith("HEADRACE_TEST_")


def _explained(text: str, *, file: Path | None, came_from: Mapping[str, str]) -> str:
    """msgspec's message with the place in front, in words of whoever gave the value."""
    message, _, location = text.partition(" - at `$")
    place = location.removesuffix("`").lstrip(".")
    unknown = _UNKNOWN.search(message)
    if unknown:
        place = f"{place}.{unknown.group(1)}".lstrip(".")
        known = (
            ", ".join(Settings.__struct_fields__) if "." not in place else "see docs/reference/settings.md"
        )
        message = f"there is no such setting; known are {known}" if "." not in place else f"unknown; {known}"
    message = re.sub(
        r" matching regex '.*'", " of the form that docs/reference/settings.md describes", message
    )
    if message.startswith("Invalid enum value"):
        message += f"; allowed are {', '.join(map(repr, _allowed(place)))}"
    origin = came_from.get(place) or (str(file) if file else "")
    return ": ".join(part for part in (origin, place, message) if part)


def _allowed(place: str) -> list[Any]:
    """The values of which the setting at `place` (`models[0].engine.library`) must be one."""
    kinds = [msgspec.inspect.type_info(Settings)]
    for step in re.findall(r"\[|[^.\[\]]+(?=[.\[]|$)", place):
        below: list[msgspec.inspect.Type] = []
        for kind in kinds:
            if isinstance(kind, msgspec.inspect.StructType):
                below += [field.type for field in kind.fields if field.encode_name == step]
            elif isinstance(kind, msgspec.inspect.DictType):
                below.append(kind.value_type)
            elif isinstance(kind, msgspec.inspect.ListType):
                below.append(kind.item_type)
        kinds = [one for kind in below for one in _alternatives(kind)]
    return [value for kind in kinds if isinstance(kind, msgspec.inspect.LiteralType) for value in kind.values]


def _alternatives(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _alternatives(kind.type)
    return list(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else [kind]


def _check(settings: Settings) -> None:
    """What types and bounds cannot say."""
    seen: set[str] = set()
    for index, model in enumerate(settings.models):
        where = f"models[{index}] ({model.id})"
        if model.id in seen:
            raise ConfigError(f"{where}: there is another model with this id")
        seen.add(model.id)
        sources = [name for name in ("path", "upstream") if getattr(model, name)]
        if model.engine.stub is not None:
            sources.append("engine.stub")
        if len(sources) != 1:
            given = " and ".join(sources) or "none"
            raise ConfigError(f"{where}: exactly one of path, upstream, engine.stub must be set; {given} is")
        engine = model.engine
        if engine.max_batch_tokens < engine.max_batch_size + CHUNK_GRAIN:
            raise ConfigError(
                f"{where}: engine.max_batch_tokens must be at least engine.max_batch_size + {CHUNK_GRAIN}, "
                "or prompts could not be read in while all requests are decoding"
            )
        reserved = engine.max_batch_size * engine.max_context_tokens
        if engine.kv_tokens is not None and engine.kv_tokens > reserved:
            raise ConfigError(
                f"{where}: engine.kv_tokens may not exceed engine.max_batch_size x engine.max_context_tokens, {reserved}: "
                "more could never be in use"
            )
        if engine.reproducible:
            _check_reproducible(engine, where)
        if engine.target_step_ms > engine.idle_step_ms:
            raise ConfigError(f"{where}: engine.target_step_ms may not exceed engine.idle_step_ms")
        if model.scheduling.preemption and not model.can_preempt:
            raise ConfigError(
                f"{where}: scheduling.preemption needs an engine of ours with engine.batching: continuous; an upstream "
                "cannot be told to stop a request and go on with it, and a static batch runs to its end"
            )
        _check_degrade(settings.models, model, where)
        if sum(model.dedicated_workers.values()) >= model.workers and model.dedicated_workers:
            raise ConfigError(
                f"{where}: dedicated_workers must leave at least one of its {model.workers} workers to everybody else"
            )


def _check_degrade(models: list[ModelSettings], model: ModelSettings, where: str) -> None:
    """What stands in for a model is another one of the list, and nothing stands in for itself."""
    others = {one.id: one.degrade_to for one in models}
    chain = [model.id]
    while (following := others[chain[-1]]) is not None:
        if following not in others:
            raise ConfigError(f"{where}: degrade_to: there is no model {following!r} in this list")
        if following in chain:
            raise ConfigError(f"{where}: degrade_to leads back: {' to '.join([*chain, following])}")
        chain.append(following)


def _check_reproducible(engine: EngineSettings, where: str) -> None:
    needs = {
        "kv_layout: per_sequence": engine.kv_layout == "per_sequence",
        "flash_attention: true": engine.flash_attention,
        "threads: 1": engine.threads == 1 or engine.stub is not None,
    }
    missing = [name for name, is_met in needs.items() if not is_met]
    if missing:
        raise ConfigError(f"{where}: engine.reproducible needs engine.{', engine.'.join(missing)}")


def schema() -> dict[str, Any]:
    """The JSON schema of a configuration file."""
    document = msgspec.json.schema(Settings)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "headrace", **document}
