"""What a change makes of a tenant, apart from what is inside it (`levels`), and what goes on record of it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.config.scheduling import SharingValues
from headrace.core import checks
from headrace.core.levels import recorded
from headrace.store.control import LevelEntry, Tenant


def with_changes(
    old: Tenant,
    *,
    name: str | msgspec.UnsetType | None,
    status: str | msgspec.UnsetType,
    cache: str | msgspec.UnsetType,
    shared_prefix: str | msgspec.UnsetType | None,
    sharing: SharingValues,
    limits: Mapping[str, float | None] | msgspec.UnsetType,
) -> Tenant:
    """The tenant with what is given; what is not stays. Raises `ControlFailure` 400 for values that cannot be."""
    changes: dict[str, Any] = {}
    if name is not msgspec.UNSET:
        checks.check_name(name)
        changes["name"] = name
    if status is not msgspec.UNSET:
        changes["status"] = checks.checked_status(status)
    if cache is not msgspec.UNSET:
        changes["cache"] = checks.checked_cache(cache)
    if shared_prefix is not msgspec.UNSET:
        checks.check_shared_prefix(shared_prefix)
        changes["shared_prefix"] = shared_prefix
    if sharing:
        changes["sharing"] = checks.merged_sharing(old.sharing, sharing)
    if limits is not msgspec.UNSET:
        changes["limits"] = checks.merged_limits(old.limits, limits)
    return msgspec.structs.replace(old, **changes)


def recorded_tenant(tenant: Tenant, entries: list[LevelEntry]) -> dict[str, Any]:
    """What the record of changes says: the tenant as it is now, of what is inside it only what changed."""
    return {
        "name": tenant.name,
        "status": tenant.status,
        "version": tenant.version,
        "cache": tenant.cache,
        "shared_prefix": tenant.shared_prefix,
        **msgspec.structs.asdict(tenant.sharing),
        "limits": msgspec.to_builtins(tenant.limits),
        **recorded(tenant.levels, entries),
    }
