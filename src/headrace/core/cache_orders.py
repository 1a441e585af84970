"""What may be kept of a request, and who may find it: the tenant's settings, the session, the times to live."""

from headrace.api import refusals
from headrace.api.chat import ChatCall
from headrace.caching.slots import CacheOrder
from headrace.core.directory import Directory
from headrace.core.served_model import ServedModel
from headrace.core.sessions import Sessions
from headrace.identity import Identity


class CacheOrders:
    """Makes the orders that go to workers with each request."""

    def __init__(self, directory: Directory, sessions: Sessions, *, session_ttl_s: float) -> None:
        self._directory = directory
        self._sessions = sessions
        self._session_ttl_s = session_ttl_s

    def of(self, model: ServedModel, identity: Identity, call: ChatCall) -> CacheOrder:
        """What may be kept of a request, and who may find it. Raises `Refusal` (404) for a session that is none."""
        mode, group = self._directory.cache_of(identity.tenant)
        session = None
        if call.session_id is not None:
            if self._sessions.use(call.session_id, identity.tenant) is None:
                raise refusals.session_not_found(call.session_id[:80])
            session = session_key(identity.tenant, call.session_id)
        elif call.conversation_id is not None:
            # A client's own name means something only together with its tenant and key.
            session = f"{identity.tenant}/c/{identity.jti}/{call.conversation_id}"
        ttl_s = model.cache_ttl_s if session is None else self._session_ttl_s
        return CacheOrder(mode=mode, group=group, session=session, ttl_s=ttl_s)


def session_key(tenant: str, session_id: str) -> str:
    """How workers call a session."""
    return f"{tenant}/s/{session_id}"
