"""UX-1, AP-12: the admin API through a real admin process and a real core."""

import contextlib
import http.client
import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import headrace.core
from headrace.admin import guard, problems
from headrace.identity import KeyVerifier, SigningKey, issue
from headrace.ledger.records import OperationRecord
from tests.admin.admin_world import QUEUE, WORKER, AdminWorld

FUTURE_US = 9_000_000_000_000_000


def is_problem(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """Checks the form of RFC 9457 and returns the body."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:headrace:problem:{code}"
    assert body["title"] == problems.TITLES[code]
    assert (body["status"], body["code"], body["param"]) == (status, code, param)
    assert body["detail"]
    assert body["instance"] == f"urn:headrace:request:{response.headers['x-request-id']}"
    return body


def test_a_tenants_life(world: AdminWorld) -> None:
    made = world.http.post("/admin/v1/tenants", json={"id": "life", "name": "Life"})
    assert made.status_code == 201
    assert made.headers["location"] == "/admin/v1/tenants/life"
    assert made.headers["cache-control"] == "no-store"
    assert made.json().items() >= {"id": "life", "name": "Life", "status": "active", "version": 1}.items()
    assert world.http.get("/admin/v1/tenants/life").json() == made.json()
    changed = world.http.patch("/admin/v1/tenants/life", json={"status": "disabled"}).json()
    assert (changed["name"], changed["status"], changed["version"]) == ("Life", "disabled", 2)
    cleared = world.http.patch("/admin/v1/tenants/life", json={"name": None}).json()
    assert (cleared["name"], cleared["status"], cleared["version"]) == (None, "disabled", 3)
    assert world.http.patch("/admin/v1/tenants/life", json={}).json() == cleared
    assert cleared in world.http.get("/admin/v1/tenants").json()["data"]


def test_limits_inside_a_tenant(world: AdminWorld) -> None:
    made = world.http.post(
        "/admin/v1/tenants",
        json={
            "id": "inside",
            "departments": {"sales": {"tpm": 100}, "law": {}},
            "user_limits": {"rps": 2.5, "tpm": 10},
            "users": {"ann": {"tpm": 50}},
            "model_limits": {"org/smol:q4": {"concurrency": 3}},
        },
    )
    assert made.status_code == 201
    assert (
        made.json().items()
        >= {
            "limits": {},
            "departments": {"law": {}, "sales": {"tpm": 100}},
            "user_limits": {"rps": 2.5, "tpm": 10},
            "users": {"ann": {"tpm": 50}},
            "model_limits": {"org/smol:q4": {"concurrency": 3}},
        }.items()
    )
    assert world.http.get("/admin/v1/tenants/inside").json() == made.json()
    changed = world.http.patch(
        "/admin/v1/tenants/inside",
        json={
            "departments": {"sales": {"rps": 4}, "law": None},
            "user_limits": {"rps": None},
            "users": {"ann": {"tpm": None}, "bob": {"streams": 1}},
            "model_limits": {},
        },
    )
    assert changed.status_code == 200
    assert (
        changed.json().items()
        >= {
            "departments": {"sales": {"rps": 4.0, "tpm": 100}},
            "user_limits": {"tpm": 10},
            "users": {"bob": {"streams": 1}},
            "model_limits": {"org/smol:q4": {"concurrency": 3}},
            "version": 2,
        }.items()
    )
    assert world.http.get("/admin/v1/tenants/inside").json() == changed.json()


def test_what_the_cache_keeps_of_a_tenant(world: AdminWorld) -> None:
    made = world.http.post(
        "/admin/v1/tenants", json={"id": "kept", "cache": "prefix_only", "shared_prefix": "house"}
    )
    assert made.status_code == 201
    assert made.json().items() >= {"cache": "prefix_only", "shared_prefix": "house"}.items()
    path = "/admin/v1/tenants/kept"
    assert world.http.get(path).json() == made.json()
    assert made.json() in world.http.get("/admin/v1/tenants").json()["data"]
    changed = world.http.patch(path, json={"cache": "off"}).json()
    assert (changed["cache"], changed["shared_prefix"], changed["version"]) == ("off", "house", 2)
    changed = world.http.patch(path, json={"name": "Kept"}).json()
    assert (changed["cache"], changed["shared_prefix"], changed["version"]) == ("off", "house", 3)
    changed = world.http.patch(path, json={"shared_prefix": None}).json()
    assert (changed["cache"], changed["shared_prefix"], changed["version"]) == ("off", None, 4)
    assert world.http.get(path).json() == changed
    assert world.directory.cache_of("kept") == ("off", None)
    plain = world.http.post("/admin/v1/tenants", json={"id": "plain", "shared_prefix": None}).json()
    assert (plain["cache"], plain["shared_prefix"]) == ("full", None)
    problem = is_problem(world.http.patch(path, json={"cache": "all"}), 400, "invalid_value", "cache")
    assert all(mode in problem["detail"] for mode in ("full", "prefix_only", "off"))


def test_keys_of_a_department(world: AdminWorld) -> None:
    departments = {"sales": {"tpm": 100}}
    world.http.post("/admin/v1/tenants", json={"id": "departed", "departments": departments})
    made = world.http.post("/admin/v1/keys", json={"tenant": "departed", "department": "sales"})
    assert (made.status_code, made.json()["department"]) == (201, "sales")
    jti = made.json()["jti"]
    assert b"sales" not in made.json()["key"].encode()
    listed = world.http.get("/admin/v1/keys", params={"tenant": "departed"}).json()["data"]
    assert [key["department"] for key in listed] == ["sales"]
    problem = is_problem(
        world.http.post("/admin/v1/keys", json={"tenant": "departed", "department": "law"}),
        404,
        "department_not_found",
        "department",
    )
    assert "'law'" in problem["detail"]
    path, gone = "/admin/v1/tenants/departed", {"departments": {"sales": None}}
    problem = is_problem(world.http.patch(path, json=gone), 409, "department_in_use", "departments")
    assert "'sales' (1)" in problem["detail"]
    assert world.http.delete(f"/admin/v1/keys/{jti}").status_code == 204
    assert world.http.patch(path, json=gone).json()["departments"] == {}


def test_tenants_come_in_pages(world: AdminWorld) -> None:
    for number in range(3):
        world.http.post("/admin/v1/tenants", json={"id": f"00page{number}"})
    page = world.http.get("/admin/v1/tenants", params={"limit": 2}).json()
    assert [tenant["id"] for tenant in page["data"]] == ["00page0", "00page1"]
    assert page["has_more"] is True
    page = world.http.get("/admin/v1/tenants", params={"limit": 1, "after": "00page1"}).json()
    assert [tenant["id"] for tenant in page["data"]] == ["00page2"]


def test_a_keys_life(world: AdminWorld) -> None:
    world.http.post("/admin/v1/tenants", json={"id": "keys"})
    made = world.http.post(
        "/admin/v1/keys",
        json={
            "tenant": "keys",
            "user": "ann",
            "name": "laptop",
            "scopes": ["chat:read"],
            "expires_in_s": 60,
        },
    )
    assert made.status_code == 201
    key = made.json().pop("key")
    view = {name: value for name, value in made.json().items() if name != "key"}
    assert view["jti"].startswith("key_")
    assert (view["tenant"], view["user"], view["name"]) == ("keys", "ann", "laptop")
    assert (view["scopes"], view["revoked_ts"]) == (["chat:read"], None)
    identity = KeyVerifier(world.directory.keyring.public_keys).verify(key, view["created_ts"])
    world.directory.authorize(identity)
    listed = world.http.get("/admin/v1/keys", params={"tenant": "keys"})
    assert listed.json() == {"data": [view], "has_more": False}
    assert key not in listed.text
    for _ in range(2):
        revoked = world.http.delete(f"/admin/v1/keys/{view['jti']}")
        assert (revoked.status_code, revoked.content) == (204, b"")
        with pytest.raises(problems.HeadraceError, match="revoked"):
            world.directory.authorize(identity)
    assert world.http.get("/admin/v1/keys", params={"tenant": "keys"}).json()["data"][0]["revoked_ts"]


def test_changes_are_on_record_under_the_admin_key(world: AdminWorld) -> None:
    world.http.post("/admin/v1/tenants", json={"id": "recorded"})

    async def changes() -> Any:
        return world.directory._store.changes()

    found = [change for _, change in world.on_core(changes) if change.subject == "recorded"]
    assert [(change.actor, change.action) for change in found] == [(world.issued.view.jti, "tenant.created")]


def test_workers(world: AdminWorld) -> None:
    assert world.http.get("/admin/v1/workers").json() == {"data": [msgspec.to_builtins(WORKER)]}


def test_usage_is_complete_without_waiting(world: AdminWorld) -> None:
    for number in range(5):
        world.record(f"usage_{number}", tenant_id="usage", outcome="completed" if number else "refused")
    report = world.http.get("/admin/v1/usage", params={"tenant": "usage", "group_by": "model,day"}).json()
    sums = {
        "operations": 5,
        "prompt_tokens": 50,
        "prompt_tokens_cached": 20,
        "completion_tokens": 25,
        "charged_prompt_tokens": 50,
        "charged_completion_tokens": 25,
        "refusals": 1,
        "aborted": 0,
        "errors": 0,
        "latency_us_p50": 1_000_000,
        "latency_us_p99": 1_000_000,
    }
    assert report == {
        "data": [{"model": "smol", "day": "2026-09-21"} | sums],
        "total": sums,
        "truncated": False,
    }
    by_key = world.http.get("/admin/v1/usage", params={"tenant": "usage", "group_by": "tenant,key,user"})
    row = by_key.json()["data"][0]
    assert (row["tenant_id"], row["api_key_id"], row["user_id"]) == ("usage", "key_1", None)


def test_one_operation_by_the_field_names_of_the_ledger(world: AdminWorld) -> None:
    record = world.record("usage_one", tenant_id="one", attempt_ids=("a1",))
    body = world.http.get("/admin/v1/usage/usage_one").json()
    assert list(body) == list(OperationRecord.__struct_fields__)
    assert body == json.loads(msgspec.json.encode(record))
    is_problem(world.http.get("/admin/v1/usage/none"), 404, "operation_not_found")


def test_a_refund_takes_the_charge_and_is_on_record(world: AdminWorld) -> None:
    record = world.record("refund_one", tenant_id="refunds", department="research")
    answer = world.http.post("/admin/v1/usage/refund_one/refund", json={"reason": "our fault"})
    assert answer.status_code == 200
    expected = json.loads(msgspec.json.encode(record)) | {
        "charged_prompt_tokens": 0,
        "charged_completion_tokens": 0,
        "refunded": True,
    }
    assert answer.json() == expected
    again = world.http.post("/admin/v1/usage/refund_one/refund", json={"reason": "our fault"})
    assert again.json() == expected
    other = world.http.post("/admin/v1/usage/refund_one/refund", json={"reason": "another"})
    is_problem(other, 409, "already_refunded")
    assert world.http.get("/admin/v1/usage/refund_one").json() == expected
    report = world.http.get("/admin/v1/usage", params={"tenant": "refunds", "group_by": "department"}).json()
    (row,) = report["data"]
    assert (row["department"], row["completion_tokens"], row["charged_completion_tokens"]) == (
        "research",
        5,
        0,
    )

    async def changes() -> Any:
        return world.directory._store.changes()

    found = [change for _, change in world.on_core(changes) if change.subject == "refund_one"]
    assert [(change.actor, change.action, change.body) for change in found] == [
        (world.issued.view.jti, "operation.refunded", {"reason": "our fault"})
    ]


def test_an_operation_that_runs_cannot_be_refunded_yet(world: AdminWorld) -> None:
    world.open("refund_running")
    answer = world.http.post("/admin/v1/usage/refund_running/refund", json={"reason": "our fault"})
    is_problem(answer, 409, "operation_open")


@pytest.mark.parametrize(
    ("query", "param", "named"),
    [
        ("from=yesterday", "from", "2026-10-01"),
        ("to=", "to", "2026-10-01"),
        ("group_by=week", "group_by", "tenant, key, model, user, department, day, hour, outcome"),
        ("from=5&to=5", "to", "later"),
        ("tenant=", "tenant", "1 to 256"),
    ],
)
def test_bad_filters(world: AdminWorld, query: str, param: str, named: str) -> None:
    body = is_problem(world.http.get(f"/admin/v1/usage?{query}"), 400, "invalid_filter", param)
    assert named in body["detail"]


@pytest.mark.parametrize(
    ("path", "param"),
    [("usage?tenants=x", "tenants"), ("keys?tenant_id=x", "tenant_id"), ("tenants?x=1", "x")],
)
def test_unknown_query_parameters(world: AdminWorld, path: str, param: str) -> None:
    body = is_problem(world.http.get(f"/admin/v1/{path}"), 400, "unknown_field", param)
    assert "allowed are" in body["detail"]


def test_a_query_parameter_twice(world: AdminWorld) -> None:
    is_problem(world.http.get("/admin/v1/usage?tenant=a&tenant=b"), 400, "invalid_value", "tenant")


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "1e3", "\u0661"])
def test_bad_page_sizes(world: AdminWorld, limit: str) -> None:
    is_problem(world.http.get("/admin/v1/keys", params={"limit": limit}), 400, "invalid_limit", "limit")


BODIES: list[tuple[str, str, bytes | dict[str, Any], int, str, str | None]] = [
    (
        "POST",
        "tenants",
        {"id": "a", "limits": {"cost_per_day": 1}},
        400,
        "not_supported_yet",
        "limits.cost_per_day",
    ),
    ("POST", "tenants", {"quota": {}, "x": 1}, 400, "not_supported_yet", "quota"),
    ("POST", "tenants", {"id": "new", "weight": 0}, 400, "invalid_value", "weight"),
    ("POST", "tenants", {"id": "new", "weight": "2"}, 400, "invalid_value", "weight"),
    ("POST", "tenants", {"id": "new", "service_class": "urgent"}, 400, "invalid_value", "service_class"),
    ("PATCH", "tenants/full", {"priority_max": 101}, 400, "invalid_value", "priority_max"),
    ("PATCH", "tenants/full", {"isolation": "none"}, 400, "invalid_value", "isolation"),
    ("PATCH", "tenants/demo", {"limits": {"rps": -1}}, 400, "invalid_value", "limits"),
    ("PATCH", "tenants/demo", {"limits": {"gpu_memory_gb": -0.5}}, 400, "invalid_value", "limits"),
    ("PATCH", "tenants/demo", {"limits": {"rsp": 1}}, 400, "unknown_field", "limits.rsp"),
    ("PATCH", "tenants/full", {"limits": {"rps": "1"}}, 400, "invalid_value", "limits.rps"),
    ("PATCH", "tenants/full", {"departments": {"a": {"rsp": 1}}}, 400, "unknown_field", "departments.a.rsp"),
    ("PATCH", "tenants/full", {"users": {"a": {"rps": -1}}}, 400, "invalid_value", "users.a"),
    ("PATCH", "tenants/full", {"users": {"a": {"rps": "x"}}}, 400, "invalid_value", "users.a.rps"),
    ("PATCH", "tenants/full", {"users": {"a": 5}}, 400, "invalid_value", "users.a"),
    ("PATCH", "tenants/full", {"users": None}, 400, "invalid_value", "users"),
    ("PATCH", "tenants/full", {"users": {"": {"rps": 1}}}, 400, "invalid_entry", "users"),
    ("PATCH", "tenants/full", {"departments": {"a\nb": {}}}, 400, "invalid_entry", "departments"),
    ("PATCH", "tenants/full", {"user_limits": {"x": 1}}, 400, "unknown_field", "user_limits.x"),
    ("PATCH", "tenants/full", {"model_limits": {"m": {"tpm": 0.5}}}, 400, "invalid_value", "model_limits.m"),
    (
        "POST",
        "tenants",
        {"id": "a", "model_limits": {"m": {"cost_per_day": 1}}},
        400,
        "not_supported_yet",
        "model_limits.m.cost_per_day",
    ),
    (
        "POST",
        "tenants",
        {"id": "a", "model_limits": {f"m{i}": {"rps": 1} for i in range(257)}},
        400,
        "too_many_entries",
        "model_limits",
    ),
    ("POST", "tenants", {"id": "a", "cache": "all"}, 400, "invalid_value", "cache"),
    ("PATCH", "tenants/full", {"cache": None}, 400, "invalid_value", "cache"),
    ("PATCH", "tenants/full", {"shared_prefix": 5}, 400, "invalid_value", "shared_prefix"),
    ("PATCH", "tenants/full", {"shared_prefix": ""}, 400, "invalid_shared_prefix", "shared_prefix"),
    ("PATCH", "tenants/full", {"shared_prefix": "a\nb"}, 400, "invalid_shared_prefix", "shared_prefix"),
    (
        "POST",
        "tenants",
        {"id": "a", "shared_prefix": "x" * 65},
        400,
        "invalid_shared_prefix",
        "shared_prefix",
    ),
    ("POST", "keys", {"tenant": "full", "department": "x"}, 404, "department_not_found", "department"),
    ("POST", "keys", {"tenant": "full", "department": 5}, 400, "invalid_value", "department"),
    ("POST", "keys", {"tenant": "a", "quota": {"qps": 1}}, 400, "not_supported_yet", "quota"),
    ("POST", "keys", {"tenant": "a", "limits": None}, 400, "invalid_value", "limits"),
    ("POST", "tenants", {"id": "a", "colour": 1}, 400, "unknown_field", "colour"),
    ("POST", "tenants", {"name": "a"}, 400, "missing_field", "id"),
    ("POST", "tenants", {"id": 5}, 400, "invalid_value", "id"),
    ("POST", "tenants", {"id": "No"}, 400, "invalid_tenant_id", "id"),
    ("POST", "tenants", {"id": "x", "name": ""}, 400, "invalid_name", "name"),
    ("POST", "tenants", b"", 400, "malformed_body", None),
    ("POST", "tenants", b"{", 400, "malformed_body", None),
    ("POST", "tenants", b"[]", 400, "malformed_body", None),
    ("POST", "tenants", b"\xff", 400, "malformed_body", None),
    ("POST", "tenants", b"[" * 5000, 400, "malformed_body", None),
    ("PATCH", "tenants/none", {"name": "a"}, 404, "tenant_not_found", None),
    ("PATCH", "tenants/none", {"status": "frozen"}, 400, "invalid_value", "status"),
    ("PATCH", "tenants/none", {"status": None}, 400, "invalid_value", "status"),
    ("POST", "keys", {"tenant": "none"}, 404, "tenant_not_found", "tenant"),
    ("POST", "keys", {"tenant": "full", "scopes": ["x"]}, 400, "invalid_scope", "scopes"),
    ("POST", "keys", {"tenant": "full", "scopes": []}, 400, "invalid_scope", "scopes"),
    ("POST", "keys", {"tenant": "full", "scopes": "chat:read"}, 400, "invalid_value", "scopes"),
    ("POST", "keys", {"tenant": "full", "scopes": [1]}, 400, "invalid_value", "scopes.0"),
    ("POST", "keys", {"tenant": "full", "expires_in_s": 0}, 400, "invalid_lifetime", "expires_in_s"),
    ("POST", "keys", {"tenant": "full", "expires_in_s": 2**53}, 400, "invalid_lifetime", "expires_in_s"),
    ("POST", "keys", {"tenant": "full", "expires_in_s": 1.5}, 400, "invalid_value", "expires_in_s"),
    ("POST", "keys", {"tenant": "full", "expires_in_s": 10**30}, 400, "invalid_value", "expires_in_s"),
    ("POST", "keys", {"tenant": "full", "user": "a\nb"}, 400, "invalid_user", "user"),
    ("DELETE", "keys/none", b"", 404, "key_not_found", "jti"),
    ("POST", "usage/none/refund", {"reason": "ours"}, 404, "operation_not_found", None),
    ("POST", "usage/none/refund", {}, 400, "missing_field", "reason"),
    ("POST", "usage/none/refund", {"reason": 5}, 400, "invalid_value", "reason"),
    ("POST", "usage/none/refund", {"reason": ""}, 400, "invalid_reason", "reason"),
    ("POST", "usage/none/refund", {"reason": "a\nb"}, 400, "invalid_reason", "reason"),
    ("POST", "usage/none/refund", {"reason": "x" * 257}, 400, "invalid_reason", "reason"),
    ("POST", "usage/none/refund", {"reason": "x", "tokens": 5}, 400, "unknown_field", "tokens"),
    ("GET", "usage/none/refund", b"", 405, "method_not_allowed", None),
    ("GET", "tenants/none", b"", 404, "tenant_not_found", None),
    ("GET", "keys?tenant=none", b"", 404, "tenant_not_found", None),
    ("GET", "keys?after=none", b"", 400, "invalid_after", "after"),
    ("GET", "nothing", b"", 404, "not_found", None),
    ("GET", "tenants/", b"", 404, "not_found", None),
    ("PUT", "tenants", b"", 405, "method_not_allowed", None),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "code", "param"), BODIES)
def test_what_is_wrong_is_said_with_its_field(
    world: AdminWorld,
    method: str,
    path: str,
    body: bytes | dict[str, Any],
    status: int,
    code: str,
    param: str | None,
) -> None:
    world.http.post("/admin/v1/tenants", json={"id": "full"})
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = world.http.request(method, f"/admin/v1/{path}", content=content)
    problem = is_problem(response, status, code, param)
    if code in ("not_supported_yet", "unknown_field"):
        assert str(param) in problem["detail"]
        assert "allowed are" in problem["detail"]


def test_a_tenant_twice(world: AdminWorld) -> None:
    world.http.post("/admin/v1/tenants", json={"id": "twice"})
    is_problem(world.http.post("/admin/v1/tenants", json={"id": "twice"}), 409, "tenant_exists", "id")


def test_long_values_are_not_sent_back(world: AdminWorld) -> None:
    long = "x" * 20_000
    assert len(world.http.post("/admin/v1/tenants", json={long: 1}).content) < 1000
    assert len(world.http.get("/admin/v1/usage", params={long: 1}).content) < 1000
    assert len(world.http.post("/admin/v1/keys", json={"tenant": long}).content) < 1000
    for body in (
        {"users": {long: {long: 1}}},
        {"users": {long: 5}},
        {"departments": {long: {}}},
        {"cache": long},
        {"shared_prefix": long},
    ):
        assert len(world.http.patch("/admin/v1/tenants/full", json=body).content) < 1000
    key = {"tenant": "full", "department": long}
    assert len(world.http.post("/admin/v1/keys", json=key).content) < 1000


ROUTES = [
    ("POST", "/admin/v1/tenants"),
    ("GET", "/admin/v1/tenants"),
    ("GET", "/admin/v1/tenants/demo"),
    ("PATCH", "/admin/v1/tenants/demo"),
    ("POST", "/admin/v1/keys"),
    ("GET", "/admin/v1/keys"),
    ("DELETE", "/admin/v1/keys/key_1"),
    ("GET", "/admin/v1/usage"),
    ("GET", "/admin/v1/usage/req_1"),
    ("POST", "/admin/v1/usage/req_1/refund"),
    ("GET", "/admin/v1/queue"),
    ("GET", "/admin/v1/workers"),
    ("GET", "/admin/v1/models"),
    ("PATCH", "/admin/v1/models/model_1"),
    ("GET", "/admin/v1/openapi.json"),
    ("GET", "/"),
    ("GET", "/healthz/"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_an_admin_key(world: AdminWorld, method: str, path: str) -> None:
    with world.client(None) as nobody:
        response = nobody.request(method, path, content=b"{")
    is_problem(response, 401, "invalid_key")
    assert response.headers["www-authenticate"] == "Bearer"


def test_the_list_of_routes_above_is_complete(world: AdminWorld) -> None:
    document = world.http.get("/admin/v1/openapi.json").json()
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    listed = {
        (
            method,
            path.replace("demo", "{tenant_id}")
            .replace("key_1", "{jti}")
            .replace("req_1", "{request_id}")
            .replace("model_1", "{model_id}"),
        )
        for method, path in ROUTES
    }
    assert found - listed == {("GET", "/healthz")}


def test_health_needs_no_key(world: AdminWorld) -> None:
    with world.client(None) as nobody:
        response = nobody.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def refused_credentials(world: AdminWorld) -> dict[str, str]:
    """Values of the Authorization header that must all get the very same answer."""
    world.http.post("/admin/v1/tenants", json={"id": "thief"})
    tenants = world.http.post("/admin/v1/keys", json={"tenant": "thief"}).json()["key"]
    keyring = world.directory.keyring

    async def admin_keys() -> tuple[Any, Any]:
        revoked = world.directory.create_admin_key(actor="test")
        world.directory.revoke_key(revoked.view.jti, actor="test")
        return revoked, world.directory.create_admin_key(expires_in_s=1, actor="test")

    revoked, _ = world.on_core(admin_keys)

    def signed(signing_key: SigningKey, jti: str, expires_us: int = FUTURE_US) -> str:
        return "Bearer " + issue(
            signing_key,
            tenant="@admin",
            jti=jti,
            scopes=("admin:*",),
            issued_us=0,
            expires_us=expires_us,
            kind=guard_kind(),
        )

    return {
        "empty": "",
        "no scheme": world.key,
        "basic": f"Basic {world.key}",
        "nothing behind the scheme": "Bearer",
        "junk": "Bearer hr_admin_junk",
        "too long": "Bearer hr_admin_" + "A" * 6000,
        "a tenant's key": f"Bearer {tenants}",
        "a tenant's key as admin key": "Bearer hr_admin_" + tenants.removeprefix("hr_live_"),
        "revoked": f"Bearer {revoked.key}",
        "expired": signed(keyring.active, world.issued.view.jti, 1_000_000),
        "never issued": signed(keyring.active, "key_forged"),
        "foreign signing key": signed(SigningKey.generate(), world.issued.view.jti),
        "cut off": f"Bearer {world.key[:-1]}",
    }


def guard_kind() -> Any:
    from headrace.identity import ADMIN_KEY

    return ADMIN_KEY


def test_all_refused_keys_get_the_same_answer(world: AdminWorld) -> None:
    answers = set()
    for name, header in refused_credentials(world).items():
        with world.client(None) as client:
            response = client.get("/admin/v1/tenants", headers={"authorization": header})
        body = is_problem(response, 401, "invalid_key")
        del body["instance"]
        answers.add(json.dumps(body))
        assert "tenants" not in response.json(), name
    assert len(answers) == 1


def test_a_revoked_admin_key_is_refused_at_once(world: AdminWorld) -> None:
    async def make() -> Any:
        return world.directory.create_admin_key(actor="test")

    issued = world.on_core(make)
    with world.client(issued.key) as client:
        assert client.get("/admin/v1/tenants").status_code == 200
        assert client.delete(f"/admin/v1/keys/{issued.view.jti}").status_code == 204
        is_problem(client.get("/admin/v1/tenants"), 401, "invalid_key")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_are_bounded(world: AdminWorld, is_chunked: bool) -> None:
    size = guard.BODY_BYTES_MAX + 1
    content: Any = (b" " * 1000 for _ in range(size // 1000 + 1)) if is_chunked else b" " * size
    response = world.http.post("/admin/v1/tenants", content=content)
    is_problem(response, 413, "body_too_large")
    assert world.http.get("/admin/v1/workers").status_code == 200


def test_a_length_that_is_no_number(world: AdminWorld) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=10)
    connection.putrequest("POST", "/admin/v1/tenants", skip_accept_encoding=True)
    connection.putheader("authorization", f"Bearer {world.key}")
    connection.putheader("content-length", "99999999999999999999")
    connection.endheaders()
    assert connection.getresponse().status in (400, 413)
    connection.close()


def test_oversized_headers_are_refused(world: AdminWorld) -> None:
    for size in (40_000, 100_000, 1_000_000):
        with socket.create_connection(("127.0.0.1", world.port), timeout=10) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * size + b"\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100).split(b" ")[1] in (b"400", b"431")
    assert world.http.get("/healthz").status_code == 200


def test_every_code_of_the_core_is_in_the_catalogue() -> None:
    folder = Path(str(headrace.core.__file__)).parent
    codes = set()
    for file in ("checks.py", "control.py", "directory.py", "keyring.py", "levels.py", "refunds.py"):
        text = (folder / file).read_text()
        codes |= set(re.findall(r"ControlFailure\(\s*\d{3},\s*\"(\w+)\"", text))
        codes |= set(re.findall(r"code=\"(\w+)\"", text))
    assert len(codes) > 10
    assert codes <= problems.TITLES.keys()


def test_no_key_is_in_the_log(world: AdminWorld) -> None:
    with world.client(None) as client:
        client.get(f"/admin/v1/{world.key}")
        client.get("/admin/v1/tenants", headers={"authorization": f"Bearer {world.key}x"})
    world.http.get(f"/admin/v1/tenants/{world.key}")
    log = world.log.read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert {line["event"] for line in lines} >= {"admin_listening", "admin_request", "admin_key_refused"}
    assert any("[redacted]" in line.get("path", "") for line in lines)
    for part in world.key.removeprefix("hr_admin_").split("."):
        assert part not in log


def test_the_queue_of_every_model(world: AdminWorld) -> None:
    shown = world.http.get("/admin/v1/queue").json()
    assert shown == {"data": [json.loads(msgspec.json.encode(QUEUE))]}
    assert world.http.get("/admin/v1/queue", params={"model": "smol", "limit": 3}).json() == shown
    is_problem(world.http.get("/admin/v1/queue?model=x"), 404, "model_not_found")
    is_problem(world.http.get("/admin/v1/queue?limit=257"), 400, "invalid_limit", "limit")
    is_problem(world.http.get("/admin/v1/queue?limit=many"), 400, "invalid_limit", "limit")
    is_problem(world.http.get("/admin/v1/queue?after=x"), 400, "unknown_field", "after")
