"""Verification of keys, after the rules of RFC 8725.

Order of the checks, cheap ones first: size; the cache; prefix and compact form; header (algorithm
fixed, `typ` of this kind, `kid` known, nothing else); signature with the key of that `kid`; claims
(`iss`, `aud`, no unknown ones); expiry. Whether a key is revoked is the core's knowledge
(`core.directory`), not the verifier's.

Verified keys are cached by the SHA-256 of their text, never by the text, least recently used out
first. Only good keys are cached; their expiry is checked again on every hit.
"""

import base64
import hashlib
import re
from collections import OrderedDict
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from jwt import PyJWS
from jwt.exceptions import InvalidTokenError

from headrace import bounds
from headrace.errors import HeadraceError
from headrace.identity.claims import ALGORITHM, ISSUER, TENANT_KEY, Claims, Header, KeyKind, KeyQuota
from headrace.identity.signing import PublicKeys

LEEWAY_SECONDS_MAX: Final = 60
_COMPACT = re.compile(r"\A([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]{86})\Z", re.ASCII)
"""Compact JWS with a 64-byte signature. Python's decoder skips foreign characters; this does not."""
_SIGNATURE_LAST: Final = frozenset("AQgw")
"""What the last of 86 characters can be: its low four bits are unused and must be zero, so that one key
has one text."""

_header_decoder = msgspec.json.Decoder(Header)
_claims_decoder = msgspec.json.Decoder(Claims)


class InvalidKey(HeadraceError):
    """The key is not accepted. `reason` is for logs and metrics (a small fixed set), never for clients:
    an answer must not say whether a key exists.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a verified key speaks for."""

    tenant: str
    jti: str
    user: str | None
    scopes: frozenset[str]
    expires_us: int
    """Microseconds since 1970 UTC; from this moment on the key is expired."""
    quota: KeyQuota | None = None


class KeyVerifier:
    """Verifies keys of one kind with public keys alone. One thread at a time."""

    def __init__(
        self,
        public_keys: PublicKeys,
        kind: KeyKind = TENANT_KEY,
        *,
        leeway_seconds: int = 0,
        cache_size: int = bounds.VERIFIED_KEYS_MAX,
    ) -> None:
        assert 0 <= leeway_seconds <= LEEWAY_SECONDS_MAX
        assert cache_size > 0
        self._kind = kind
        self._leeway_us = leeway_seconds * 1_000_000
        self._cache_size = cache_size
        self._cache: OrderedDict[bytes, Identity] = OrderedDict()
        self._signatures = PyJWS(algorithms=[ALGORITHM])
        self.replace_public_keys(public_keys)

    def replace_public_keys(self, public_keys: PublicKeys) -> None:
        """Takes a new set after a rotation. Keys of retired signing keys are refused from here on."""
        assert all(isinstance(key, Ed25519PublicKey) for key in public_keys.values())
        self._public_keys = dict(public_keys)
        self._cache.clear()

    def verify(self, text: str, now_us: int) -> Identity:
        """The identity a key stands for. Raises `InvalidKey`."""
        if len(text) > bounds.KEY_BYTES_MAX:
            raise InvalidKey("oversized")
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        identity = self._cache.get(digest)
        if identity is None:
            identity = self._verify_text(text)
            if now_us >= identity.expires_us + self._leeway_us:
                raise InvalidKey("expired")
            self._cache[digest] = identity
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
            return identity
        if now_us >= identity.expires_us + self._leeway_us:
            del self._cache[digest]
            raise InvalidKey("expired")
        self._cache.move_to_end(digest)
        return identity

    def _verify_text(self, text: str) -> Identity:
        kind = self._kind
        if not text.startswith(kind.prefix):
            raise InvalidKey("wrong_prefix")
        token = text[len(kind.prefix) :]
        parts = _COMPACT.match(token)
        if parts is None or token[-1] not in _SIGNATURE_LAST:
            raise InvalidKey("malformed")
        try:
            header = _header_decoder.decode(_decoded(parts[1]))
        except (msgspec.DecodeError, ValueError) as error:
            raise InvalidKey("bad_header") from error
        if header.typ != kind.typ:
            raise InvalidKey("wrong_typ")
        public_key = self._public_keys.get(header.kid)
        if public_key is None:
            raise InvalidKey("unknown_kid")
        try:
            payload = self._signatures.decode_complete(token, public_key, algorithms=[ALGORITHM])["payload"]
        except InvalidTokenError as error:
            raise InvalidKey("bad_signature") from error
        return self._identity(payload)

    def _identity(self, payload: bytes) -> Identity:
        try:
            claims = _claims_decoder.decode(payload)
        except (msgspec.DecodeError, ValueError) as error:
            raise InvalidKey("bad_claims") from error
        if claims.iss != ISSUER:
            raise InvalidKey("wrong_iss")
        if claims.aud != self._kind.audience:
            raise InvalidKey("wrong_aud")
        return Identity(
            tenant=claims.sub,
            jti=claims.jti,
            user=claims.user,
            scopes=frozenset(claims.scope),
            expires_us=claims.exp * 1_000_000,
            quota=claims.quota,
        )


def _decoded(part: str) -> bytes:
    """Base64url without padding. Raises `ValueError` (of which `binascii.Error` is one)."""
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
