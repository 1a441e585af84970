"""Who is calling: the key of a request becomes an identity, or a 401 that tells nothing."""

from headrace.api import refusals
from headrace.clock import Clock
from headrace.core.directory import Directory
from headrace.core.metrics import CoreMetrics
from headrace.http import HttpRequest
from headrace.identity import Identity, InvalidKey, KeyVerifier


class Identifier:
    """Verifies keys and asks the directory whether they are still wanted."""

    def __init__(
        self, verifier: KeyVerifier, directory: Directory, clock: Clock, metrics: CoreMetrics
    ) -> None:
        self._verifier = verifier
        self._directory = directory
        self._clock = clock
        self._metrics = metrics

    def identify(self, request: HttpRequest) -> Identity:
        """The caller. Raises `Refusal` (401); the reason goes into a metric only."""
        try:
            now_us = self._clock.wall_us()
            # Verified before, by its head: what may have changed while the body came is asked again.
            identity = request.found
            if not isinstance(identity, Identity) or now_us >= identity.expires_us:
                request.found = identity = self._verifier.verify(_bearer(request), now_us)
            self._directory.authorize(identity)
        except InvalidKey as error:
            self._metrics.unauthenticated(error.reason)
            raise refusals.invalid_key() from None
        return identity


def require_scope(identity: Identity, scope: str) -> None:
    """Raises `Refusal` (403) if the key lacks the scope."""
    if scope not in identity.scopes:
        raise refusals.missing_scope(scope)


def _bearer(request: HttpRequest) -> str:
    header = request.headers.get(b"authorization")
    if header is None:
        raise InvalidKey("missing")
    scheme, _, key = header.partition(b" ")
    if scheme.lower() != b"bearer":
        raise InvalidKey("wrong_scheme")
    try:
        return key.strip().decode("ascii")
    except UnicodeDecodeError:
        raise InvalidKey("malformed") from None
