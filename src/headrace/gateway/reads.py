"""Routes that only read: models, a request's usage, health."""

from typing import Any
from urllib.parse import parse_qs

import msgspec

from headrace.api import refusals
from headrace.core.accounts import SHARED_LEVELS
from headrace.core.core import Core
from headrace.core.served_model import ServedModel
from headrace.gateway.exchange import Exchange
from headrace.gateway.identify import require_scope
from headrace.identity import Identity
from headrace.ledger.records import OperationRecord

_encode = msgspec.json.Encoder().encode


class Reads:
    """Handlers of the read routes."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def models(self, exchange: Exchange, identity: Identity) -> None:
        """`GET /v1/models`"""
        models = [_model(model) for model in self._core.models.values()]
        exchange.send_json(_encode({"object": "list", "data": models}))

    async def model(self, exchange: Exchange, identity: Identity) -> None:
        """`GET /v1/models/{id}`; an id may contain slashes."""
        model_id = exchange.request.path.removeprefix("/v1/models/")
        model = self._core.models.get(model_id)
        if model is None:
            raise refusals.model_not_found(model_id)
        exchange.send_json(_encode(_model(model)))

    async def usage(self, exchange: Exchange, identity: Identity) -> None:
        """`GET /v1/usage/{request_id}`: the tenant's own records only."""
        require_scope(identity, "usage:read")
        request_id = exchange.request.path.removeprefix("/v1/usage/")
        found = self._core.usage(request_id, identity.tenant)
        if found is None:
            raise refusals.usage_not_found(request_id[:80])
        shown = {"object": "usage", "state": "settled", **msgspec.to_builtins(found)}
        if not isinstance(found, OperationRecord):
            shown["state"] = "open"
            shown["queue"] = self._core.wait_of(request_id)
        exchange.send_json(_encode(shown))

    async def limits(self, exchange: Exchange, identity: Identity) -> None:
        """`GET /v1/limits`: for each level the limits, what was used in the last 60 s, and what is held."""
        wanted = self._wanted(exchange).model_id
        accounts = self._core.accounts.of(
            tenant_id=identity.tenant, api_key_id=identity.jti, user_id=identity.user, model_id=wanted
        )
        own = [account for account in accounts if account.level not in SHARED_LEVELS]
        shared = [account for account in accounts if account.level in SHARED_LEVELS]
        exchange.send_json(
            _encode(
                {
                    "object": "limits",
                    "model": wanted,
                    "data": self._core.accounts.describe(own),
                    # What others use is not this tenant's business; that a limit is there is.
                    "shared": [{"level": one.level, "limits": one.limits} for one in shared],
                }
            )
        )

    async def queue(self, exchange: Exchange, identity: Identity) -> None:
        """`GET /v1/queue`: the tenant's own waiting requests, each with its position and reason."""
        model = self._wanted(exchange)
        exchange.send_json(_encode(self._core.queues.of_tenant(model, identity.tenant)))

    def _wanted(self, exchange: Exchange) -> ServedModel:
        """The model that `?model=` names; the first one without it."""
        models = self._core.models
        wanted = parse_qs(exchange.request.query.decode("latin-1")).get("model", [next(iter(models))])[0]
        if wanted not in models:
            raise refusals.model_not_found(wanted[:80])
        return models[wanted]

    async def health(self, exchange: Exchange) -> None:
        """`GET /healthz`: 200 while at least one replica is ready, for load balancers; no key needed."""
        ready = any(model.replicas for model in self._core.models.values())
        is_well = ready and self._core.journal.is_healthy and not self._core.is_stopping
        exchange.send_json(
            _encode({"status": "ok" if is_well else "unavailable"}), status=200 if is_well else 503
        )


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created_s,
        "owned_by": "headrace",
        "context_length": model.context_tokens,
    }
