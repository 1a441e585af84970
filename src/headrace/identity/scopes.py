"""The scopes a key can carry, as one table."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from headrace.errors import HeadraceError
from headrace.identity.claims import ADMIN_KEY, TENANT_KEY, KeyKind

SCOPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "chat:read": "chat and text completions",
        "chat:stream": "the same, streamed",
        "embeddings:read": "embeddings",
        "jobs:write": "offline jobs, files and batches",
        "audit:read": "audited chats and their audit records",
        "usage:read": "the tenant's own usage records",
        "admin:*": "everything in the admin API",
    }
)

DEFAULT_SCOPES: Final = ("chat:read", "chat:stream", "embeddings:read", "usage:read")
"""What a tenant's key gets when nothing is asked for."""


class UnknownScope(HeadraceError):
    """A scope that this kind of key cannot carry. The text lists those it can."""


def allowed_scopes(kind: KeyKind) -> tuple[str, ...]:
    """The scopes keys of this kind can carry: `admin:*` for admin keys, all others for tenants' keys."""
    assert kind in (TENANT_KEY, ADMIN_KEY)
    return tuple(scope for scope in SCOPES if scope.startswith("admin:") == (kind is ADMIN_KEY))


def checked_scopes(scopes: Iterable[str], kind: KeyKind = TENANT_KEY) -> tuple[str, ...]:
    """The scopes without repetitions, in the order given.

    Raises `UnknownScope` when one is unknown, belongs to the other kind of key, or none is given.
    """
    chosen = tuple(dict.fromkeys(scopes))
    allowed = allowed_scopes(kind)
    unknown = [scope for scope in chosen if scope not in allowed]
    if unknown:
        shown = ", ".join(repr(scope[:64]) for scope in unknown[:8])
        raise UnknownScope(f"unknown scope {shown}; allowed are {', '.join(allowed)}")
    if not chosen:
        raise UnknownScope(f"at least one scope is needed; allowed are {', '.join(allowed)}")
    return chosen
