"""Settings from file, environment and flags; every mistake is named."""

from pathlib import Path

import pytest

from headrace.config.loading import load_settings, schema
from headrace.errors import ConfigError


def test_defaults_need_nothing() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.models) == ("127.0.0.1", 8080, [])


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nadmin_port: 1\nqueue: {length: 1, timeout_s: 9}\n")
    environment = {"HEADRACE_PORT": "2", "HEADRACE_QUEUE__LENGTH": "2", "OTHER": "x"}
    settings = load_settings(file=file, environment=environment, overrides={"port": 3, "log.level": "error"})
    assert (settings.port, settings.admin_port, settings.log.level) == (3, 1, "error")
    assert (settings.queue.length, settings.queue.timeout_s) == (2, 9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "prot"),
        ("port: x", "port: "),
        ("port: 70000", "port: "),
        ("- 1", "name: value"),
        ("a: [", "line"),
        ("queue: {length: -1}", "queue.length: "),
        ("models: [{id: a, path: x, workers: 0}]", "models[0].workers: "),
        ("models: [{id: 'a b', path: x}]", "models[0].id: "),
        ("models: [{id: a, path: x, upstream: 'http://h/v1'}]", "exactly one of"),
        ("models: [{id: a, upstream: 'ftp://h'}]", "models[0].upstream: "),
        ("models: [{id: a, path: x, engine: {max_batch_size: 128, max_batch_tokens: 64}}]", "max_batch_tokens"),
        ("models: [{id: a, path: x, engine: {target_step_ms: 900, idle_step_ms: 100}}]", "idle_step_ms"),
        ("models: [{id: a, path: x, workers: 2, dedicated_workers: {t: 2}}]", "dedicated_workers"),
        ("models: [{id: a, path: x, degrade_to: b}]", "no model 'b'"),
        ("models: [{id: a, path: x, engine: {library: nativ}}]", "'nativ'; allowed are 'native', 'wheel'"),
        ("log: {level: loud}", "'loud'; allowed are 'debug', 'error', 'info', 'warning'"),
        ("models: [{id: a, path: x, scheduling: {scheduler_policy: lottery}}]", "'priority', 'shortest-remaining'"),
        ("models: [{id: a, path: x, degrade_to: b}, {id: b, path: x, degrade_to: a}]", "a to b to a"),
        ("models: [{id: a, upstream: 'http://h/v1', scheduling: {preemption: true}}]", "scheduling.preemption"),
        ("models: [{id: a, path: x, engine: {batching: static}, scheduling: {preemption: true}}]", "preemption"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_are_named_with_their_place(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(file=file)
    assert says in str(refused.value)
    assert str(file) in str(refused.value) or "models[" in str(refused.value)


def test_a_missing_file_and_a_typo_in_the_environment_are_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_settings(file=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="prot"):
        load_settings(environment={"HEADRACE_PROT": "1"})
    with pytest.raises(ConfigError, match="not a section"):
        load_settings(environment={"HEADRACE_PORT": "1", "HEADRACE_PORT__X": "2"})


def test_the_schema_refuses_what_the_loader_refuses() -> None:
    assert schema()["$ref"].endswith("Settings")
    assert schema()["$defs"]["Settings"]["additionalProperties"] is False


def test_reproducible_answers_need_what_they_were_verified_with() -> None:
    wrong = {"reproducible": True, "threads": 2, "flash_attention": False}
    model = {"id": "m", "path": "builtin", "engine": wrong}
    with pytest.raises(ConfigError, match=r"engine\.flash_attention: true, engine\.threads: 1"):
        load_settings(overrides={"models": [model]})
    right = {"reproducible": True, "threads": 1}
    assert load_settings(overrides={"models": [model | {"engine": right}]}).models[0].engine.reproducible
