"""Limits on the running server: exact, all or nothing, explained, and gone again."""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.crowd import Heard, allow_files, crowd
from tests.platform_harness import Platform, Reply, platform, until

PROMPT = "x" * 23
"""Ten tokens with the stub's template: 6 + 23 + 1 + 10 bytes, of which four make a token."""

STUB = {"decode_us_per_step": 3_000, "output_tokens": 400}
CROWD = 2_000
_numbers = itertools.count()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    allow_files(CROWD)
    model = {"id": "stub", "engine": {"max_batch_size": 32, "max_context_tokens": 512, "stub": STUB}}
    with platform(tmp_path_factory.mktemp("limits"), models=[model]) as running:
        yield running


class Tenant:
    """A tenant of its own for a test."""

    def __init__(
        self, served: Platform, *, key_limits: dict[str, float] | None = None, **limits: float
    ) -> None:
        self.served = served
        self.id = f"t{next(_numbers)}"
        made = served.admin("POST", "/admin/v1/tenants", {"id": self.id, "limits": limits})
        assert made.status == 201, made.body
        body = {"tenant": self.id, "limits": key_limits or {}}
        self.key: str = served.admin("POST", "/admin/v1/keys", body).json["key"]

    def chat(self, **fields: Any) -> Reply:
        return self.served.chat(fields.pop("content", PROMPT), key=self.key, **fields)

    def many(self, number: int, **fields: Any) -> list[Reply]:
        """So many at the same moment."""
        gate = threading.Barrier(number)

        def one(_: int) -> Reply:
            gate.wait()
            return self.chat(**fields)

        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(one, range(number)))

    def crowd(self, number: int, **fields: Any) -> list[Heard]:
        """So many at the same moment, far more than threads could be."""
        body = {"model": self.served.model, "messages": [{"role": "user", "content": PROMPT}], **fields}
        return crowd(self.served.url, key=self.key, number=number, body=body)

    def limits(self) -> dict[str, Any]:
        reply = self.served.request("GET", "/v1/limits", key=self.key)
        return {entry["level"]: entry for entry in reply.json["data"]}

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.served.rows() if row["tenant_id"] == self.id]

    def used(self) -> int:
        """All tokens in this tenant's rows."""
        return sum(row["prompt_tokens"] + row["completion_tokens"] for row in self.rows())


@contextlib.contextmanager
def watched(tenant: Tenant, level: str) -> Iterator[list[int]]:
    """Looks at a level again and again meanwhile: what was used and held together."""
    sums: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            entry = tenant.limits()[level]
            sums.append(entry["tokens_used_60s"] + entry["tokens_held"])

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield sums
        finally:
            done.set()
            looking.result()


def most_in_a_minute(rows: list[dict[str, Any]]) -> int:
    """The most tokens settled within any 60 seconds."""
    return max(
        sum(
            row["prompt_tokens"] + row["completion_tokens"]
            for row in rows
            if last["end_ts"] - 60_000_000 < row["end_ts"] <= last["end_ts"]
        )
        for last in rows
        if last["completion_tokens"]
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_burst_never_takes_a_token_over_and_as_many_pass_as_fit(served: Platform, is_stream: bool) -> None:
    tenant = Tenant(served, tpm=100)
    replies = tenant.many(50, max_tokens=20, stream=is_stream)
    passed = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 429]
    assert len(passed) + len(refused) == 50
    assert len(passed) == 3, "three of thirty tokens are ninety"
    used = sum(row["prompt_tokens"] + row["completion_tokens"] for row in tenant.rows())
    assert used == 90
    for reply in refused:
        error = reply.error
        assert (error["limit_type"], error["level"], error["limit"]) == ("tpm", "tenant", 100)
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "tokens")
        assert error["used"] + error["held"] + error["requested"] > 100
        assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert tenant.limits()["tenant"]["tokens_used_60s"] == 90
    assert tenant.limits()["tenant"]["tokens_held"] == 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_two_thousand_at_once_never_take_a_token_over(served: Platform, is_stream: bool) -> None:
    tenant = Tenant(served, key_limits={"tpm": 100})
    with watched(tenant, "key") as sums:
        heard = tenant.crowd(CROWD, max_tokens=20, stream=is_stream)
    passed = [reply for reply in heard if reply.status == 200]
    refused = [reply for reply in heard if reply.status == 429]
    assert len(passed) + len(refused) == CROWD, "everybody is told"
    assert len(passed) == 3, "three of thirty tokens fit, and a fourth does not"
    assert all(reply.is_answered for reply in passed)
    assert len(sums) > 5 and max(sums) <= 100, "not even for a moment"
    until(
        lambda: sum(row["num_requests"] for row in tenant.rows()) == CROWD,
        what="everybody is on record, the refused above a rate as sums",
    )
    assert tenant.chat(max_tokens=20).status == 429
    assert most_in_a_minute(tenant.rows()) == tenant.used() == 90
    for reply in refused:
        error = reply.error
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "tokens")
        assert (error["limit_type"], error["level"], error["limit"]) == ("tpm", "key", 100)
        assert error["used"] + error["held"] + error["requested"] > 100
        assert 1 <= int(reply.headers["retry-after"]) <= 60
    key = tenant.limits()["key"]
    assert (key["tokens_used_60s"], key["tokens_held"], key["tokens_remaining"]) == (90, 0, 10)


def test_fifty_calls_of_a_tenth_of_the_budget(served: Platform) -> None:
    tenant = Tenant(served, tpm=1000)
    with watched(tenant, "tenant") as sums:
        heard = tenant.crowd(50, max_tokens=90)
    passed = sum(reply.is_answered for reply in heard)
    assert passed <= 10
    assert sum(reply.status == 429 for reply in heard) == 50 - passed, "everybody is told"
    assert max(sums) <= 1000, "not even for a moment"
    while passed < 10:
        assert tenant.chat(max_tokens=90).status == 200, "exactly ten fit"
        passed += 1
    assert tenant.chat(max_tokens=90).status == 429
    state = tenant.limits()["tenant"]
    assert tenant.used() == state["tokens_used_60s"] == 1000
    assert (state["tokens_held"], state["tokens_remaining"]) == (0, 0)
    assert [row["completion_tokens"] for row in tenant.rows() if row["status"] == 200] == [90] * 10


def test_whoever_fits_passes_at_once(served: Platform) -> None:
    passed = [
        sum(reply.is_answered for reply in Tenant(served, tpm=100).crowd(3, max_tokens=20)) for _ in range(12)
    ]
    assert passed == [3] * 12


def test_a_crowd_that_holds_much_and_uses_little(served: Platform) -> None:
    """Each holds eighty of a hundred tokens and uses eleven: there is room for two, one after the other."""
    tenant = Tenant(served, key_limits={"tpm": 100})
    heard = tenant.crowd(300, max_tokens=70, stop=[" "])
    passed = sum(reply.is_answered for reply in heard)
    assert 1 <= passed <= 2
    if passed == 1:
        assert tenant.chat(max_tokens=70, stop=[" "]).status == 200, "usable as soon as it is settled"
    refused = tenant.chat(max_tokens=70, stop=[" "])
    assert (refused.status, refused.error["used"], refused.error["held"]) == (429, 22, 0)
    assert tenant.used() == 22


def test_what_was_held_and_not_used_can_be_used_at_once(served: Platform) -> None:
    tenant = Tenant(served, tpm=100)
    first = tenant.chat(max_tokens=70, stop=[" "])
    assert first.json["usage"]["completion_tokens"] == 1
    assert tenant.chat(max_tokens=70).status == 200, "11 used and 80 held are 91"


def test_a_missing_maximum_is_cut_to_what_fits_and_that_is_said(served: Platform) -> None:
    tenant = Tenant(served, tpm=100)
    reply = tenant.chat()
    assert reply.status == 200
    assert reply.headers["x-governance-action"] == "CLAMPED_MAX_TOKENS"
    assert reply.json["usage"]["completion_tokens"] == int(reply.headers["x-max-tokens"]) <= 90
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert "x-max-tokens" not in Tenant(served).chat(max_tokens=2).headers


def test_a_server_may_require_a_maximum(tmp_path: Path) -> None:
    with platform(tmp_path, require_max_tokens=True) as strict:
        refused = strict.chat("go")
        assert (refused.status, refused.error["code"], refused.error["param"]) == (
            400,
            "invalid_value",
            "max_tokens",
        )
        assert strict.chat("go", max_completion_tokens=2).status == 200


def test_one_at_a_time_and_a_refusal_consumes_nothing(served: Platform) -> None:
    tenant = Tenant(served, concurrency=1, rps=10)
    body = {"model": "stub", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300}
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(served.request, "POST", "/v1/chat/completions", body, key=tenant.key)
        until(lambda: tenant.limits()["tenant"]["requests_running"] == 1)
        refused = tenant.many(30, max_tokens=1)
        assert {reply.status for reply in refused} == {429}
        assert {reply.error["limit_type"] for reply in refused} == {"concurrency"}
        assert long.result().status == 200
    assert [tenant.chat(max_tokens=1).status for _ in range(9)] == [200] * 9
    until(lambda: tenant.limits()["tenant"]["requests_running"] == 0)


def test_requests_per_second(served: Platform) -> None:
    tenant = Tenant(served, rps=5)
    replies = tenant.many(20, max_tokens=1)
    passed = [reply for reply in replies if reply.status == 200]
    assert 5 <= len(passed) <= 7, "a burst of one second, and what a slow start adds"
    refused = next(reply for reply in replies if reply.status == 429)
    assert (refused.error["limit_type"], refused.headers["retry-after"]) == ("rps", "1")
    headers = passed[0].headers
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-limit"]) == ("5", "5")
    assert 0 <= int(headers["x-ratelimit-remaining-requests"]) < 5
    assert headers["ratelimit-policy"] == '"requests";q=5;w=1'


def test_streams_have_a_limit_of_their_own(served: Platform) -> None:
    tenant = Tenant(served, streams=0)
    assert tenant.chat(max_tokens=1).status == 200
    refused = tenant.chat(max_tokens=1, stream=True)
    assert (refused.status, refused.error["limit_type"]) == (429, "streams")
    assert refused.headers["x-should-retry"] == "false", "it can never pass"


def test_the_size_of_a_request_is_judged_by_the_exact_count(served: Platform) -> None:
    tenant = Tenant(served, max_prompt_tokens=12, max_total_tokens=20)
    assert tenant.chat(max_tokens=8).status == 200, "ten tokens, though far more bytes"
    for fields, limit_type in (
        ({"content": "x" * 60}, "prompt_tokens"),
        ({"max_tokens": 30}, "total_tokens"),
    ):
        refused = tenant.chat(**{"max_tokens": 1, **fields})
        assert (refused.status, refused.error["limit_type"]) == (429, limit_type)
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
    assert tenant.chat().headers["x-max-tokens"], "a missing maximum is made to fit"


def test_the_keys_limit_and_the_tenants_hold_together(served: Platform) -> None:
    tenant = Tenant(served, key_limits={"tpm": 40}, tpm=1000)
    assert tenant.chat(max_tokens=20).status == 200
    refused = tenant.chat(max_tokens=20)
    assert (refused.status, refused.error["level"], refused.error["used"]) == (429, "key", 30)
    other = served.admin("POST", "/admin/v1/keys", {"tenant": tenant.id}).json["key"]
    assert served.chat(PROMPT, key=other, max_tokens=20).status == 200
    assert tenant.limits()["tenant"]["tokens_used_60s"] == 60


def test_a_change_is_in_force_with_the_next_request(served: Platform) -> None:
    tenant = Tenant(served, tpm=10)
    assert tenant.chat(max_tokens=20).status == 429
    path = f"/admin/v1/tenants/{tenant.id}"
    changed = served.admin("PATCH", path, {"limits": {"tpm": 1000, "rps": 50}})
    assert changed.json["limits"] == {"tpm": 1000, "rps": 50}
    assert tenant.chat(max_tokens=20).status == 200
    assert served.admin("PATCH", path, {"limits": {"tpm": None}}).json["limits"] == {"rps": 50}


def test_gone_clients_give_their_hold_back(served: Platform) -> None:
    tenant = Tenant(served, tpm=1000)
    connection = served.connect()
    body = {
        "model": "stub",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 300,
        "stream": True,
    }
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {tenant.key}"}
    )
    until(lambda: tenant.limits()["tenant"]["tokens_held"] == 310)
    connection.close()
    until(lambda: tenant.limits()["tenant"]["tokens_held"] == 0)
    until(lambda: len(tenant.rows()) == 1)  # the group commit comes a moment later
    (row,) = tenant.rows()
    used = row["prompt_tokens"] + row["completion_tokens"]
    assert tenant.limits()["tenant"]["tokens_used_60s"] == used < 310


def test_a_restart_forgets_nothing_of_the_last_minute(tmp_path: Path) -> None:
    model = {"id": "stub", "engine": {"max_batch_size": 4, "max_context_tokens": 512, "stub": STUB}}
    with platform(tmp_path / "data", models=[model]) as served:
        tenant = Tenant(served, tpm=100)
        assert tenant.chat(max_tokens=60).status == 200
    began = time.monotonic()
    with platform(tmp_path / "data", models=[model]) as again:
        refused = again.chat(PROMPT, key=tenant.key, max_tokens=60)
        assert time.monotonic() - began < 50, "the machine is too slow for this test"
        assert (refused.status, refused.error["used"]) == (429, 70)
        assert again.chat(PROMPT, key=tenant.key, max_tokens=15).status == 200


def test_shared_limits_refuse_without_telling_of_others(tmp_path: Path) -> None:
    model = {"id": "stub", "engine": {"max_batch_size": 4, "stub": STUB}, "limits": {"tpm": 50}}
    with platform(tmp_path / "data", models=[model], limits={"rps": 1000}) as served:
        assert served.chat(PROMPT, max_tokens=30).status == 200
        refused = Tenant(served).chat(max_tokens=30)
        assert (refused.status, refused.error["level"], refused.error["limit"]) == (429, "model", 50)
        assert refused.error["used"] is refused.error["held"] is None
        shared = served.request("GET", "/v1/limits").json["shared"]
        assert shared == [
            {"level": "cluster", "limits": {"rps": 1000.0}},
            {"level": "model", "limits": {"tpm": 50}},
        ]


@pytest.mark.parametrize(
    ("limits", "code", "param"),
    [
        ({"tokens_per_day": 5}, "not_supported_yet", "limits.tokens_per_day"),
        ({"colour": 5}, "unknown_field", "limits.colour"),
        ({"rps": -1}, "invalid_value", "limits"),
        ({"tpm": 1.5}, "invalid_value", "limits"),
        ({"rps": "many"}, "invalid_value", "limits.rps"),
    ],
)
def test_wrong_limits_are_refused_by_name(
    served: Platform, limits: dict[str, Any], code: str, param: str
) -> None:
    for path, body in (("tenants", {"id": "wrong"}), ("keys", {"tenant": "default"})):
        reply = served.admin("POST", f"/admin/v1/{path}", {**body, "limits": limits})
        assert reply.status == 400, reply.body
        assert reply.json["code"] == code
        assert reply.json["param"].startswith(param)
