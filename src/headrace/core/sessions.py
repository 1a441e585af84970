"""Sessions: random names of conversations, each bound to the tenant that asked for it.

Only the names and their times are here; what is kept of a conversation is with the workers. An id of another
tenant, an ended one and one that never was look the same.
"""

import secrets
from collections import OrderedDict

import msgspec

from headrace import bounds
from headrace.clock import Clock


class Session(msgspec.Struct):
    """Times in microseconds since 1970 UTC."""

    session_id: str
    tenant: str
    created_ts: int
    expires_ts: int


class Sessions:
    """All sessions. Belongs to the core's loop."""

    def __init__(self, clock: Clock, *, ttl_s: float, sessions_max: int = bounds.SESSIONS_MAX) -> None:
        self._clock = clock
        self._ttl_us = int(ttl_s * 1e6)
        self._sessions_max = sessions_max
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        """The one idle longest first: all have the same time to live, so it is also the first to end."""

    def begin(self, tenant: str) -> Session:
        now_ts = self._expire()
        if len(self._sessions) >= self._sessions_max:
            self._sessions.popitem(last=False)
        session = Session(f"sess_{secrets.token_hex(16)}", tenant, now_ts, now_ts + self._ttl_us)
        self._sessions[session.session_id] = session
        return session

    def get(self, session_id: str, tenant: str) -> Session | None:
        """A live session of this tenant."""
        self._expire()
        session = self._sessions.get(session_id)
        return session if session is not None and session.tenant == tenant else None

    def use(self, session_id: str, tenant: str) -> Session | None:
        """The same, and it lives on from now."""
        session = self.get(session_id, tenant)
        if session is not None:
            session.expires_ts = self._clock.wall_us() + self._ttl_us
            self._sessions.move_to_end(session_id)
        return session

    def end(self, session_id: str, tenant: str) -> bool:
        """False if there is none."""
        if self.get(session_id, tenant) is None:
            return False
        del self._sessions[session_id]
        return True

    def _expire(self) -> int:
        now_ts = self._clock.wall_us()
        while self._sessions and next(iter(self._sessions.values())).expires_ts <= now_ts:
            self._sessions.popitem(last=False)
        return now_ts
