"""LI-2: limits of departments, users and of a tenant's models: what changes make of them, who falls under which."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import bounds
from headrace.config.limits import NO_LEVELS, UNLIMITED, LevelChanges, Limits
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.core.levels import changed

NOW_US = 1_790_000_000_123_456
EVERYTHING = Limits(
    rps=999_999.987654321,
    concurrency=10_000_000,
    streams=10_000_000,
    tpm=1_000_000_000_000,
    max_prompt_tokens=1_000_000_000_000,
    max_total_tokens=1_000_000_000_000,
    gpu_memory_gb=999_999.123456789,
)


class StubClock:
    def __init__(self) -> None:
        self.now_us = NOW_US

    def wall_us(self) -> int:
        return self.now_us

    def monotonic_us(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> StubClock:
    return StubClock()


@pytest.fixture
def directory(tmp_path: Path, clock: StubClock) -> Iterator[Directory]:
    directory = Directory.open(tmp_path, clock)
    yield directory
    directory.close()


def failure(call: Any, *arguments: Any, **keywords: Any) -> ControlFailure:
    with pytest.raises(ControlFailure) as refusal:
        call(*arguments, **keywords)
    return refusal.value


def new_key(directory: Directory, tenant: str, **fields: Any) -> str:
    return directory.create_key(tenant=tenant, actor="me", **fields).view.jti


ALL_LEVELS = LevelChanges(
    departments={"sales": {"tpm": 100}, "law": {}},
    user_limits={"rps": 1, "tpm": 10},
    users={"ann": {"tpm": 50, "streams": 2}},
    model_limits={"smol": {"concurrency": 3}},
)


def test_a_tenant_without_inner_limits_has_two_levels(directory: Directory) -> None:
    directory.create_tenant("acme", None, actor="me")
    jti = new_key(directory, "acme")
    expected = (("tenant", "acme", UNLIMITED), ("key", jti, UNLIMITED))
    assert directory.levels("acme", jti, "ann", "smol") == expected
    assert directory.department_of(jti) is None
    assert directory.department_of("key_of_a_lost_file") is None


def test_every_level_that_limits_something_is_there(directory: Directory) -> None:
    directory.create_tenant("acme", None, limits=Limits(tpm=1000), levels=ALL_LEVELS, actor="me")
    jti = new_key(directory, "acme", department="sales", limits=Limits(rps=7))
    assert directory.levels("acme", jti, "bob", "smol") == (
        ("tenant", "acme", Limits(tpm=1000)),
        ("department", "acme/sales", Limits(tpm=100)),
        ("user", "acme/bob", Limits(rps=1, tpm=10)),
        ("tenant_model", "acme/smol", Limits(concurrency=3)),
        ("key", jti, Limits(rps=7)),
    )
    assert directory.department_of(jti) == "sales"


def test_a_users_own_limits_replace_those_of_every_user_one_by_one(directory: Directory) -> None:
    directory.create_tenant("acme", None, levels=ALL_LEVELS, actor="me")
    jti = new_key(directory, "acme", department="law")
    assert directory.levels("acme", jti, "ann", "other") == (
        ("tenant", "acme", UNLIMITED),
        ("user", "acme/ann", Limits(rps=1, tpm=50, streams=2)),
        ("key", jti, UNLIMITED),
    )
    for nobody in (None, ""):
        names = [level for level, _, _ in directory.levels("acme", jti, nobody, "other")]
        assert names == ["tenant", "key"], "a department without limits and nobody's user are no level"


def test_two_tenants_never_share_an_account(directory: Directory) -> None:
    accounts = []
    for tenant in ("a", "b"):
        directory.create_tenant(tenant, None, levels=ALL_LEVELS, actor="me")
        jti = new_key(directory, tenant, department="sales")
        found = directory.levels(tenant, jti, "ann", "smol")
        accounts.append({(level, account) for level, account, _ in found})
    assert len(accounts[0]) == len(accounts[1]) == 5
    assert not accounts[0] & accounts[1]


def test_a_change_is_in_force_with_the_next_request(directory: Directory) -> None:
    directory.create_tenant("acme", None, levels=ALL_LEVELS, actor="me")
    jti = new_key(directory, "acme", department="law")
    before = directory.levels("acme", jti, "ann", "smol")
    assert directory.levels("acme", jti, "ann", "smol") is before, "resolved once"
    changes = LevelChanges(departments={"law": {"rps": 9}}, users={"ann": None}, model_limits={"smol": None})
    directory.update_tenant("acme", levels=changes, limits={"rps": 3}, actor="me")
    assert directory.levels("acme", jti, "ann", "smol") == (
        ("tenant", "acme", Limits(rps=3)),
        ("department", "acme/law", Limits(rps=9)),
        ("user", "acme/ann", Limits(rps=1, tpm=10)),
        ("key", jti, UNLIMITED),
    )


def test_what_is_remembered_of_callers_is_bounded(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "CALLERS_RESOLVED_MAX", 3)
    directory.create_tenant("acme", None, levels=ALL_LEVELS, actor="me")
    jti = new_key(directory, "acme")
    for number in range(10):
        (_, (_, account, _), _) = directory.levels("acme", jti, f"u{number}", "other")
        assert account == f"acme/u{number}"
        assert len(directory._resolved) <= 3


def test_what_is_given_is_merged_name_by_name() -> None:
    levels, entries = changed(NO_LEVELS, ALL_LEVELS)
    assert len(entries) == 4
    assert levels.departments == {"sales": Limits(tpm=100), "law": UNLIMITED}
    levels, entries = changed(
        levels,
        LevelChanges(
            departments={"sales": {"tpm": None, "rps": 2}, "law": {}, "gone": None},
            user_limits={"tpm": None},
            users={"ann": {"tpm": None, "streams": None}, "bob": {}},
            model_limits={"big": {"tpm": 0}},
        ),
    )
    assert levels.departments == {"sales": Limits(rps=2), "law": UNLIMITED}
    assert levels.user_limits == Limits(rps=1)
    assert levels.users == {}, "a user without limits of its own is no entry"
    assert levels.model_limits == {"smol": Limits(concurrency=3), "big": Limits(tpm=0)}
    assert [(entry.level, entry.name, entry.limits) for entry in entries] == [
        ("department", "sales", Limits(rps=2)),
        ("user", "ann", None),
        ("tenant_model", "big", Limits(tpm=0)),
    ]


@pytest.mark.parametrize(
    ("field", "count_max"),
    [
        ("departments", bounds.DEPARTMENTS_MAX),
        ("users", bounds.LIMITED_USERS_MAX),
        ("model_limits", bounds.LIMITED_MODELS_MAX),
    ],
)
def test_the_number_of_entries_is_bounded(field: str, count_max: int) -> None:
    full, _ = changed(NO_LEVELS, LevelChanges(**{field: {f"n{i}": {"rps": 1} for i in range(count_max)}}))
    refusal = failure(changed, full, LevelChanges(**{field: {"more": {"rps": 1}}}))
    assert (refusal.status, refusal.code, refusal.param) == (400, "too_many_entries", field)
    assert str(count_max) in refusal.message
    swapped, _ = changed(full, LevelChanges(**{field: {"more": {"rps": 1}, "n0": None}}))
    assert len(getattr(swapped, field)) == count_max


@pytest.mark.parametrize("field", ["departments", "users", "model_limits"])
@pytest.mark.parametrize("name", ["", "a\nb", "x" * 257, "\u00e9" * 129, "\ud800", "\x00"])
def test_bad_names(directory: Directory, field: str, name: str) -> None:
    for values in ({"rps": 1}, None):
        changes = LevelChanges(**{field: {name: values}})  # type: ignore[dict-item]
        refusal = failure(directory.create_tenant, "acme", None, levels=changes, actor="me")
        assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_entry", field)
    assert directory.list_tenants() == ([], False)


def test_values_out_of_range_name_their_entry() -> None:
    refusal = failure(changed, NO_LEVELS, LevelChanges(users={"ann": {"rps": -1}}))
    assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_value", "users.ann")
    refusal = failure(changed, NO_LEVELS, LevelChanges(user_limits={"rsp": 1}))
    assert (refusal.code, refusal.param) == ("invalid_value", "user_limits")


def test_a_keys_department_has_to_be_the_tenants(directory: Directory) -> None:
    directory.create_tenant("acme", None, levels=ALL_LEVELS, actor="me")
    directory.create_tenant("other", None, actor="me")
    for tenant, department in (("acme", "none"), ("other", "sales"), ("acme", "")):
        refusal = failure(directory.create_key, tenant=tenant, department=department, actor="me")
        assert (refusal.status, refusal.code, refusal.param) == (404, "department_not_found", "department")
    assert directory.list_keys() == ([], False)


def test_a_department_with_keys_in_force_stays(directory: Directory, clock: StubClock) -> None:
    directory.create_tenant("acme", None, levels=ALL_LEVELS, actor="me")
    directory.create_tenant("other", None, levels=ALL_LEVELS, actor="me")
    new_key(directory, "other", department="sales")
    keys = [new_key(directory, "acme", department="sales", expires_in_s=60) for _ in range(2)]
    gone = LevelChanges(departments={"sales": None, "law": None})
    refusal = failure(directory.update_tenant, "acme", levels=gone, name="New", actor="me")
    assert (refusal.status, refusal.code, refusal.param) == (409, "department_in_use", "departments")
    assert "'sales' (2)" in refusal.message
    assert "law" not in refusal.message
    kept = directory.get_tenant("acme")
    assert (kept.name, kept.version, set(kept.departments)) == (None, 1, {"sales", "law"})
    directory.revoke_key(keys[0], actor="me")
    assert "'sales' (1)" in failure(directory.update_tenant, "acme", levels=gone, actor="me").message
    clock.now_us += 61_000_000
    assert directory.update_tenant("acme", levels=gone, actor="me").departments == {}
    assert directory.levels("acme", keys[1], None, "other") == (
        ("tenant", "acme", UNLIMITED),
        ("key", keys[1], UNLIMITED),
    )


def test_departments_and_limits_are_there_after_a_restart(
    directory: Directory, tmp_path: Path, clock: StubClock
) -> None:
    made = directory.create_tenant("acme", None, levels=ALL_LEVELS, actor="me")
    jti = new_key(directory, "acme", department="sales")
    before = directory.levels("acme", jti, "ann", "smol")
    directory.close()
    again = Directory.open(tmp_path, clock)
    assert again.get_tenant("acme") == made
    assert again.list_keys()[0][0].department == "sales"
    assert again.levels("acme", jti, "ann", "smol") == before
    again.close()


def test_the_record_of_changes_has_what_changed(directory: Directory) -> None:
    directory.create_tenant("acme", None, levels=ALL_LEVELS, actor="me")
    changes = LevelChanges(departments={"law": None, "sales": {}}, users={"bob": {"rps": 2}})
    assert directory.update_tenant("acme", levels=changes, actor="me").version == 2
    assert directory.update_tenant("acme", levels=changes, actor="me").version == 2
    jti = new_key(directory, "acme", department="sales")
    created, updated, key = (change.body for _, change in directory._store.changes()[1:])
    assert created["departments"] == {"law": {}, "sales": {"tpm": 100}}
    assert created["model_limits"] == {"smol": {"concurrency": 3}}
    assert updated["departments"] == {"law": None}
    assert updated["users"] == {"bob": {"rps": 2.0}}
    assert updated["user_limits"] == {"rps": 1.0, "tpm": 10}
    assert "model_limits" not in updated
    assert key["department"] == "sales"
    assert jti in directory._keys


def test_what_is_stored_is_what_is_in_memory_after_any_changes(
    directory: Directory, tmp_path: Path, clock: StubClock
) -> None:
    directory._store._connection.execute("PRAGMA synchronous=OFF")
    directory.create_tenant("acme", None, actor="me")
    dice = random.Random(7)

    def some_limits() -> dict[str, int | float | None]:
        return {
            name: dice.choice([None, 1, 2])
            for name in dice.sample(Limits.__struct_fields__, dice.randint(0, 2))
        }

    for _ in range(300):
        fields: dict[str, Any] = {
            field: {dice.choice("abc"): dice.choice([None, some_limits(), some_limits()])}
            for field in dice.sample(["departments", "users", "model_limits"], dice.randint(0, 3))
        }
        directory.update_tenant("acme", levels=LevelChanges(user_limits=some_limits(), **fields), actor="me")
    before = directory.get_tenant("acme")
    assert before.version > 100
    directory.close()
    again = Directory.open(tmp_path, clock)
    assert again.get_tenant("acme") == before
    again.close()


def test_large_tenants_make_pages_shorter(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "TENANT_PAGE_ENTRIES_MAX", 5)
    for tenant, users in (("a", 2), ("b", 3), ("c", 9), ("d", 0), ("e", 0)):
        changes = LevelChanges(users={f"u{i}": {"rps": 1} for i in range(users)})
        directory.create_tenant(tenant, None, levels=changes, actor="me")
    pages = []
    after, has_more = None, True
    while has_more:
        page, has_more = directory.list_tenants(after=after)
        pages.append([tenant.id for tenant in page])
        after = page[-1].id
    assert pages == [["a", "b"], ["c"], ["d", "e"]]


def test_a_page_of_the_largest_entries_fits_into_a_frame() -> None:
    assert len(msgspec.msgpack.encode(EVERYTHING)) <= bounds.LIMITS_BYTES_MAX
    users = {f"{i:0256}": EVERYTHING for i in range(bounds.TENANT_PAGE_ENTRIES_MAX)}
    tenants = 1000 * 2 * bounds.KIB
    assert len(msgspec.msgpack.encode(users)) + tenants < bounds.FRAME_BYTES_MAX
