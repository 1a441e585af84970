"""Limits inside a tenant: its departments, its users, what it takes of one model; all of them together."""

from pathlib import Path
from typing import Any

import pytest

from tests.platform_harness import Platform, Reply, platform

STUB = {"decode_us_per_step": 1_000, "output_tokens": 400}
PROMPT = "x" * 23
"""Ten tokens with the stub's template."""


def make_tenant(served: Platform, tenant_id: str, **fields: Any) -> None:
    made = served.admin("POST", "/admin/v1/tenants", {"id": tenant_id, **fields})
    assert made.status == 201, made.body


def make_key(served: Platform, tenant_id: str, **fields: Any) -> str:
    made = served.admin("POST", "/admin/v1/keys", {"tenant": tenant_id, **fields})
    assert made.status == 201, made.body
    key: str = made.json["key"]
    return key


def chat(served: Platform, key: str, **fields: Any) -> Reply:
    return served.chat(PROMPT, key=key, **{"max_tokens": 10, **fields})


def refused_by(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.error["level"]


@pytest.fixture(scope="module")
def models() -> list[dict[str, Any]]:
    engine = {"max_batch_size": 8, "max_context_tokens": 512, "stub": STUB}
    return [{"id": "small", "engine": engine}, {"id": "large", "engine": engine}]


def test_departments_users_and_models_have_limits_of_their_own(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    with platform(tmp_path, models=models) as served:
        make_tenant(
            served,
            "acme",
            departments={"sales": {"tpm": 45}, "law": {}},
            user_limits={"tpm": 25},
            users={"ann": {"tpm": 65}},
            model_limits={"large": {"tpm": 25}},
        )
        sales = make_key(served, "acme", department="sales")
        other_sales = make_key(served, "acme", department="sales")
        law = make_key(served, "acme", department="law")
        assert chat(served, sales).status == 200
        assert chat(served, other_sales).status == 200
        assert refused_by(chat(served, sales)) == (429, "department")
        assert "department's limit" in chat(served, sales).error["message"]
        assert chat(served, law).status == 200, "another department"

        assert chat(served, law, user="bob").status == 200
        assert refused_by(chat(served, law, user="bob")) == (429, "user")
        assert [chat(served, law, user="ann").status for _ in range(4)] == [200, 200, 200, 429]

        assert chat(served, law, model="large").status == 200
        refused = chat(served, law, model="large")
        assert refused_by(refused) == (429, "tenant_model")
        assert "tenant's limit for this model" in refused.error["message"]
        assert chat(served, law, model="small").status == 200

        shown = served.request("GET", "/v1/limits?model=large", key=sales).json["data"]
        assert [entry["level"] for entry in shown] == ["tenant", "department", "tenant_model", "key"]
        assert {entry["level"]: entry["tokens_used_60s"] for entry in shown}["department"] == 40
        rows = [row for row in served.rows() if row["tenant_id"] == "acme" and row["outcome"] == "completed"]
        assert sorted(row["department"] for row in rows).count("sales") == 2
        report = served.admin("GET", "/admin/v1/usage?tenant=acme&group_by=department").json
        assert {row["department"]: row["completion_tokens"] for row in report["data"]}["sales"] == 20


def test_a_restart_forgets_no_level(tmp_path: Path, models: list[dict[str, Any]]) -> None:
    with platform(tmp_path, models=models) as served:
        make_tenant(
            served,
            "acme",
            departments={"sales": {"tpm": 25}},
            user_limits={"tpm": 25},
            model_limits={"large": {"tpm": 25}},
        )
        sales = make_key(served, "acme", department="sales")
        plain = make_key(served, "acme")
        assert chat(served, sales, model="small").status == 200
        assert chat(served, plain, model="small", user="bob").status == 200
        assert chat(served, plain, model="large").status == 200
    with platform(tmp_path, models=models) as served:
        assert refused_by(chat(served, sales, model="small")) == (429, "department")
        assert refused_by(chat(served, plain, model="small", user="bob")) == (429, "user")
        assert refused_by(chat(served, plain, model="large")) == (429, "tenant_model")


def test_another_tenants_levels_of_the_same_names_are_others(
    tmp_path: Path, models: list[dict[str, Any]]
) -> None:
    limits = {"departments": {"sales": {"tpm": 25}}, "user_limits": {"tpm": 25}}
    with platform(tmp_path, models=models) as served:
        keys = []
        for tenant_id in ("acme", "globex"):
            make_tenant(served, tenant_id, **limits)
            keys.append(make_key(served, tenant_id, department="sales", user="bob"))
        assert chat(served, keys[0]).status == 200
        assert chat(served, keys[0]).status == 429
        assert chat(served, keys[1]).status == 200
