"""The core's signing keys: one private key is active, several public ones are valid."""

from pathlib import Path

from headrace.clock import Clock
from headrace.core.failure import ControlFailure
from headrace.identity.signing import (
    PublicKeys,
    SigningKey,
    decode_public_key,
    encode_public_key,
)
from headrace.store.control import Change, ControlStore
from headrace.store.secrets import load_or_create_signing_key, replace_signing_key


class Keyring:
    """Private key from `secrets_dir`, public keys from the control store.

    A private key that the store does not know yet (first start, or a crash between the two writes) is
    added to it. A lost private key is replaced by a new one; keys signed with the lost one stay valid,
    since their public key is still there, until it is retired.
    """

    def __init__(self, store: ControlStore, secrets_dir: Path, clock: Clock) -> None:
        self._store = store
        self._secrets_dir = secrets_dir
        self._clock = clock
        self._active = load_or_create_signing_key(secrets_dir)
        self._public_keys = {kid: decode_public_key(text) for kid, text in store.public_keys().items()}
        if self._active.kid not in self._public_keys:
            self._register(self._active, "core")

    @property
    def active(self) -> SigningKey:
        """The key that signs new API keys."""
        return self._active

    @property
    def public_keys(self) -> PublicKeys:
        """All valid public keys by `kid`, as verifiers want them."""
        return dict(self._public_keys)

    def encoded_public_keys(self) -> dict[str, str]:
        """The same in base64url, to hand to another process."""
        return {kid: encode_public_key(key) for kid, key in self._public_keys.items()}

    def rotate(self, actor: str) -> str:
        """Makes a new active signing key and returns its `kid`. Old API keys stay valid.

        Verifiers that live on (`KeyVerifier.replace_public_keys`) have to be given the new set.
        """
        self._active = replace_signing_key(self._secrets_dir)
        self._register(self._active, actor)
        return self._active.kid

    def retire(self, kid: str, actor: str) -> None:
        """Ends the validity of every API key signed with `kid`. Raises `ControlFailure`."""
        if kid == self._active.kid:
            raise ControlFailure(409, "signing_key_active", f"{kid} is the active signing key; rotate first")
        if kid not in self._public_keys:
            raise ControlFailure(404, "signing_key_not_found", f"there is no signing key {kid[:64]!r}")
        change = Change(at_us=self._clock.wall_us(), actor=actor, action="signing_key.retired", subject=kid)
        self._store.retire_signing_key(kid, change)
        del self._public_keys[kid]

    def _register(self, signing_key: SigningKey, actor: str) -> None:
        change = Change(
            at_us=self._clock.wall_us(),
            actor=actor,
            action="signing_key.created",
            subject=signing_key.kid,
        )
        self._store.add_signing_key(signing_key.kid, encode_public_key(signing_key.public_key), change)
        self._public_keys[signing_key.kid] = signing_key.public_key
