"""Tenants and keys as the core knows them: all in memory, every change stored before it takes effect.

The hot path is two set lookups (`authorize`) and one in a dictionary each for `levels` and `cache_of`.
Because the core is the only writer and checks each request against these, a revocation, a disabled tenant,
a new limit or cache setting is in force when the changing call returns.
"""

import secrets
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from headrace import bounds
from headrace.caching.slots import Mode
from headrace.clock import Clock
from headrace.config.limits import NO_CHANGES, NO_LEVELS, UNLIMITED, LevelChanges, Limits
from headrace.config.scheduling import EVEN, Sharing, SharingValues
from headrace.core import checks
from headrace.core.failure import ControlFailure
from headrace.core.keyring import Keyring
from headrace.core.levels import (
    CallerLevels,
    caller_levels,
    changed,
    check_gone_departments,
    num_entries,
)
from headrace.core.messages import IssuedKey, KeyView, TenantView
from headrace.core.tenants import recorded_tenant, with_changes
from headrace.core.views import key_view, tenant_view
from headrace.identity import (
    ADMIN_KEY,
    DEFAULT_SCOPES,
    TENANT_KEY,
    Identity,
    InvalidKey,
    UnknownScope,
    checked_scopes,
    issue,
)
from headrace.store.control import Change, ControlStore, Key, LevelEntry, Tenant

ADMIN_SUBJECT: Final = "@admin"
"""`sub` of admin keys. No tenant can be called so."""


class Directory:
    """Owns the control store. Not thread safe: it belongs to the core's loop.

    Methods that change something raise `ControlFailure` for what the caller did wrong and
    `StoreUnavailable` when the disk refuses; in both cases nothing has changed. `actor` names who asked.
    """

    def __init__(self, store: ControlStore, keyring: Keyring, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.keyring = keyring
        self._tenants = {tenant.id: tenant for tenant in store.tenants()}
        self._keys = {key.jti: key for key in store.api_keys()}
        self._active_tenants = {t.id for t in self._tenants.values() if t.status == "active"}
        live = [key for key in self._keys.values() if key.revoked_us is None]
        self._live_jtis = {key.jti for key in live if key.kind == "tenant"}
        self._live_admin_jtis = {key.jti for key in live if key.kind == "admin"}
        self._resolved: dict[tuple[str, str | None, str], CallerLevels] = {}
        self._caches = {t.id: (t.cache, t.shared_prefix) for t in self._tenants.values()}

    @classmethod
    def open(cls, data_dir: Path, clock: Clock) -> "Directory":
        """Opens or creates `control.db` and `secrets/` under `data_dir`. Raises `SetupError`."""
        store = ControlStore.open(data_dir / "control.db")
        return cls(store, Keyring(store, data_dir / "secrets", clock), clock)

    def close(self) -> None:
        """Closes the control store."""
        self._store.close()

    # --- the hot path ---------------------------------------------------------------------------

    def authorize(self, identity: Identity) -> None:
        """Raises `InvalidKey` when a verified key is revoked, unknown here, or its tenant disabled."""
        if identity.jti not in self._live_jtis:
            raise InvalidKey("revoked")
        if identity.tenant not in self._active_tenants:
            raise InvalidKey("tenant_disabled")

    def authorize_admin(self, jti: str) -> None:
        """Raises `InvalidKey` when a verified admin key is revoked or unknown here."""
        if jti not in self._live_admin_jtis:
            raise InvalidKey("revoked")

    def limits_of(self, tenant: str, jti: str) -> tuple[Limits, Limits]:
        """The limits of an authorized caller: its tenant's and its key's."""
        return self._tenants[tenant].limits, self._keys[jti].limits

    def levels(self, tenant: str, jti: str, user: str | None, model: str) -> CallerLevels:
        """What limits an authorized caller's request for a model: (level, account, limits) of each level.

        Tenant and key are always there; department, user and tenant_model where something is limited.
        """
        found = self._resolved.get((jti, user, model))
        if found is None:
            if len(self._resolved) >= bounds.CALLERS_RESOLVED_MAX:
                self._resolved.clear()
            found = caller_levels(self._tenants[tenant], self._keys[jti], user, model)
            self._resolved[(jti, user, model)] = found
        return found

    def cache_of(self, tenant: str) -> tuple[Mode, str | None]:
        """What the prefix cache may keep of an authorized caller's tenant, and the name it shares prefixes under."""
        return self._caches[tenant]

    def sharing_of(self, tenant: str) -> Sharing:
        """An authorized caller's tenant's part in sharing the models with others."""
        return self._tenants[tenant].sharing

    def department_of(self, jti: str) -> str | None:
        """The department a key belongs to; None also for a key that is not on record any more."""
        key = self._keys.get(jti)
        return None if key is None else key.department

    # --- tenants --------------------------------------------------------------------------------

    def create_tenant(
        self,
        tenant_id: str,
        name: str | None,
        *,
        cache: str = "full",
        shared_prefix: str | None = None,
        sharing: SharingValues = {},  # noqa: B006 - only read
        limits: Limits = UNLIMITED,
        levels: LevelChanges = NO_CHANGES,
        actor: str,
    ) -> TenantView:
        """A new active tenant. 409 `tenant_exists` when there is one of that id."""
        checks.check_tenant_id(tenant_id)
        checks.check_name(name)
        checks.check_shared_prefix(shared_prefix)
        mode = checks.checked_cache(cache)
        if tenant_id in self._tenants:
            raise ControlFailure(409, "tenant_exists", f"there is already a tenant {tenant_id!r}", "id")
        new_levels, entries = changed(NO_LEVELS, levels)
        now_us = self._clock.wall_us()
        tenant = Tenant(
            id=tenant_id,
            name=name,
            status="active",
            created_us=now_us,
            updated_us=now_us,
            version=1,
            cache=mode,
            shared_prefix=shared_prefix,
            sharing=checks.merged_sharing(EVEN, sharing),
            limits=limits,
            levels=new_levels,
        )
        return self._save_tenant(tenant, "tenant.created", actor, entries)

    def update_tenant(
        self,
        tenant_id: str,
        *,
        name: str | msgspec.UnsetType | None = msgspec.UNSET,
        status: str | msgspec.UnsetType = msgspec.UNSET,
        cache: str | msgspec.UnsetType = msgspec.UNSET,
        shared_prefix: str | msgspec.UnsetType | None = msgspec.UNSET,
        sharing: SharingValues = {},  # noqa: B006 - only read
        limits: Mapping[str, float | None] | msgspec.UnsetType = msgspec.UNSET,
        levels: LevelChanges = NO_CHANGES,
        actor: str,
    ) -> TenantView:
        """Changes what is given; a call that changes nothing is not recorded.

        409 `department_in_use` when a department would go that keys still name.
        """
        old = self._tenant(tenant_id)
        new_levels, entries = changed(old.levels, levels)
        check_gone_departments(tenant_id, entries, self._keys.values(), self._clock.wall_us())
        new = with_changes(
            old,
            name=name,
            status=status,
            cache=cache,
            shared_prefix=shared_prefix,
            sharing=sharing,
            limits=limits,
        )
        new = msgspec.structs.replace(new, levels=new_levels)
        if new == old:
            return tenant_view(old)
        new = msgspec.structs.replace(new, updated_us=self._clock.wall_us(), version=old.version + 1)
        return self._save_tenant(new, "tenant.updated", actor, entries)

    def get_tenant(self, tenant_id: str) -> TenantView:
        """404 `tenant_not_found` when there is none."""
        return tenant_view(self._tenant(tenant_id))

    def list_tenants(
        self, *, after: str | None = None, limit: int = checks.PAGE_SIZE_MAX
    ) -> tuple[list[TenantView], bool]:
        """One page in the order of ids, and whether there are more. Large tenants make it shorter."""
        checks.check_page_size(limit)
        ids = sorted(tenant_id for tenant_id in self._tenants if after is None or tenant_id > after)
        page: list[TenantView] = []
        entries = 0
        for tenant_id in ids[:limit]:
            tenant = self._tenants[tenant_id]
            entries += num_entries(tenant)
            if page and entries > bounds.TENANT_PAGE_ENTRIES_MAX:
                break
            page.append(tenant_view(tenant))
        return page, len(ids) > len(page)

    # --- keys -----------------------------------------------------------------------------------

    def create_key(
        self,
        *,
        tenant: str,
        department: str | None = None,
        user: str | None = None,
        name: str | None = None,
        scopes: tuple[str, ...] | None = None,
        expires_in_s: int | None = None,
        limits: Limits = UNLIMITED,
        actor: str,
    ) -> IssuedKey:
        """A new key of a tenant, valid at once; the only time the key itself is seen."""
        if tenant not in self._tenants:
            raise ControlFailure(404, "tenant_not_found", f"there is no tenant {tenant[:64]!r}", "tenant")
        if department is not None and department not in self._tenants[tenant].levels.departments:
            message = f"tenant {tenant!r} has no department {department[:64]!r}; add it to the tenant first"
            raise ControlFailure(404, "department_not_found", message, "department")
        checks.check_user(user)
        try:
            chosen = checked_scopes(DEFAULT_SCOPES if scopes is None else scopes, TENANT_KEY)
        except UnknownScope as error:
            raise ControlFailure(400, "invalid_scope", str(error), "scopes") from error
        return self._create_key("tenant", tenant, user, name, chosen, expires_in_s, actor, limits, department)

    def create_admin_key(
        self, *, name: str | None = None, expires_in_s: int | None = None, actor: str
    ) -> IssuedKey:
        """A new key for the admin API, with scope `admin:*`."""
        return self._create_key("admin", ADMIN_SUBJECT, None, name, ("admin:*",), expires_in_s, actor)

    def revoke_key(self, jti: str, *, actor: str) -> KeyView:
        """Ends a key for good; in force when this returns. Again: no-op. 404 when there is none."""
        key = self._keys.get(jti)
        if key is None:
            raise ControlFailure(404, "key_not_found", f"there is no key {jti[:64]!r}", "jti")
        if key.revoked_us is None:
            now_us = self._clock.wall_us()
            self._store.revoke_key(jti, Change(at_us=now_us, actor=actor, action="key.revoked", subject=jti))
            key = msgspec.structs.replace(key, revoked_us=now_us)
            self._keys[jti] = key
            self._live_jtis.discard(jti)
            self._live_admin_jtis.discard(jti)
            self._resolved.clear()
        return key_view(key)

    def list_keys(
        self, *, tenant: str | None = None, after: str | None = None, limit: int = checks.PAGE_SIZE_MAX
    ) -> tuple[list[KeyView], bool]:
        """One page, oldest first, revoked ones too, and whether there are more."""
        checks.check_page_size(limit)
        if tenant is not None:
            self._tenant(tenant)
        if after is not None and after not in self._keys:
            raise ControlFailure(400, "invalid_after", f"there is no key {after[:64]!r}", "after")
        keys = iter(self._keys.values())
        if after is not None:
            next(key for key in keys if key.jti == after)
        wanted = (key for key in keys if tenant is None or key.tenant == tenant)
        page = list(islice(wanted, limit + 1))
        return [key_view(key) for key in page[:limit]], len(page) > limit

    def note(self, action: str, subject: str, body: dict[str, Any], *, actor: str) -> None:
        """Puts what an administrator does to something outside the directory on the record of changes."""
        self._store.add_change(
            Change(at_us=self._clock.wall_us(), actor=actor, action=action, subject=subject, body=body)
        )

    # --- inside ---------------------------------------------------------------------------------

    def _tenant(self, tenant_id: str) -> Tenant:
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            raise ControlFailure(404, "tenant_not_found", f"there is no tenant {tenant_id[:64]!r}")
        return tenant

    def _save_tenant(self, tenant: Tenant, action: str, actor: str, entries: list[LevelEntry]) -> TenantView:
        change = Change(
            at_us=tenant.updated_us,
            actor=actor,
            action=action,
            subject=tenant.id,
            body=recorded_tenant(tenant, entries),
        )
        self._store.save_tenant(tenant, change, entries)
        self._tenants[tenant.id] = tenant
        self._resolved.clear()
        self._caches[tenant.id] = (tenant.cache, tenant.shared_prefix)
        if tenant.status == "active":
            self._active_tenants.add(tenant.id)
        else:
            self._active_tenants.discard(tenant.id)
        return tenant_view(tenant)

    def _create_key(
        self,
        kind: Literal["tenant", "admin"],
        tenant: str,
        user: str | None,
        name: str | None,
        scopes: tuple[str, ...],
        expires_in_s: int | None,
        actor: str,
        limits: Limits = UNLIMITED,
        department: str | None = None,
    ) -> IssuedKey:
        checks.check_name(name)
        lifetime_s = checks.checked_lifetime(expires_in_s)
        now_us = self._clock.wall_us()
        key = Key(
            jti=f"key_{secrets.token_hex(12)}",
            kind=kind,
            tenant=tenant,
            user=user,
            name=name,
            scopes=scopes,
            kid=self.keyring.active.kid,
            created_us=now_us,
            # JWT counts whole seconds: rounded up, so a key never lives shorter than asked for.
            expires_us=(-(-now_us // 1_000_000) + lifetime_s) * 1_000_000,
            limits=limits,
            department=department,
        )
        text = issue(
            self.keyring.active,
            tenant=tenant,
            jti=key.jti,
            scopes=scopes,
            issued_us=now_us,
            expires_us=key.expires_us,
            user=user,
            kind=TENANT_KEY if kind == "tenant" else ADMIN_KEY,
        )
        body = {
            "kind": kind,
            "tenant": tenant,
            "department": department,
            "scopes": scopes,
            "expires_us": key.expires_us,
            "limits": msgspec.to_builtins(limits),
        }
        self._store.add_key(
            key, Change(at_us=now_us, actor=actor, action="key.created", subject=key.jti, body=body)
        )
        self._keys[key.jti] = key
        (self._live_jtis if kind == "tenant" else self._live_admin_jtis).add(key.jti)
        return IssuedKey(key=text, view=key_view(key))
