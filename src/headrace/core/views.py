"""Stored tenants and keys as the admin API shows them."""

import msgspec

from headrace.core.messages import KeyView, TenantView
from headrace.store.control import Key, Tenant


def tenant_view(tenant: Tenant) -> TenantView:
    """All of a tenant."""
    return TenantView(
        id=tenant.id,
        name=tenant.name,
        status=tenant.status,
        created_ts=tenant.created_us,
        updated_ts=tenant.updated_us,
        version=tenant.version,
        cache=tenant.cache,
        shared_prefix=tenant.shared_prefix,
        **msgspec.structs.asdict(tenant.sharing),
        limits=tenant.limits,
        departments=tenant.levels.departments,
        user_limits=tenant.levels.user_limits,
        users=tenant.levels.users,
        model_limits=tenant.levels.model_limits,
    )


def key_view(key: Key) -> KeyView:
    """What a key claims and when it ends."""
    return KeyView(
        jti=key.jti,
        kind=key.kind,
        tenant="" if key.kind == "admin" else key.tenant,
        department=key.department,
        user=key.user,
        name=key.name,
        scopes=key.scopes,
        created_ts=key.created_us,
        expires_ts=key.expires_us,
        revoked_ts=key.revoked_us,
        limits=key.limits,
    )
