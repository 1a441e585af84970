"""CF-2, AU-6: control data with a record of every change, and no key in it."""

import sqlite3
import stat
from pathlib import Path

import msgspec
import pytest

from headrace.config.limits import Limits, TenantLevels
from headrace.errors import SetupError
from headrace.store.control import _SCHEMA, Change, ControlStore, Key, LevelEntry, Tenant
from headrace.store.errors import StoreUnavailable
from headrace.store.sqlite import open_database

TENANT = Tenant(id="demo", name="Demo", status="active", created_us=1, updated_us=1, version=1)
KEY = Key(
    jti="key_1",
    kind="tenant",
    tenant="demo",
    user="ann",
    name=None,
    scopes=("chat:read", "chat:stream"),
    kid="kid_1",
    created_us=1,
    expires_us=2,
)


def change(action: str, at_us: int = 5) -> Change:
    return Change(at_us=at_us, actor="key_admin", action=action, subject="x", body={"a": 1})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "control.db"


def test_what_was_saved_is_there_after_a_restart(path: Path) -> None:
    store = ControlStore.open(path)
    store.save_tenant(TENANT, change("tenant.created"))
    store.add_key(KEY, change("key.created"))
    store.add_signing_key("kid_1", "AAAA", change("signing_key.created"))
    store.close()
    store = ControlStore.open(path)
    assert store.tenants() == [TENANT]
    assert store.api_keys() == [KEY]
    assert store.public_keys() == {"kid_1": "AAAA"}
    assert [(seq, done.action) for seq, done in store.changes()] == [
        (1, "tenant.created"),
        (2, "key.created"),
        (3, "signing_key.created"),
    ]
    assert store.changes(after=2)[0][1] == change("signing_key.created")
    store.close()


def test_a_file_from_before_departments_keeps_what_it_has(path: Path) -> None:
    old = open_database(path, _SCHEMA[:2], synchronous="FULL")
    old.execute("INSERT INTO tenants VALUES ('demo', 'Demo', 'active', 1, 1, 1, '{\"tpm\": 9}')")
    old.execute(
        "INSERT INTO keys VALUES (1, 'key_1', 'tenant', 'demo', 'ann', NULL, '[\"chat:read\"]', 'kid_1', 1, 2, NULL,"
        " '{\"rps\": 2.5}')"
    )
    old.execute("INSERT INTO changes VALUES (1, 1, 'me', 'tenant.created', 'demo', '{}')")
    old.close()
    store = ControlStore.open(path)
    (tenant,) = store.tenants()
    assert tenant == msgspec.structs.replace(TENANT, limits=Limits(tpm=9))
    (key,) = store.api_keys()
    assert key == msgspec.structs.replace(KEY, scopes=("chat:read",), limits=Limits(rps=2.5))
    entry = LevelEntry(level="department", name="sales", limits=Limits())
    store.save_tenant(tenant, change("tenant.updated"), [entry])
    store.add_key(msgspec.structs.replace(key, jti="key_2", department="sales"), change("key.created"))
    store.close()
    store = ControlStore.open(path)
    assert store.tenants()[0].levels == TenantLevels(departments={"sales": Limits()})
    assert [key.department for key in store.api_keys()] == [None, "sales"]
    assert [done.action for _, done in store.changes()] == ["tenant.created", "tenant.updated", "key.created"]
    store.close()


def test_a_file_from_before_cache_settings_keeps_what_it_has(path: Path) -> None:
    old = open_database(path, _SCHEMA[:3], synchronous="FULL")
    old.execute(
        "INSERT INTO tenants VALUES ('demo', 'Demo', 'active', 1, 1, 1, '{\"tpm\": 9}', '{\"rps\": 1.5}')"
    )
    old.execute("INSERT INTO tenants VALUES ('other', NULL, 'disabled', 1, 2, 3, '{}', '{}')")
    old.execute("""INSERT INTO tenant_levels VALUES ('demo', 'department', 'sales', '{"tpm": 5}')""")
    old.execute("INSERT INTO changes VALUES (1, 1, 'me', 'tenant.created', 'demo', '{}')")
    old.close()
    store = ControlStore.open(path)
    demo, other = store.tenants()
    levels = TenantLevels(departments={"sales": Limits(tpm=5)}, user_limits=Limits(rps=1.5))
    assert demo == msgspec.structs.replace(TENANT, limits=Limits(tpm=9), levels=levels)
    assert (demo.cache, demo.shared_prefix) == ("full", None)
    assert (other.status, other.version, other.cache, other.shared_prefix) == ("disabled", 3, "full", None)
    demo = msgspec.structs.replace(demo, cache="prefix_only", shared_prefix="Ünited")
    store.save_tenant(demo, change("tenant.updated"))
    store.close()
    store = ControlStore.open(path)
    assert store.tenants() == [demo, other]
    assert [done.action for _, done in store.changes()] == ["tenant.created", "tenant.updated"]
    store.close()


def test_cache_settings_are_replaced_and_taken_away(path: Path) -> None:
    store = ControlStore.open(path)
    tenant = msgspec.structs.replace(TENANT, cache="off", shared_prefix="house")
    store.save_tenant(tenant, change("tenant.created"))
    assert store.tenants() == [tenant]
    store.save_tenant(TENANT, change("tenant.updated"))
    assert store.tenants() == [TENANT]
    unknown = msgspec.structs.replace(TENANT, cache="some")  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        store.save_tenant(unknown, change("tenant.updated"))
    assert store.tenants() == [TENANT]
    store.close()


def test_of_departments_users_and_models_only_what_changed_is_written(path: Path) -> None:
    store = ControlStore.open(path)
    for tenant in ("a", "b"):
        levels = TenantLevels(user_limits=Limits(rps=1))
        store.save_tenant(
            msgspec.structs.replace(TENANT, id=tenant, levels=levels),
            change("tenant.created"),
            [
                LevelEntry(level="department", name="x", limits=Limits()),
                LevelEntry(level="user", name="x", limits=Limits(tpm=5)),
                LevelEntry(level="tenant_model", name="x", limits=Limits(streams=0)),
            ],
        )
    changes = [
        LevelEntry(level="user", name="x", limits=None),
        LevelEntry(level="tenant_model", name="x", limits=Limits(rps=0.5)),
        LevelEntry(level="tenant_model", name="y", limits=Limits(concurrency=3)),
    ]
    store.save_tenant(msgspec.structs.replace(TENANT, id="b"), change("tenant.updated"), changes)
    store.close()
    store = ControlStore.open(path)
    a, b = (tenant.levels for tenant in store.tenants())
    assert a == TenantLevels(
        departments={"x": Limits()},
        user_limits=Limits(rps=1),
        users={"x": Limits(tpm=5)},
        model_limits={"x": Limits(streams=0)},
    )
    assert b == TenantLevels(
        departments={"x": Limits()},
        model_limits={"x": Limits(rps=0.5), "y": Limits(concurrency=3)},
    )
    store.close()


def test_a_tenant_is_saved_with_all_its_entries_or_not_at_all(path: Path) -> None:
    store = ControlStore.open(path)
    store.save_tenant(TENANT, change("tenant.created"))
    entries = [
        LevelEntry(level="user", name="x", limits=Limits(tpm=5)),
        LevelEntry(level="planet", name="x", limits=Limits(tpm=5)),  # type: ignore[arg-type]
    ]
    with pytest.raises(StoreUnavailable):
        store.save_tenant(msgspec.structs.replace(TENANT, name="New"), change("tenant.updated"), entries)
    assert store.tenants() == [TENANT]
    assert len(store.changes()) == 1
    store.close()


def test_the_first_revocation_stays(path: Path) -> None:
    store = ControlStore.open(path)
    store.add_key(KEY, change("key.created"))
    store.revoke_key("key_1", change("key.revoked", at_us=7))
    store.revoke_key("key_1", change("key.revoked", at_us=9))
    assert [key.revoked_us for key in store.api_keys()] == [7]
    store.close()


def test_retired_signing_keys_are_not_listed(path: Path) -> None:
    store = ControlStore.open(path)
    store.add_signing_key("kid_1", "AAAA", change("signing_key.created"))
    store.add_signing_key("kid_2", "BBBB", change("signing_key.created", at_us=6))
    store.retire_signing_key("kid_1", change("signing_key.retired"))
    assert store.public_keys() == {"kid_2": "BBBB"}
    store.close()


def test_a_change_that_fails_leaves_nothing(path: Path) -> None:
    store = ControlStore.open(path)
    store.add_key(KEY, change("key.created"))
    with pytest.raises(StoreUnavailable):
        store.add_key(KEY, change("key.created"))
    assert store.api_keys() == [KEY]
    assert len(store.changes()) == 1
    store.save_tenant(TENANT, change("tenant.created"))
    assert store.tenants() == [TENANT], "the store is of use after a failure"
    store.close()


@pytest.mark.parametrize("statement", ["UPDATE changes SET actor = 'me'", "DELETE FROM changes"])
def test_the_record_of_changes_cannot_be_edited(path: Path, statement: str) -> None:
    store = ControlStore.open(path)
    store.save_tenant(TENANT, change("tenant.created"))
    store.close()
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(statement)
    connection.close()


def test_a_newer_schema_is_refused(path: Path) -> None:
    ControlStore.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO schema_version VALUES (1000)")
    connection.commit()
    connection.close()
    with pytest.raises(SetupError, match="schema version 1000, written by a newer headrace"):
        ControlStore.open(path)


def test_a_damaged_file_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\x00garbage" * 1000)
    with pytest.raises(SetupError, match="cannot use"):
        ControlStore.open(path)


def test_a_folder_in_its_place_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(SetupError, match="cannot open"):
        ControlStore.open(path)


def test_only_the_owner_can_read_it(path: Path) -> None:
    store = ControlStore.open(path)
    store.save_tenant(TENANT, change("tenant.created"))
    modes = {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store.close()
