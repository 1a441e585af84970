"""Signing keys and the issuing of API keys.

Signing keys rotate: one private key is active, the public keys of earlier ones stay valid until they
are retired. A `kid` is the first 16 characters of the base64url SHA-256 of the public key, so it says
nothing and cannot clash by accident.
"""

import base64
import binascii
import hashlib
from collections.abc import Mapping

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from jwt import PyJWS

from headrace import bounds
from headrace.errors import SetupError
from headrace.identity.claims import ALGORITHM, ISSUER, TENANT_KEY, Claims, KeyKind, KeyQuota
from headrace.identity.scopes import checked_scopes

PublicKeys = Mapping[str, Ed25519PublicKey]
"""Public keys by `kid`."""


def key_id(public_key: Ed25519PublicKey) -> str:
    """The `kid` of a public key."""
    digest = hashlib.sha256(public_key.public_bytes_raw()).digest()
    return base64.urlsafe_b64encode(digest)[:16].decode()


def encode_public_key(public_key: Ed25519PublicKey) -> str:
    """The 32 raw bytes as base64url, to store or to hand to another process."""
    return base64.urlsafe_b64encode(public_key.public_bytes_raw()).decode()


def decode_public_key(text: str) -> Ed25519PublicKey:
    """The reverse of `encode_public_key`. Raises `SetupError` when it is not a public key."""
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error) as error:
        raise SetupError(f"not an Ed25519 public key in base64url: {text[:64]!r}") from error


class SigningKey:
    """The active private key and its `kid`. Has no `repr` that could show it."""

    __slots__ = ("kid", "private_key", "public_key")

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        self.public_key = private_key.public_key()
        self.kid = key_id(self.public_key)

    @classmethod
    def generate(cls) -> "SigningKey":
        """A new random signing key."""
        return cls(Ed25519PrivateKey.generate())

    def __repr__(self) -> str:
        return f"SigningKey(kid={self.kid!r})"


def issue(
    signing_key: SigningKey,
    *,
    tenant: str,
    jti: str,
    scopes: tuple[str, ...],
    issued_us: int,
    expires_us: int,
    user: str | None = None,
    quota: KeyQuota | None = None,
    kind: KeyKind = TENANT_KEY,
) -> str:
    """A key as text. Times in microseconds since 1970 UTC, cut to whole seconds as JWT wants.

    Raises `UnknownScope` for a scope this kind of key cannot carry. Tenant, user and lifetime have been
    checked by the caller (`core.directory`).
    """
    claims = Claims(
        iss=ISSUER,
        aud=kind.audience,
        sub=tenant,
        scope=list(checked_scopes(scopes, kind)),
        iat=issued_us // 1_000_000,
        exp=expires_us // 1_000_000,
        jti=jti,
        user=user,
        quota=quota,
    )
    signer = PyJWS(algorithms=[ALGORITHM])
    header = {"typ": kind.typ, "kid": signing_key.kid}
    text = kind.prefix + signer.encode(
        msgspec.json.encode(claims), signing_key.private_key, ALGORITHM, headers=header
    )
    assert len(text) <= bounds.KEY_BYTES_MAX, "the bounds on the claims keep a key below the size limit"
    return text
