"""Who is calling: keys as signed policy containers. No I/O and no clock; time comes in as an argument."""

from headrace.identity.claims import ADMIN_KEY, TENANT_KEY, KeyKind, KeyQuota
from headrace.identity.redaction import redact, redact_line
from headrace.identity.scopes import DEFAULT_SCOPES, UnknownScope, checked_scopes
from headrace.identity.signing import (
    PublicKeys,
    SigningKey,
    decode_public_key,
    encode_public_key,
    issue,
    key_id,
)
from headrace.identity.verifier import Identity, InvalidKey, KeyVerifier

__all__ = [
    "ADMIN_KEY",
    "DEFAULT_SCOPES",
    "TENANT_KEY",
    "Identity",
    "InvalidKey",
    "KeyKind",
    "KeyQuota",
    "KeyVerifier",
    "PublicKeys",
    "SigningKey",
    "UnknownScope",
    "checked_scopes",
    "decode_public_key",
    "encode_public_key",
    "issue",
    "key_id",
    "redact",
    "redact_line",
]
