"""The routes of the admin API (UX-1): tenants, keys, usage and refunds, workers.

Each request asks the core over its private socket; usage comes from the ledger's file through a read-only
connection, after the core has flushed. See `guard` for what every request passes first.
"""

import asyncio
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from headrace.admin.bodies import (
    KeyCreate,
    ModelUpdate,
    RefundCreate,
    TenantCreate,
    TenantUpdate,
    body_of,
    levels_of,
    limit_of,
    limits_of,
    page_of,
    query_of,
    schema_of,
    sharing_of,
)
from headrace.admin.guard import Guard, core_unavailable
from headrace.admin.problems import Problem
from headrace.admin.usage_query import PARAMETERS, BadQuery, parse_query
from headrace.clock import Clock
from headrace.core import messages as m
from headrace.core.client import CoreClient, CoreUnavailable
from headrace.core.failure import ControlFailure
from headrace.errors import SetupError
from headrace.identity import KeyVerifier
from headrace.store.errors import StoreUnavailable
from headrace.store.reports import ReportTooLong, usage_record, usage_report

REPORTS_AT_ONCE_MAX: Final = 2
"""More wait: a report keeps a core of the machine busy."""

_log = structlog.get_logger("headrace.admin")


def create_app(*, core: CoreClient, ledger: Path, verifier: KeyVerifier, clock: Clock) -> ASGIApp:
    """The whole application, guard included."""
    app = FastAPI(
        title="headrace admin API",
        docs_url=None,
        redoc_url=None,
        openapi_url="/admin/v1/openapi.json",
        redirect_slashes=False,
    )

    @app.get("/healthz")
    async def healthz() -> Response:
        """This process is alive. Needs no key."""
        return _json({"status": "ok"})

    _add_error_answers(app)
    _add_tenants(app, core)
    _add_keys(app, core)
    _add_usage(app, core, ledger, clock)
    return Guard(app, verifier=verifier, core=core, clock=clock)


def _add_tenants(app: FastAPI, core: CoreClient) -> None:
    @app.post("/admin/v1/tenants", status_code=201, openapi_extra=schema_of(TenantCreate))
    async def create_tenant(request: Request) -> Response:
        """A new tenant."""
        body = await body_of(request, TenantCreate)
        reply = await core.call(
            m.CreateTenant(
                id=body.id,
                name=body.name,
                cache=body.cache,
                shared_prefix=body.shared_prefix,
                sharing=sharing_of(body),
                limits=limits_of(body.limits),
                levels=levels_of(body),
            ),
            m.TenantReply,
            actor=_actor(request),
        )
        return _json(reply.tenant, 201, location=f"/admin/v1/tenants/{quote(reply.tenant.id, safe='')}")

    @app.get("/admin/v1/tenants")
    async def list_tenants(request: Request) -> Response:
        """A page of tenants, by id; continue with `after` = the last id."""
        after, limit = page_of(query_of(request, ("after", "limit")))
        reply = await core.call(m.ListTenants(after=after, limit=limit), m.TenantsReply)
        return _json({"data": reply.tenants, "has_more": reply.has_more})

    @app.get("/admin/v1/tenants/{tenant_id}")
    async def get_tenant(tenant_id: str) -> Response:
        """One tenant."""
        return _json((await core.call(m.GetTenant(id=tenant_id), m.TenantReply)).tenant)

    @app.patch("/admin/v1/tenants/{tenant_id}", openapi_extra=schema_of(TenantUpdate))
    async def update_tenant(tenant_id: str, request: Request) -> Response:
        """Changes what is given. In force when this returns."""
        body = await body_of(request, TenantUpdate)
        given = body.model_fields_set
        limits_of(body.limits)
        update = m.UpdateTenant(
            id=tenant_id,
            name=body.name if "name" in given else msgspec.UNSET,
            status=body.status if "status" in given else msgspec.UNSET,
            cache=body.cache if "cache" in given else msgspec.UNSET,
            shared_prefix=body.shared_prefix if "shared_prefix" in given else msgspec.UNSET,
            sharing=sharing_of(body),
            limits=dict(body.limits) if "limits" in given else msgspec.UNSET,
            levels=levels_of(body),
        )
        return _json((await core.call(update, m.TenantReply, actor=_actor(request))).tenant)


def _add_keys(app: FastAPI, core: CoreClient) -> None:
    @app.post("/admin/v1/keys", status_code=201, openapi_extra=schema_of(KeyCreate))
    async def create_key(request: Request) -> Response:
        """A new key of a tenant. This reply is the only place where the key itself is ever seen."""
        body = await body_of(request, KeyCreate)
        create = m.CreateKey(
            tenant=body.tenant,
            department=body.department,
            user=body.user,
            name=body.name,
            scopes=None if body.scopes is None else tuple(body.scopes),
            expires_in_s=body.expires_in_s,
            limits=limits_of(body.limits),
        )
        issued = (await core.call(create, m.IssuedKeyReply, actor=_actor(request))).issued
        return _json({"key": issued.key, **msgspec.structs.asdict(issued.view)}, 201)

    @app.get("/admin/v1/keys")
    async def list_keys(request: Request) -> Response:
        """A page of keys (their claims), oldest first; continue with `after` = the last `jti`."""
        query = query_of(request, ("tenant", "after", "limit"))
        after, limit = page_of(query)
        reply = await core.call(m.ListKeys(tenant=query.get("tenant"), after=after, limit=limit), m.KeysReply)
        return _json({"data": reply.keys, "has_more": reply.has_more})

    @app.delete("/admin/v1/keys/{jti}", status_code=204)
    async def revoke_key(jti: str, request: Request) -> Response:
        """Ends a key for good. In force when this returns; again: the same answer."""
        await core.call(m.RevokeKey(jti=jti), m.KeyReply, actor=_actor(request))
        return Response(status_code=204)


def _add_usage(app: FastAPI, core: CoreClient, ledger: Path, clock: Clock) -> None:
    reports_at_once = asyncio.Semaphore(REPORTS_AT_ONCE_MAX)

    @app.get("/admin/v1/usage")
    async def usage(request: Request) -> Response:
        """Sums of the ledger: `tenant`, `key`, `model`, `from`, `to`, `group_by`."""
        query = parse_query(query_of(request, PARAMETERS))
        await core.call(m.FlushLedger(), m.Done)
        async with reports_at_once:
            report = await asyncio.to_thread(usage_report, ledger, query, clock)
        return _json({"data": report.rows, "total": report.total, "truncated": report.truncated})

    @app.get("/admin/v1/usage/{request_id}")
    async def usage_of_operation(request_id: str) -> Response:
        """The final record of one operation."""
        await core.call(m.FlushLedger(), m.Done)
        record = await asyncio.to_thread(usage_record, ledger, request_id)
        if record is None:
            raise Problem(404, "operation_not_found", "no operation of this id has ended")
        return _json(record)

    @app.post("/admin/v1/usage/{request_id}/refund", openapi_extra=schema_of(RefundCreate))
    async def refund_operation(request_id: str, request: Request) -> Response:
        """Takes back what an operation is charged: its final record as it stands then. What was used stays on
        it. Again with the same reason: the same answer."""
        body = await body_of(request, RefundCreate)
        refund = m.RefundOperation(request_id=request_id, reason=body.reason)
        return _json((await core.call(refund, m.OperationReply, actor=_actor(request))).operation)

    @app.get("/admin/v1/models")
    async def models() -> Response:
        """All models, with what was changed since the start."""
        return _json({"data": (await core.call(m.ListModels(), m.ModelsReply)).models})

    @app.patch("/admin/v1/models/{model_id:path}", openapi_extra=schema_of(ModelUpdate))
    async def update_model(model_id: str, request: Request) -> Response:
        """Changes how a model's replicas work, from the next step on and until the server ends."""
        body = await body_of(request, ModelUpdate)
        changes = {name: getattr(body, name) for name in body.model_fields_set}
        update = m.UpdateModel(id=model_id, changes=changes)
        return _json((await core.call(update, m.ModelsReply, actor=_actor(request))).models[0])

    @app.get("/admin/v1/queue")
    async def queue(request: Request) -> Response:
        """What waits and why, of all tenants: each model's queue with the first `limit` requests in the expected order;
        of one model with `model`."""
        query = query_of(request, ("model", "limit"))
        limit = limit_of(query, default=100)
        reply = await core.call(m.ListQueues(model=query.get("model"), limit=limit), m.QueuesReply)
        return _json({"data": reply.queues})

    @app.get("/admin/v1/workers")
    async def workers() -> Response:
        """All replicas, as of now."""
        return _json({"data": (await core.call(m.ListWorkers(), m.WorkersReply)).workers})


def _add_error_answers(app: FastAPI) -> None:
    """The one border where errors become problems."""

    async def answer(request: Request, error: Exception) -> Response:
        return _as_problem(error).response(request.state.request_id)

    for kind in (
        Problem,
        ControlFailure,
        CoreUnavailable,
        StoreUnavailable,
        SetupError,
        ReportTooLong,
        BadQuery,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, answer)


def _as_problem(error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case ControlFailure():
            return Problem(error.status, error.code, error.message, param=error.param)
        case BadQuery():
            return Problem(400, "invalid_filter", str(error), param=error.field)
        case ReportTooLong():
            return Problem(503, "report_too_long", str(error), headers={"x-should-retry": "false"})
        case HTTPException(status_code=405):
            return Problem(
                405, "method_not_allowed", "the route does not take this method", headers=error.headers
            )
        case HTTPException(status_code=404):
            return Problem(404, "not_found", "there is no such route")
        case CoreUnavailable():
            _log.warning("core_unavailable", error=str(error))
            return core_unavailable()
        case StoreUnavailable() | SetupError():
            _log.error("ledger_unreadable", error=str(error))
            return Problem(503, "store_unavailable", "the ledger cannot be read now")
        case _:
            _log.error("admin_request_failed", exc_info=error)
            return Problem(500, "internal_error", "an error of headrace itself; its log has more")


def _actor(request: Request) -> str:
    return str(request.state.actor)


def _json(value: Any, status: int = 200, **headers: str) -> Response:
    return Response(
        msgspec.json.encode(value), status_code=status, headers=headers, media_type="application/json"
    )
