"""AU-1, AU-2, AU-6: what a verifier takes and, above all, what it does not."""

import base64
import hashlib
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from headrace import bounds
from headrace.identity import (
    ADMIN_KEY,
    TENANT_KEY,
    InvalidKey,
    KeyKind,
    KeyQuota,
    KeyVerifier,
    SigningKey,
    issue,
)

NOW_US = 1_790_000_000_000_000
EXPIRES_US = NOW_US + 3_600_000_000
SIGNING_KEY = SigningKey.generate()
VERIFIER = KeyVerifier({SIGNING_KEY.kid: SIGNING_KEY.public_key})


def claims(**changes: Any) -> dict[str, Any]:
    standard = {
        "iss": "headrace",
        "aud": "headrace:api",
        "sub": "demo",
        "scope": ["chat:read"],
        "iat": NOW_US // 1_000_000,
        "exp": EXPIRES_US // 1_000_000,
        "jti": "key_1",
    } | changes
    return {name: value for name, value in standard.items() if value is not ...}


def forged(
    payload: object = None,
    *,
    key: Any = SIGNING_KEY.private_key,
    algorithm: str = "EdDSA",
    prefix: str = "hr_live_",
    **header: Any,
) -> str:
    """A token made with PyJWT directly: right in everything that is not changed."""
    fields = {"typ": "hr-key+jwt", "kid": SIGNING_KEY.kid} | header
    body = json.dumps(claims() if payload is None else payload).encode()
    return prefix + jwt.PyJWS().encode(body, key, algorithm, headers=fields)


def raw(header: object, payload: object = None, signature: bytes = b"\0" * 64) -> str:
    """A token of any parts at all."""

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return "hr_live_" + ".".join(
        (part(head), part(json.dumps(payload or claims()).encode()), part(signature))
    )


def good(kind: KeyKind = TENANT_KEY, **changes: Any) -> str:
    arguments: dict[str, Any] = {
        "tenant": "demo",
        "jti": "key_1",
        "scopes": ("admin:*",) if kind is ADMIN_KEY else ("chat:read", "chat:stream"),
        "issued_us": NOW_US,
        "expires_us": EXPIRES_US,
        "kind": kind,
    }
    return issue(SIGNING_KEY, **(arguments | changes))


def reason(text: str, verifier: KeyVerifier = VERIFIER, now_us: int = NOW_US) -> str:
    with pytest.raises(InvalidKey) as refusal:
        verifier.verify(text, now_us)
    return refusal.value.reason


def test_a_good_key_tells_who_it_is() -> None:
    quota = KeyQuota(qps=5, tokens_per_day=1000)
    identity = VERIFIER.verify(good(user="ann", quota=quota), NOW_US)
    assert identity.tenant == "demo"
    assert identity.jti == "key_1"
    assert identity.user == "ann"
    assert identity.scopes == frozenset({"chat:read", "chat:stream"})
    assert identity.expires_us == EXPIRES_US
    assert identity.quota == quota


def test_the_forger_of_these_tests_makes_good_keys_when_nothing_is_changed() -> None:
    assert VERIFIER.verify(forged(), NOW_US).jti == "key_1"


PUBLIC_PEM = SIGNING_KEY.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
HEADER = {"alg": "EdDSA", "typ": "hr-key+jwt", "kid": SIGNING_KEY.kid}


def hs256_with_public_key(secret: bytes) -> str:
    """The classic confusion: HMAC with the public key as secret (PyJWT refuses to make it, so by hand)."""
    import hmac

    head = base64.urlsafe_b64encode(json.dumps(HEADER | {"alg": "HS256"}).encode()).rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims()).encode()).rstrip(b"=")
    mac = hmac.new(secret, head + b"." + body, hashlib.sha256).digest()
    return f"hr_live_{head.decode()}.{body.decode()}." + base64.urlsafe_b64encode(mac).rstrip(b"=").decode()


ATTACKS = {
    "empty": "",
    "prefix only": "hr_live_",
    "no prefix": forged(prefix=""),
    "other prefix": forged(prefix="hr_test_"),
    "prefix in capitals": forged(prefix="HR_LIVE_"),
    "alg none, no signature": raw(HEADER | {"alg": "none"}, signature=b""),
    "alg none, zero signature": raw(HEADER | {"alg": "none"}),
    "alg None": raw(HEADER | {"alg": "None"}),
    "alg missing": raw({"typ": "hr-key+jwt", "kid": SIGNING_KEY.kid}),
    "alg null": raw(HEADER | {"alg": None}),
    "HS256 with the raw public key": hs256_with_public_key(SIGNING_KEY.public_key.public_bytes_raw()),
    "HS256 with the PEM public key": hs256_with_public_key(PUBLIC_PEM),
    "Ed448": forged(key=Ed448PrivateKey.generate()),
    "zero signature": raw(HEADER),
    "foreign signing key, our kid": forged(key=SigningKey.generate().private_key),
    "unknown kid": forged(kid="0123456789abcdef"),
    "kid missing": raw({"alg": "EdDSA", "typ": "hr-key+jwt"}),
    "kid path": forged(kid="../../../../dev/null"),
    "kid sql": forged(kid="x' UNION SELECT 'AA"),
    "kid empty": forged(kid=""),
    "kid with newline": forged(kid=SIGNING_KEY.kid + "\n"),
    "kid number": raw(HEADER | {"kid": 7}),
    "typ JWT": forged(typ="JWT"),
    "typ of admin keys": forged(typ="hr-admin+jwt"),
    "typ missing": raw({"alg": "EdDSA", "kid": SIGNING_KEY.kid}),
    "jku": forged(jku="https://evil.example/keys"),
    "x5u": forged(x5u="https://evil.example/cert"),
    "jwk": forged(jwk={"kty": "OKP", "crv": "Ed25519", "x": "AA"}),
    "crit": forged(crit=["exp"]),
    "zip": forged(zip="DEF"),
    "cty nested": forged(cty="JWT"),
    "header no object": raw([1, 2]),
    "header no json": raw(b"\xff\xfe"),
    "header deep": raw(b"[" * 2000),
    "iss": forged(claims(iss="other")),
    "iss missing": forged(claims(iss=...)),
    "aud of admin keys": forged(claims(aud="headrace:admin")),
    "aud list": forged(claims(aud=["headrace:api"])),
    "aud missing": forged(claims(aud=...)),
    "exp missing": forged(claims(exp=...)),
    "exp text": forged(claims(exp="9999999999")),
    "exp float": forged(claims(exp=9999999999.5)),
    "exp huge": forged(claims(exp=10**30)),
    "exp negative": forged(claims(exp=-1)),
    "exp true": forged(claims(exp=True)),
    "sub missing": forged(claims(sub=...)),
    "sub empty": forged(claims(sub="")),
    "sub number": forged(claims(sub=1)),
    "jti missing": forged(claims(jti=...)),
    "scope text": forged(claims(scope="chat:read")),
    "unknown claim": forged(claims(limits={"rps": 1})),
    "claims no object": forged([1]),
    "admin key": good(ADMIN_KEY),
    "admin key under our prefix": "hr_live_" + good(ADMIN_KEY).removeprefix("hr_admin_"),
    "two parts": good().rsplit(".", 1)[0],
    "four parts": good() + ".AAAA",
    "five parts, as JWE": good() + ".AAAA.AAAA",
    "leading space": " " + good(),
    "trailing newline": good() + "\n",
    "padding": good() + "==",
    "foreign character in the signature": good()[:-5] + "!" + good()[-5:],
    "plus and slash": good()[:-4] + "+/+/",
    "non-canonical last character": good()[:-1] + chr(ord(good()[-1]) + 1),
    "full-width": good().replace("a", "\uff41"),
    "json serialisation": "hr_live_" + json.dumps({"payload": "e30", "signatures": []}),
    "surrogate": "hr_live_\ud800",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused(name: str) -> None:
    assert reason(ATTACKS[name])


def test_a_tenants_key_is_no_admin_key() -> None:
    verifier = KeyVerifier({SIGNING_KEY.kid: SIGNING_KEY.public_key}, ADMIN_KEY)
    assert verifier.verify(good(ADMIN_KEY), NOW_US).scopes == frozenset({"admin:*"})
    assert reason(good(), verifier) == "wrong_prefix"
    assert reason("hr_admin_" + good().removeprefix("hr_live_"), verifier) == "wrong_typ"
    assert reason(forged(prefix="hr_admin_", typ="hr-admin+jwt"), verifier) == "wrong_aud"


def test_size_is_bounded_before_any_work() -> None:
    assert reason("hr_live_" + "A" * bounds.KEY_BYTES_MAX) == "oversized"


def test_reasons_never_hold_parts_of_the_key() -> None:
    reasons = {reason(text) for text in ATTACKS.values()}
    assert reasons <= {
        "wrong_prefix", "malformed", "bad_header", "wrong_typ", "unknown_kid", "bad_signature",
        "bad_claims", "wrong_iss", "wrong_aud",
    }  # fmt: skip


@given(st.integers(0, len(good()) - 1), st.characters(codec="ascii"))
def test_no_changed_character_is_accepted(position: int, character: str) -> None:
    text = good()
    changed = text[:position] + character + text[position + 1 :]
    if changed == text:
        assert VERIFIER.verify(changed, NOW_US).jti == "key_1"
    else:
        assert reason(changed)


@given(st.text(max_size=300))
def test_junk_is_refused_not_crashed_on(text: str) -> None:
    assert reason(text)
    assert reason("hr_live_" + text)


@given(st.integers(0, len(good()) - 1))
def test_truncated_keys_are_refused(length: int) -> None:
    assert reason(good()[:length])


def test_expiry_is_exact_and_checked_again_on_cached_keys() -> None:
    verifier = KeyVerifier({SIGNING_KEY.kid: SIGNING_KEY.public_key})
    key = good()
    assert reason(key, KeyVerifier({SIGNING_KEY.kid: SIGNING_KEY.public_key}), EXPIRES_US) == "expired"
    assert verifier.verify(key, EXPIRES_US - 1).jti == "key_1"
    assert reason(key, verifier, EXPIRES_US) == "expired"
    assert reason(key, verifier, EXPIRES_US) == "expired"


def test_leeway_is_what_was_asked_for() -> None:
    verifier = KeyVerifier({SIGNING_KEY.kid: SIGNING_KEY.public_key}, leeway_seconds=60)
    assert verifier.verify(good(), EXPIRES_US + 59_999_999).jti == "key_1"
    assert reason(good(), verifier, EXPIRES_US + 60_000_000) == "expired"
    with pytest.raises(AssertionError):
        KeyVerifier({}, leeway_seconds=61)


def test_keys_of_several_signing_keys_work_until_theirs_is_retired() -> None:
    second = SigningKey.generate()
    verifier = KeyVerifier({key.kid: key.public_key for key in (SIGNING_KEY, second)})
    old = good()
    new = issue(
        second,
        tenant="demo",
        jti="key_2",
        scopes=("chat:read",),
        issued_us=NOW_US,
        expires_us=EXPIRES_US,
    )
    assert verifier.verify(old, NOW_US).jti == "key_1"
    assert verifier.verify(new, NOW_US).jti == "key_2"
    verifier.replace_public_keys({second.kid: second.public_key})
    assert reason(old, verifier) == "unknown_kid", "the cache must not outlive a retired signing key"
    assert verifier.verify(new, NOW_US).jti == "key_2"


def test_the_cache_is_bounded_and_keeps_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = KeyVerifier({SIGNING_KEY.kid: SIGNING_KEY.public_key}, cache_size=2)
    first, second, third = (good(jti=f"key_{number}") for number in range(3))
    for key in (first, second, first, third):
        verifier.verify(key, NOW_US)
    checked: list[str] = []
    monkeypatch.setattr(
        KeyVerifier, "_verify_text", lambda self, text: checked.append(text) or pytest.fail("not cached")
    )
    assert verifier.verify(first, NOW_US).jti == "key_0"
    assert verifier.verify(third, NOW_US).jti == "key_2"
    assert checked == []
    with pytest.raises(pytest.fail.Exception):
        verifier.verify(second, NOW_US)


def test_the_private_key_has_no_repr() -> None:
    private = SIGNING_KEY.private_key.private_bytes_raw()
    assert private.hex() not in repr(SIGNING_KEY)
    assert repr(SIGNING_KEY) == f"SigningKey(kid={SIGNING_KEY.kid!r})"
