"""control.db: tenants, keys (their claims, never the keys) and public signing keys.

Plain rows in, plain rows out; the rules are in `core.directory`, the only writer. Every change also
appends a row to `changes` (who, what, when) in the same transaction, which cannot be edited or deleted:
the seed of the audit log. Commits are on disk (`synchronous=FULL`) when a method returns, since a
revocation must not be undone by a power cut. That blocks the caller for the length of one fsync; changes
are rare.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from headrace.caching.slots import Mode
from headrace.config.limits import NO_LEVELS, UNLIMITED, InnerLevel, Limits, TenantLevels
from headrace.config.scheduling import EVEN, Sharing
from headrace.store.errors import StoreUnavailable
from headrace.store.sqlite import open_database

_SCHEMA: Final = (
    """
    CREATE TABLE tenants (
        id TEXT PRIMARY KEY,
        name TEXT,
        status TEXT NOT NULL CHECK (status IN ('active', 'disabled')),
        created_us INTEGER NOT NULL,
        updated_us INTEGER NOT NULL,
        version INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE keys (
        position INTEGER PRIMARY KEY,
        jti TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL CHECK (kind IN ('tenant', 'admin')),
        tenant TEXT NOT NULL,
        user TEXT,
        name TEXT,
        scopes TEXT NOT NULL,
        kid TEXT NOT NULL,
        created_us INTEGER NOT NULL,
        expires_us INTEGER NOT NULL,
        revoked_us INTEGER
    ) STRICT;
    CREATE TABLE signing_keys (
        kid TEXT PRIMARY KEY,
        public_key TEXT NOT NULL,
        created_us INTEGER NOT NULL,
        retired_us INTEGER
    ) STRICT;
    CREATE TABLE changes (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at_us INTEGER NOT NULL,
        actor TEXT NOT NULL,
        action TEXT NOT NULL,
        subject TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TRIGGER changes_no_update BEFORE UPDATE ON changes
        BEGIN SELECT RAISE(ABORT, 'the list of changes is append-only'); END;
    CREATE TRIGGER changes_no_delete BEFORE DELETE ON changes
        BEGIN SELECT RAISE(ABORT, 'the list of changes is append-only'); END;
    """,
    """
    ALTER TABLE tenants ADD COLUMN limits TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE keys ADD COLUMN limits TEXT NOT NULL DEFAULT '{}';
    """,
    """
    ALTER TABLE tenants ADD COLUMN user_limits TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE keys ADD COLUMN department TEXT;
    CREATE TABLE tenant_levels (
        tenant TEXT NOT NULL REFERENCES tenants (id),
        level TEXT NOT NULL CHECK (level IN ('department', 'user', 'tenant_model')),
        name TEXT NOT NULL,
        limits TEXT NOT NULL,
        PRIMARY KEY (tenant, level, name)
    ) STRICT, WITHOUT ROWID;
    """,
    """
    ALTER TABLE tenants ADD COLUMN cache TEXT NOT NULL DEFAULT 'full'
        CHECK (cache IN ('full', 'prefix_only', 'off'));
    ALTER TABLE tenants ADD COLUMN shared_prefix TEXT;
    """,
    """
    ALTER TABLE tenants ADD COLUMN sharing TEXT NOT NULL DEFAULT '{}';
    """,
)


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `tenants` and what `tenant_levels` has of it. Times in microseconds since 1970 UTC."""

    id: str
    name: str | None
    status: Literal["active", "disabled"]
    created_us: int
    updated_us: int
    version: int
    cache: Mode = "full"
    """What the KV prefix cache may keep of the tenant's requests."""
    shared_prefix: str | None = None
    """Tenants of the same name share the prefixes that their requests mark."""
    sharing: Sharing = EVEN
    limits: Limits = UNLIMITED
    levels: TenantLevels = NO_LEVELS


class LevelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `tenant_levels` as it is from now on: a department, user or model of a tenant."""

    level: InnerLevel
    name: str
    limits: Limits | None
    """None when the entry is gone."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `keys`: what the key claims. Times in microseconds since 1970 UTC."""

    jti: str
    kind: Literal["tenant", "admin"]
    tenant: str
    user: str | None
    name: str | None
    scopes: tuple[str, ...]
    kid: str
    created_us: int
    expires_us: int
    revoked_us: int | None = None
    limits: Limits = UNLIMITED
    department: str | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what to which thing. `actor` is the `jti` of an admin key, or the name of a role."""

    at_us: int
    actor: str
    action: str
    subject: str
    body: dict[str, Any] = {}


class ControlStore:
    """The file. Methods raise `StoreUnavailable` when the disk refuses; nothing has changed then."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> "ControlStore":
        """Opens or creates the file. Raises `SetupError`."""
        return cls(open_database(path, _SCHEMA, synchronous="FULL", timeout_s=1.0))

    def close(self) -> None:
        """Closes the file; the store is of no use after this."""
        self._connection.close()

    def tenants(self) -> list[Tenant]:
        """All tenants, by id."""
        levels: dict[str, dict[str, dict[str, Limits]]] = {}
        for tenant, level, name, limits in self._connection.execute(
            "SELECT tenant, level, name, limits FROM tenant_levels ORDER BY tenant, level, name"
        ):
            entries = levels.setdefault(tenant, {}).setdefault(_FIELD_OF_LEVEL[level], {})
            entries[name] = _limits_of(limits)
        rows = self._connection.execute(
            "SELECT id, name, status, created_us, updated_us, version, cache, shared_prefix, sharing, limits,"
            " user_limits FROM tenants ORDER BY id"
        )
        return [
            Tenant(
                id=tenant,
                name=name,
                status=status,
                created_us=created_us,
                updated_us=updated_us,
                version=version,
                cache=cache,
                shared_prefix=shared_prefix,
                sharing=_sharing_of(sharing),
                limits=_limits_of(limits),
                levels=TenantLevels(user_limits=_limits_of(user_limits), **levels.get(tenant, {})),
            )
            for (
                tenant,
                name,
                status,
                created_us,
                updated_us,
                version,
                cache,
                shared_prefix,
                sharing,
                limits,
                user_limits,
            ) in rows
        ]

    def api_keys(self) -> list[Key]:
        """All keys, revoked and expired ones too, oldest first."""
        rows = self._connection.execute(
            "SELECT jti, kind, tenant, user, name, scopes, kid, created_us, expires_us, revoked_us, limits,"
            " department FROM keys ORDER BY position"
        )
        found = []
        for row in rows:
            values = dict(zip(Key.__struct_fields__, row, strict=True))
            values["scopes"] = msgspec.json.decode(values["scopes"])
            values["limits"] = msgspec.json.decode(values["limits"])
            found.append(msgspec.convert(values, Key))
        return found

    def public_keys(self) -> dict[str, str]:
        """Public signing keys that are not retired, in base64url, by `kid`."""
        return dict(
            self._connection.execute(
                "SELECT kid, public_key FROM signing_keys WHERE retired_us IS NULL ORDER BY created_us"
            )
        )

    def changes(self, *, after: int = 0, limit: int = 1000) -> list[tuple[int, Change]]:
        """Changes with a sequence number above `after`, oldest first, with their numbers."""
        rows = self._connection.execute(
            "SELECT seq, at_us, actor, action, subject, body FROM changes WHERE seq > ? ORDER BY seq LIMIT ?",
            (after, limit),
        )
        return [
            (
                seq,
                Change(
                    at_us=at_us,
                    actor=actor,
                    action=action,
                    subject=subject,
                    body=msgspec.json.decode(body, type=dict[str, Any]),
                ),
            )
            for seq, at_us, actor, action, subject, body in rows
        ]

    def save_tenant(self, tenant: Tenant, change: Change, entries: Iterable[LevelEntry] = ()) -> None:
        """Adds the tenant or replaces its row. Of its departments, users and models only `entries` are written."""
        with self._transaction(change) as connection:
            connection.execute(
                "INSERT INTO tenants (id, name, status, created_us, updated_us, version, cache, shared_prefix,"
                " sharing, limits, user_limits) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET name=excluded.name,"
                " status=excluded.status, updated_us=excluded.updated_us, version=excluded.version,"
                " cache=excluded.cache, shared_prefix=excluded.shared_prefix,"
                " sharing=excluded.sharing, limits=excluded.limits, user_limits=excluded.user_limits",
                (
                    *msgspec.structs.astuple(tenant)[:-3],
                    _json(tenant.sharing),
                    _json(tenant.limits),
                    _json(tenant.levels.user_limits),
                ),
            )
            for entry in entries:
                if entry.limits is None:
                    connection.execute(
                        "DELETE FROM tenant_levels WHERE tenant = ? AND level = ? AND name = ?",
                        (tenant.id, entry.level, entry.name),
                    )
                else:
                    connection.execute(
                        "INSERT OR REPLACE INTO tenant_levels (tenant, level, name, limits) VALUES (?, ?, ?, ?)",
                        (tenant.id, entry.level, entry.name, _json(entry.limits)),
                    )

    def add_key(self, key: Key, change: Change) -> None:
        """Adds a key's claims."""
        with self._transaction(change) as connection:
            connection.execute(
                "INSERT INTO keys (jti, kind, tenant, user, name, scopes, kid, created_us, expires_us, revoked_us,"
                " limits, department) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                msgspec.structs.astuple(
                    msgspec.structs.replace(key, scopes=_json(key.scopes), limits=_json(key.limits))
                ),
            )

    def revoke_key(self, jti: str, change: Change) -> None:
        """Marks a key as revoked at `change.at_us`; an earlier revocation stays."""
        with self._transaction(change) as connection:
            connection.execute(
                "UPDATE keys SET revoked_us = ? WHERE jti = ? AND revoked_us IS NULL", (change.at_us, jti)
            )

    def add_change(self, change: Change) -> None:
        """Notes a change of something that is kept elsewhere."""
        with self._transaction(change):
            pass

    def add_signing_key(self, kid: str, public_key: str, change: Change) -> None:
        """Adds a public signing key, in base64url."""
        with self._transaction(change) as connection:
            connection.execute(
                "INSERT INTO signing_keys VALUES (?, ?, ?, NULL)", (kid, public_key, change.at_us)
            )

    def retire_signing_key(self, kid: str, change: Change) -> None:
        """From here on keys signed with it are not valid any more."""
        with self._transaction(change) as connection:
            connection.execute("UPDATE signing_keys SET retired_us = ? WHERE kid = ?", (change.at_us, kid))

    @contextmanager
    def _transaction(self, change: Change) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute(
                "INSERT INTO changes (at_us, actor, action, subject, body) VALUES (?, ?, ?, ?, ?)",
                (
                    change.at_us,
                    change.actor,
                    change.action,
                    change.subject,
                    msgspec.json.encode(change.body).decode(),
                ),
            )
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreUnavailable(f"control data could not be saved: {error}") from error
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")


_FIELD_OF_LEVEL: Final = {"department": "departments", "user": "users", "tenant_model": "model_limits"}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _sharing_of(text: str) -> Sharing:
    return msgspec.json.decode(text, type=Sharing)


def _limits_of(text: str) -> Limits:
    return msgspec.json.decode(text, type=Limits)
