"""What stands in a key: the header and the claims of the JWT, and the two kinds of keys.

The kinds differ in prefix, `typ` and `aud`, so that neither is ever valid in the other's place
(RFC 8725, section 3.12). Unknown header fields and unknown claims are refused, not ignored: a key is a
policy container, and a policy this version does not know must not be taken for none.
"""

from typing import Annotated, Final, Literal

import msgspec

from headrace import bounds

ISSUER: Final = "headrace"
ALGORITHM: Final = "EdDSA"

SECONDS_MAX: Final = 253_402_300_799
"""The end of the year 9999; later dates are nonsense."""

Seconds = Annotated[int, msgspec.Meta(ge=0, le=SECONDS_MAX)]
ShortText = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Scope = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class KeyKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of key: what it is recognised by and where it is valid."""

    prefix: str
    typ: str
    audience: str


TENANT_KEY: Final = KeyKind(prefix="hr_live_", typ="hr-key+jwt", audience="headrace:api")
"""For `/v1`: chats, embeddings, usage."""

ADMIN_KEY: Final = KeyKind(prefix="hr_admin_", typ="hr-admin+jwt", audience="headrace:admin")
"""For the admin API only."""


class KeyQuota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A ceiling written into the key; the tenant's live policy can only lower it (AU-5)."""

    qps: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tokens_per_day: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The only header accepted. `jku`, `x5u`, `jwk`, `crit`, `zip` and the like are unknown, so refused."""

    alg: Literal["EdDSA"]
    typ: str
    kid: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]


class Claims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The payload. `iat` and `exp` are seconds since 1970 UTC, as JWT wants them."""

    iss: str
    aud: str
    sub: ShortText
    scope: Annotated[list[Scope], msgspec.Meta(max_length=64)]
    iat: Seconds
    exp: Seconds
    jti: ShortText
    user: Annotated[str, msgspec.Meta(min_length=1, max_length=bounds.USER_BYTES_MAX)] | None = None
    quota: KeyQuota | None = None
