"""AU-4, AU-6, AU-7, CF-2: tenants and keys, in force at once and after a restart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import bounds
from headrace.core.checks import KEY_LIFETIME_SECONDS_DEFAULT, KEY_LIFETIME_SECONDS_MAX
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.core.messages import Failure
from headrace.identity import ADMIN_KEY, DEFAULT_SCOPES, InvalidKey, KeyVerifier, UnknownScope
from headrace.store.errors import StoreUnavailable

NOW_US = 1_790_000_000_123_456


class StubClock:
    def __init__(self) -> None:
        self.now_us = NOW_US

    def wall_us(self) -> int:
        return self.now_us

    def monotonic_us(self) -> int:
        return self.now_us


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory.open(tmp_path, StubClock())
    yield directory
    directory.close()


def reopened(directory: Directory, tmp_path: Path) -> Directory:
    directory.close()
    return Directory.open(tmp_path, StubClock())


def failure(call: Any, *arguments: Any, **keywords: Any) -> ControlFailure:
    with pytest.raises(ControlFailure) as refusal:
        call(*arguments, **keywords)
    return refusal.value


def test_tenants_are_kept(directory: Directory, tmp_path: Path) -> None:
    made = directory.create_tenant("demo", "Demo", actor="me")
    assert (made.id, made.name, made.status, made.version) == ("demo", "Demo", "active", 1)
    assert made.created_ts == made.updated_ts == NOW_US
    changed = directory.update_tenant("demo", name=None, status="disabled", actor="me")
    assert (changed.name, changed.status, changed.version) == (None, "disabled", 2)
    again = reopened(directory, tmp_path)
    assert again.get_tenant("demo") == changed
    again.close()


@pytest.mark.parametrize("tenant_id", ["a", "0", "team-a_1", "a" * 63])
def test_good_tenant_ids(directory: Directory, tenant_id: str) -> None:
    assert directory.create_tenant(tenant_id, None, actor="me").id == tenant_id


@pytest.mark.parametrize(
    "tenant_id", ["", "A", "-a", "_a", "a b", "a/b", "..", "a" * 64, "a\n", "\u0663", "@admin", "\ud800"]
)
def test_bad_tenant_ids(directory: Directory, tenant_id: str) -> None:
    refusal = failure(directory.create_tenant, tenant_id, None, actor="me")
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_tenant_id", "id")
    assert directory.list_tenants() == ([], False)


def test_a_tenant_is_made_once(directory: Directory) -> None:
    directory.create_tenant("demo", None, actor="me")
    refusal = failure(directory.create_tenant, "demo", None, actor="me")
    assert refusal.as_message() == Failure(
        status=409, code="tenant_exists", message="there is already a tenant 'demo'", param="id"
    )


def test_unknown_tenants(directory: Directory) -> None:
    for refusal in (
        failure(directory.get_tenant, "x"),
        failure(directory.update_tenant, "x", name="y", actor="me"),
        failure(directory.create_key, tenant="x", actor="me"),
        failure(directory.list_keys, tenant="x"),
    ):
        assert (refusal.status, refusal.code) == (404, "tenant_not_found")


@pytest.mark.parametrize("status", ["", "frozen", "ACTIVE"])
def test_bad_statuses(directory: Directory, status: str) -> None:
    directory.create_tenant("demo", None, actor="me")
    assert failure(directory.update_tenant, "demo", status=status, actor="me").param == "status"


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 129, "\x00", "\ud800"])
def test_bad_names(directory: Directory, name: str) -> None:
    assert failure(directory.create_tenant, "demo", name, actor="me").param == "name"
    directory.create_tenant("demo", None, actor="me")
    assert failure(directory.create_key, tenant="demo", name=name, actor="me").param == "name"
    assert failure(directory.create_admin_key, name=name, actor="me").param == "name"


def test_tenants_come_in_pages(directory: Directory) -> None:
    for tenant_id in ("c", "a", "b"):
        directory.create_tenant(tenant_id, None, actor="me")
    page, has_more = directory.list_tenants(limit=2)
    assert ([tenant.id for tenant in page], has_more) == (["a", "b"], True)
    page, has_more = directory.list_tenants(after="b", limit=2)
    assert ([tenant.id for tenant in page], has_more) == (["c"], False)
    assert failure(directory.list_tenants, limit=0).param == "limit"
    assert failure(directory.list_tenants, limit=1001).param == "limit"


def test_a_new_key_verifies_with_the_public_keys_alone(directory: Directory) -> None:
    directory.create_tenant("demo", None, actor="me")
    issued = directory.create_key(tenant="demo", user="ann", name="laptop", expires_in_s=60, actor="me")
    identity = KeyVerifier(directory.keyring.public_keys).verify(issued.key, NOW_US)
    assert (identity.tenant, identity.user, identity.jti) == ("demo", "ann", issued.view.jti)
    assert identity.scopes == frozenset(DEFAULT_SCOPES)
    assert identity.expires_us == issued.view.expires_ts
    assert 60_000_000 <= issued.view.expires_ts - NOW_US < 61_000_000
    directory.authorize(identity)


def test_the_key_itself_is_nowhere_on_disk(directory: Directory, tmp_path: Path) -> None:
    directory.create_tenant("demo", None, actor="me")
    issued = directory.create_key(tenant="demo", actor="me")
    parts = issued.key.removeprefix("hr_live_").split(".")
    for file in tmp_path.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert all(part.encode() not in content for part in parts)


def test_key_lifetimes(directory: Directory) -> None:
    directory.create_tenant("demo", None, actor="me")
    view = directory.create_key(tenant="demo", actor="me").view
    assert 0 <= view.expires_ts - NOW_US - KEY_LIFETIME_SECONDS_DEFAULT * 1_000_000 < 1_000_000
    for seconds in (0, -1, KEY_LIFETIME_SECONDS_MAX + 1):
        refusal = failure(directory.create_key, tenant="demo", expires_in_s=seconds, actor="me")
        assert (refusal.status, refusal.param) == (400, "expires_in_s")
    assert directory.create_key(tenant="demo", expires_in_s=KEY_LIFETIME_SECONDS_MAX, actor="me")


def test_unknown_scopes_are_refused_with_those_allowed(directory: Directory) -> None:
    directory.create_tenant("demo", None, actor="me")
    refusal = failure(directory.create_key, tenant="demo", scopes=("chat:everything",), actor="me")
    assert (refusal.status, refusal.param) == (400, "scopes")
    assert "chat:stream" in refusal.message
    assert isinstance(refusal.__cause__, UnknownScope)
    assert failure(directory.create_key, tenant="demo", scopes=("admin:*",), actor="me").param == "scopes"


@pytest.mark.parametrize("user", ["", "a\nb", "x" * 257, "\u00e9" * 129, "\ud800"])
def test_bad_users(directory: Directory, user: str) -> None:
    directory.create_tenant("demo", None, actor="me")
    assert failure(directory.create_key, tenant="demo", user=user, actor="me").param == "user"


def test_the_largest_key_fits_the_bound(directory: Directory) -> None:
    directory.create_tenant("a" * 63, None, actor="me")
    scopes = ("chat:read", "chat:stream", "embeddings:read", "jobs:write", "audit:read", "usage:read")
    issued = directory.create_key(
        tenant="a" * 63,
        user="\U0001f600" * 64,
        scopes=scopes,
        expires_in_s=KEY_LIFETIME_SECONDS_MAX,
        actor="me",
    )
    assert len(issued.key) < bounds.KEY_BYTES_MAX // 2


def test_revocation_is_in_force_at_once_and_for_good(directory: Directory, tmp_path: Path) -> None:
    directory.create_tenant("demo", None, actor="me")
    issued = directory.create_key(tenant="demo", actor="me")
    identity = KeyVerifier(directory.keyring.public_keys).verify(issued.key, NOW_US)
    directory.authorize(identity)
    assert directory.revoke_key(issued.view.jti, actor="me").revoked_ts == NOW_US
    assert directory.revoke_key(issued.view.jti, actor="me").revoked_ts == NOW_US
    for current in (directory, reopened(directory, tmp_path)):
        with pytest.raises(InvalidKey, match="revoked"):
            current.authorize(identity)
    assert failure(current.revoke_key, "key_x", actor="me").code == "key_not_found"
    current.close()


def test_a_disabled_tenants_keys_are_refused_until_it_is_active_again(
    directory: Directory, tmp_path: Path
) -> None:
    directory.create_tenant("demo", None, actor="me")
    issued = directory.create_key(tenant="demo", actor="me")
    identity = KeyVerifier(directory.keyring.public_keys).verify(issued.key, NOW_US)
    directory.update_tenant("demo", status="disabled", actor="me")
    with pytest.raises(InvalidKey, match="tenant_disabled"):
        directory.authorize(identity)
    again = reopened(directory, tmp_path)
    with pytest.raises(InvalidKey, match="tenant_disabled"):
        again.authorize(identity)
    again.update_tenant("demo", status="active", actor="me")
    again.authorize(identity)
    again.close()


def test_a_well_signed_key_that_is_not_on_record_is_refused(directory: Directory, tmp_path: Path) -> None:
    directory.create_tenant("demo", None, actor="me")
    issued = directory.create_key(tenant="demo", actor="me")
    identity = KeyVerifier(directory.keyring.public_keys).verify(issued.key, NOW_US)
    directory.close()
    for file in tmp_path.glob("control.db*"):
        file.unlink()
    fresh = Directory.open(tmp_path, StubClock())
    fresh.create_tenant("demo", None, actor="me")
    assert KeyVerifier(fresh.keyring.public_keys).verify(issued.key, NOW_US) == identity
    with pytest.raises(InvalidKey):
        fresh.authorize(identity)
    fresh.close()


def test_admin_keys_and_tenants_keys_do_not_mix(directory: Directory) -> None:
    directory.create_tenant("demo", None, actor="me")
    tenants = directory.create_key(tenant="demo", actor="me")
    admins = directory.create_admin_key(name="cli", actor="me")
    identity = KeyVerifier(directory.keyring.public_keys, ADMIN_KEY).verify(admins.key, NOW_US)
    assert identity.scopes == frozenset({"admin:*"})
    directory.authorize_admin(admins.view.jti)
    with pytest.raises(InvalidKey):
        directory.authorize(identity)
    with pytest.raises(InvalidKey):
        directory.authorize_admin(tenants.view.jti)
    assert (admins.view.kind, admins.view.tenant) == ("admin", "")
    directory.revoke_key(admins.view.jti, actor="me")
    with pytest.raises(InvalidKey):
        directory.authorize_admin(admins.view.jti)


def test_keys_come_in_pages_oldest_first(directory: Directory) -> None:
    for tenant_id in ("a", "b"):
        directory.create_tenant(tenant_id, None, actor="me")
    made = [directory.create_key(tenant="ab"[i % 2], actor="me").view for i in range(5)]
    assert directory.list_keys() == (made, False)
    assert directory.list_keys(tenant="a", limit=2) == ([made[0], made[2]], True)
    assert directory.list_keys(tenant="a", limit=2, after=made[2].jti) == ([made[4]], False)
    assert directory.list_keys(after=made[4].jti) == ([], False)
    assert failure(directory.list_keys, after="key_x").param == "after"


def test_every_change_is_on_record_with_who_did_it(directory: Directory) -> None:
    directory.create_tenant("demo", None, actor="key_a")
    directory.update_tenant("demo", status="disabled", actor="key_b")
    directory.update_tenant("demo", status="disabled", actor="key_b")
    issued = directory.create_key(tenant="demo", actor="key_c")
    directory.revoke_key(issued.view.jti, actor="key_d")
    done = [(change.actor, change.action, change.subject) for _, change in directory._store.changes()]
    assert done == [
        ("core", "signing_key.created", directory.keyring.active.kid),
        ("key_a", "tenant.created", "demo"),
        ("key_b", "tenant.updated", "demo"),
        ("key_c", "key.created", issued.view.jti),
        ("key_d", "key.revoked", issued.view.jti),
    ]


def test_signing_keys_rotate_and_retire(directory: Directory, tmp_path: Path) -> None:
    directory.create_tenant("demo", None, actor="me")
    old_kid = directory.keyring.active.kid
    old = directory.create_key(tenant="demo", actor="me")
    new_kid = directory.keyring.rotate("me")
    new = directory.create_key(tenant="demo", actor="me")
    verifier = KeyVerifier(directory.keyring.public_keys)
    assert verifier.verify(old.key, NOW_US).jti == old.view.jti
    assert verifier.verify(new.key, NOW_US).jti == new.view.jti
    with pytest.raises(ControlFailure, match="active"):
        directory.keyring.retire(new_kid, "me")
    with pytest.raises(ControlFailure, match="no signing key"):
        directory.keyring.retire("x", "me")
    directory.keyring.retire(old_kid, "me")
    again = reopened(directory, tmp_path)
    assert set(again.keyring.public_keys) == {new_kid} == set(again.keyring.encoded_public_keys())
    with pytest.raises(InvalidKey, match="unknown_kid"):
        KeyVerifier(again.keyring.public_keys).verify(old.key, NOW_US)
    again.close()


def test_a_lost_private_key_is_replaced_and_old_keys_stay_valid(directory: Directory, tmp_path: Path) -> None:
    directory.create_tenant("demo", None, actor="me")
    old = directory.create_key(tenant="demo", actor="me")
    (tmp_path / "secrets" / "signing-key.pem").unlink()
    again = reopened(directory, tmp_path)
    assert len(again.keyring.public_keys) == 2
    verifier = KeyVerifier(again.keyring.public_keys)
    again.authorize(verifier.verify(old.key, NOW_US))
    again.authorize(verifier.verify(again.create_key(tenant="demo", actor="me").key, NOW_US))
    again.close()


def test_when_the_disk_refuses_nothing_has_changed(directory: Directory) -> None:
    directory.create_tenant("demo", None, actor="me")
    issued = directory.create_key(tenant="demo", actor="me")
    identity = KeyVerifier(directory.keyring.public_keys).verify(issued.key, NOW_US)
    directory._store._connection.execute("PRAGMA query_only=ON")
    for call in (
        lambda: directory.create_tenant("other", None, actor="me"),
        lambda: directory.update_tenant("demo", status="disabled", actor="me"),
        lambda: directory.create_key(tenant="demo", actor="me"),
        lambda: directory.revoke_key(issued.view.jti, actor="me"),
    ):
        with pytest.raises(StoreUnavailable):
            call()
    directory.authorize(identity)
    assert [tenant.id for tenant in directory.list_tenants()[0]] == ["demo"]
    assert len(directory.list_keys()[0]) == 1
