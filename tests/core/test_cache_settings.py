"""What the prefix cache may keep of a tenant, and with whom it shares: in force at once and after a restart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.clock import SystemClock
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.store.errors import StoreUnavailable


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory.open(tmp_path, SystemClock())
    yield directory
    directory.close()


def failure(call: Any, *arguments: Any, **keywords: Any) -> ControlFailure:
    with pytest.raises(ControlFailure) as refusal:
        call(*arguments, **keywords)
    return refusal.value


def test_a_new_tenant_keeps_everything_and_shares_nothing(directory: Directory) -> None:
    made = directory.create_tenant("acme", None, actor="me")
    assert (made.cache, made.shared_prefix) == ("full", None)
    assert directory.cache_of("acme") == ("full", None)


def test_changes_are_in_force_at_once(directory: Directory) -> None:
    made = directory.create_tenant("acme", None, cache="prefix_only", shared_prefix="house", actor="me")
    directory.create_tenant("other", None, actor="me")
    assert (made.cache, made.shared_prefix) == ("prefix_only", "house")
    assert directory.cache_of("acme") == ("prefix_only", "house")
    changed = directory.update_tenant("acme", cache="off", actor="me")
    assert (changed.cache, changed.shared_prefix, changed.version) == ("off", "house", 2)
    assert directory.cache_of("acme") == ("off", "house")
    changed = directory.update_tenant("acme", shared_prefix=None, actor="me")
    assert (changed.cache, changed.shared_prefix, changed.version) == ("off", None, 3)
    assert directory.cache_of("acme") == ("off", None)
    assert directory.update_tenant("acme", name="Acme", actor="me").cache == "off"
    assert directory.cache_of("acme") == ("off", None)
    assert directory.cache_of("other") == ("full", None)
    directory.update_tenant("other", cache="full", shared_prefix=None, actor="me")
    assert directory.get_tenant("other").version == 1, "nothing has changed"


def test_they_are_there_after_a_restart(directory: Directory, tmp_path: Path) -> None:
    directory.create_tenant("a", None, cache="prefix_only", shared_prefix="house", actor="me")
    directory.create_tenant("b", None, actor="me")
    changed = directory.update_tenant("b", cache="off", shared_prefix="house", actor="me")
    directory.close()
    again = Directory.open(tmp_path, SystemClock())
    assert again.cache_of("a") == ("prefix_only", "house")
    assert again.cache_of("b") == ("off", "house")
    assert again.get_tenant("b") == changed
    again.close()


def test_the_hot_path_makes_nothing_new(directory: Directory) -> None:
    directory.create_tenant("acme", None, shared_prefix="house", actor="me")
    assert directory.cache_of("acme") is directory.cache_of("acme")


@pytest.mark.parametrize("cache", ["", "FULL", "none", "prefix-only"])
def test_bad_caches(directory: Directory, cache: str) -> None:
    refusal = failure(directory.create_tenant, "acme", None, cache=cache, actor="me")
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_cache", "cache")
    assert "full, prefix_only, off" in refusal.message
    directory.create_tenant("acme", None, actor="me")
    refusal = failure(directory.update_tenant, "acme", name="New", cache=cache, actor="me")
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_cache", "cache")
    assert directory.get_tenant("acme").name is None
    assert directory.cache_of("acme") == ("full", None)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 65, "\x00", "\x85", "\ud800"])
def test_bad_names_to_share_under(directory: Directory, name: str) -> None:
    refusal = failure(directory.create_tenant, "acme", None, shared_prefix=name, actor="me")
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_shared_prefix", "shared_prefix")
    assert "1 to 64 characters" in refusal.message
    directory.create_tenant("acme", None, actor="me")
    refusal = failure(directory.update_tenant, "acme", shared_prefix=name, actor="me")
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_shared_prefix", "shared_prefix")
    assert directory.cache_of("acme") == ("full", None)


@pytest.mark.parametrize("name", ["a", "x" * 64, "ü" * 64, "The House, 2nd floor"])
def test_good_names_to_share_under(directory: Directory, name: str) -> None:
    directory.create_tenant("acme", None, shared_prefix=name, actor="me")
    assert directory.cache_of("acme") == ("full", name)


def test_the_record_of_changes_has_them(directory: Directory) -> None:
    directory.create_tenant("acme", None, cache="off", actor="key_a")
    directory.update_tenant("acme", cache="full", shared_prefix="house", actor="key_b")
    directory.update_tenant("acme", shared_prefix="house", actor="key_c")
    changes = [change for _, change in directory._store.changes() if change.subject == "acme"]
    shown = [(change.actor, change.body["cache"], change.body["shared_prefix"]) for change in changes]
    assert shown == [("key_a", "off", None), ("key_b", "full", "house")]


def test_when_the_disk_refuses_nothing_has_changed(directory: Directory) -> None:
    directory.create_tenant("acme", None, shared_prefix="house", actor="me")
    directory._store._connection.execute("PRAGMA query_only=ON")
    with pytest.raises(StoreUnavailable):
        directory.update_tenant("acme", cache="off", shared_prefix=None, actor="me")
    with pytest.raises(StoreUnavailable):
        directory.create_tenant("other", None, cache="off", actor="me")
    assert directory.cache_of("acme") == ("full", "house")
    with pytest.raises(KeyError):
        directory.cache_of("other")
