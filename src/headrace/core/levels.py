"""The levels inside a tenant: what a change makes of them, and which of them a request falls under."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

import msgspec

from headrace import bounds
from headrace.config.limits import (
    UNLIMITED,
    InnerLevel,
    Level,
    LevelChanges,
    Limits,
    LimitValues,
    TenantLevels,
)
from headrace.core import checks
from headrace.core.failure import ControlFailure
from headrace.store.control import Key, LevelEntry, Tenant

CallerLevels = tuple[tuple[Level, str, Limits], ...]
"""(level, account, limits), from the tenant down to the key. No two tenants share an account."""

_Field = Literal["departments", "users", "model_limits"]
_FIELDS: Final[tuple[tuple[_Field, InnerLevel, int, Callable[[str, str], None]], ...]] = (
    ("departments", "department", bounds.DEPARTMENTS_MAX, checks.check_department),
    ("users", "user", bounds.LIMITED_USERS_MAX, checks.check_limited_user),
    ("model_limits", "tenant_model", bounds.LIMITED_MODELS_MAX, checks.check_limited_model),
)


def changed(old: TenantLevels, changes: LevelChanges) -> tuple[TenantLevels, list[LevelEntry]]:
    """The levels with these changes, and the entries that are not what they were.

    Raises `ControlFailure` 400 for names and values that cannot be, and for too many entries.
    """
    entries: list[LevelEntry] = []
    fields: dict[str, dict[str, Limits]] = {}
    for field, level, count_max, check in _FIELDS:
        new, found = _changed_entries(getattr(old, field), getattr(changes, field), field, level, check)
        if len(new) > count_max and len(new) > len(getattr(old, field)):
            raise ControlFailure(
                400, "too_many_entries", f"{field}: a tenant has at most {count_max} of them", field
            )
        fields[field] = new
        entries += found
    user_limits = checks.merged_limits(old.user_limits, changes.user_limits, "user_limits")
    return TenantLevels(user_limits=user_limits, **fields), entries


def _changed_entries(
    old: dict[str, Limits],
    changes: Mapping[str, LimitValues | None],
    field: _Field,
    level: InnerLevel,
    check: Callable[[str, str], None],
) -> tuple[dict[str, Limits], list[LevelEntry]]:
    if not changes:
        return old, []
    new = dict(old)
    for name, values in changes.items():
        check(name, field)
        if values is None:
            new.pop(name, None)
            continue
        limits = checks.merged_limits(old.get(name, UNLIMITED), values, f"{field}.{name}")
        if limits == UNLIMITED and level != "department":
            new.pop(name, None)  # a department is there without limits too, the others only for their limits
        else:
            new[name] = limits
    return new, [
        LevelEntry(level=level, name=name, limits=new.get(name))
        for name in changes
        if new.get(name) != old.get(name)
    ]


def check_gone_departments(tenant: str, entries: list[LevelEntry], keys: Iterable[Key], now_us: int) -> None:
    """Raises `ControlFailure` 409 when one of the entries takes away a department that keys in force name."""
    gone = {entry.name for entry in entries if entry.level == "department" and entry.limits is None}
    if not gone:
        return
    counts: dict[str, int] = {}
    for key in keys:
        if (
            key.tenant == tenant
            and key.department in gone
            and key.revoked_us is None
            and key.expires_us > now_us
        ):
            counts[key.department] = counts.get(key.department, 0) + 1
    if counts:
        shown = ", ".join(f"{name!r} ({count})" for name, count in sorted(counts.items())[:10])
        message = (
            f"keys that are in force belong to {shown}, {sum(counts.values())} in all; revoke them first"
        )
        raise ControlFailure(409, "department_in_use", message, "departments")


def recorded(levels: TenantLevels, entries: list[LevelEntry]) -> dict[str, object]:
    """What the record of changes says of them: the entries that changed, null for those that are gone."""
    body: dict[str, object] = {"user_limits": msgspec.to_builtins(levels.user_limits)}
    for field, level, _, _ in _FIELDS:
        found = {entry.name: msgspec.to_builtins(entry.limits) for entry in entries if entry.level == level}
        if found:
            body[field] = found
    return body


def num_entries(tenant: Tenant) -> int:
    """Departments, users and models that are kept of a tenant."""
    levels = tenant.levels
    return len(levels.departments) + len(levels.users) + len(levels.model_limits)


def caller_levels(tenant: Tenant, key: Key, user: str | None, model: str) -> CallerLevels:
    """The levels of a request. Tenant and key are always among them, the others where they limit something."""
    levels = tenant.levels
    found: list[tuple[Level, str, Limits]] = [("tenant", tenant.id, tenant.limits)]
    # A key that has ended may name a department that is gone.
    department = UNLIMITED if key.department is None else levels.departments.get(key.department, UNLIMITED)
    if department != UNLIMITED:
        found.append(("department", f"{tenant.id}/{key.department}", department))
    if user and (limits := _user_limits(levels, user)) != UNLIMITED:
        found.append(("user", f"{tenant.id}/{user}", limits))
    if (limits := levels.model_limits.get(model, UNLIMITED)) != UNLIMITED:
        found.append(("tenant_model", f"{tenant.id}/{model}", limits))
    found.append(("key", key.jti, key.limits))
    return tuple(found)


def _user_limits(levels: TenantLevels, user: str) -> Limits:
    own = levels.users.get(user)
    if own is None:
        return levels.user_limits
    given = {name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
    return msgspec.structs.replace(levels.user_limits, **given)
