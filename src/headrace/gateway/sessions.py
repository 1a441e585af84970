"""`/v1/sessions`: begin, look at and end a conversation's session."""

from typing import Any

import msgspec

from headrace.api import refusals
from headrace.core.core import Core
from headrace.core.sessions import Session
from headrace.gateway.exchange import Exchange
from headrace.gateway.identify import require_scope
from headrace.identity import Identity

PREFIX = "/v1/sessions/"
_encode = msgspec.json.Encoder().encode


class SessionRoutes:
    """Handlers of the routes of sessions."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def begin(self, exchange: Exchange, identity: Identity) -> None:
        """`POST /v1/sessions`: a new one. The body is empty or an empty object."""
        require_scope(identity, "chat:read")
        if exchange.request.body.strip() not in (b"", b"{}"):
            raise refusals.malformed("A session takes no fields: send an empty body or {}.")
        exchange.send_json(_encode(_shown(self._core.sessions.begin(identity.tenant))), status=201)

    async def show(self, exchange: Exchange, identity: Identity) -> None:
        """`GET /v1/sessions/{id}`"""
        require_scope(identity, "chat:read")
        session_id = exchange.request.path.removeprefix(PREFIX)
        session = self._core.sessions.get(session_id, identity.tenant)
        if session is None:
            raise refusals.session_not_found(session_id[:80])
        exchange.send_json(_encode(_shown(session)))

    async def end(self, exchange: Exchange, identity: Identity) -> None:
        """`DELETE /v1/sessions/{id}`: what the workers keep of it is forgotten."""
        require_scope(identity, "chat:read")
        session_id = exchange.request.path.removeprefix(PREFIX)
        if not self._core.end_session(session_id, identity.tenant):
            raise refusals.session_not_found(session_id[:80])
        exchange.send_json(_encode({"id": session_id, "object": "session.deleted", "deleted": True}))


def _shown(session: Session) -> dict[str, Any]:
    return {
        "id": session.session_id,
        "object": "session",
        "created": session.created_ts // 1_000_000,
        "expires_at": session.expires_ts // 1_000_000,
    }
