"""The memory guard on the running server (LI-6, AP-12): refused, throttled, waiting, released."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.platform_harness import OpenChat, Platform, Reply, platform, until

STUB = {"decode_us_per_step": 20_000, "output_tokens": 2_000}
THROTTLE_SECONDS = 6.0
GB_OF_TOKEN = 1024 / 2**30
"""A token of the stub takes a kilobyte."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    models = [
        {"id": "stub", "engine": {"max_batch_size": 4, "max_context_tokens": 2048, "stub": STUB}},
        {
            "id": "ruled",
            "memory": {"base_mb": 100, "mb_per_token": 1},
            "engine": {"max_batch_size": 4, "stub": {"output_tokens": 5}},
        },
    ]
    folder = tmp_path_factory.mktemp("memory")
    with platform(
        folder, models=models, memory_throttle_s=THROTTLE_SECONDS, headers_after_ms=60_000
    ) as running:
        yield running


class Tenant:
    """A tenant of its own with room for so many tokens of the stub."""

    def __init__(self, served: Platform, *, tokens: float, **fields: Any) -> None:
        self.served = served
        self.id = f"t{next(_numbers)}"
        limits = {"gpu_memory_gb": tokens * GB_OF_TOKEN, **fields.pop("limits", {})}
        made = served.admin("POST", "/admin/v1/tenants", {"id": self.id, "limits": limits, **fields})
        assert made.status == 201, made.body
        self.key: str = served.admin("POST", "/admin/v1/keys", {"tenant": self.id}).json["key"]
        self.open: list[OpenChat] = []

    def chat(self, **fields: Any) -> Reply:
        return self.served.chat("Hello", key=self.key, **{"model": "stub", **fields})

    def begin(self, **fields: Any) -> OpenChat:
        self.open.append(self.served.open_chat("Hello", key=self.key, **{"model": "stub", **fields}))
        return self.open[-1]

    def level(self) -> dict[str, Any]:
        reply = self.served.request("GET", "/v1/limits", key=self.key)
        found: dict[str, Any] = next(one for one in reply.json["data"] if one["level"] == "tenant")
        return found

    def held_tokens(self) -> int:
        return round(self.level()["gpu_memory_held_gb"] / GB_OF_TOKEN)

    def end(self) -> None:
        for chat in self.open:
            chat.close()
        until(lambda: self.held_tokens() == 0)


@pytest.fixture
def tenant(served: Platform) -> Iterator[Tenant]:
    made = Tenant(served, tokens=1000)
    yield made
    made.end()


def hold(tenant: Tenant, max_tokens: int = 700) -> OpenChat:
    chat = tenant.begin(max_tokens=max_tokens, stream=True)
    assert chat.response.status == 200  # from here on the prompt is counted
    assert tenant.held_tokens() > max_tokens
    return chat


def test_what_runs_holds_memory_by_the_model_s_geometry_and_gives_it_back(tenant: Tenant) -> None:
    assert tenant.level()["limits"]["gpu_memory_gb"] == pytest.approx(1000 * GB_OF_TOKEN)
    chat = hold(tenant)
    prompt = tenant.held_tokens() - 700
    assert 1 <= prompt < 20
    assert tenant.served.metric("headrace_memory_held_bytes", model="stub") == (700 + prompt) * 1024
    chat.close()
    until(lambda: tenant.held_tokens() == 0)
    until(lambda: tenant.served.metric("headrace_memory_held_bytes", model="stub") == 0)


def test_a_refusal_says_what_is_missing_then_one_waits_and_is_released_by_itself(tenant: Tenant) -> None:
    first = hold(tenant)
    refused = tenant.chat(max_tokens=700)
    assert refused.status == 429, refused.body
    error = refused.error
    assert (error["limit_type"], error["level"], error["code"]) == ("memory", "tenant", "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-reason"] == "GPU_MEMORY_EXCEEDED"
    assert refused.headers["x-governance-action"] == "THROTTLED"
    assert int(refused.headers["retry-after"]) >= 1
    assert error["limit"] == pytest.approx(1000 * GB_OF_TOKEN, abs=1e-6)
    assert error["held"] + error["requested"] > error["limit"] and error["used"] == error["held"]
    assert "GB of GPU memory" in error["message"]
    until_ts = tenant.level()["throttled_until_ts"]
    assert until_ts is not None
    assert tenant.served.metric("headrace_accounts_throttled") >= 1
    assert tenant.served.metric("headrace_memory_refusals_total", model="stub", level="tenant") >= 1

    waiting = tenant.begin(max_tokens=600, stream=True)  # throttled: it waits where it would be refused
    queue = until(lambda: tenant.served.request("GET", "/v1/queue?model=stub", key=tenant.key).json["data"])
    assert (queue[0]["reason"], queue[0]["is_throttled"]) == ("throttled", True)
    assert "share" in queue[0]["reason_text"]
    for_good = tenant.chat(max_tokens=1500)  # alone too large: refused also now, and nothing is prolonged
    assert (for_good.status, for_good.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in for_good.headers
    assert tenant.level()["throttled_until_ts"] == pytest.approx(until_ts, abs=200_000)
    first.close()
    assert waiting.response.status == 200
    assert waiting.response.getheader("x-queue-reason") == "throttled"
    waiting.close()
    until(lambda: tenant.held_tokens() == 0)

    until(lambda: tenant.level()["throttled_until_ts"] is None)
    hold(tenant)
    again = tenant.chat(max_tokens=700)
    assert (again.status, again.error["limit_type"]) == (429, "memory")


def test_a_missing_maximum_is_clamped_to_what_fits(served: Platform) -> None:
    tenant = Tenant(served, tokens=100)
    chat = tenant.begin(stream=True)
    assert chat.response.status == 200
    assert chat.response.getheader("x-governance-action") == "CLAMPED_MAX_TOKENS"
    maximum = int(chat.response.getheader("x-max-tokens") or 0)
    until(lambda: tenant.held_tokens() == 100)
    assert 80 < maximum < 100
    tenant.end()


def test_rather_shorter_than_refused(served: Platform) -> None:
    tenant = Tenant(served, tokens=1000, allow_degrade=True)
    hold(tenant)
    chat = tenant.begin(max_tokens=700, stream=True)
    assert chat.response.status == 200
    assert chat.response.getheader("x-governance-action") == "DEGRADED_MAX_TOKENS"
    until(lambda: tenant.held_tokens() == 1000)
    assert tenant.level()["throttled_until_ts"] is None
    tenant.end()


def test_the_next_is_reckoned_with_as_the_last_ones_were_and_grows_when_it_is_longer(
    served: Platform,
) -> None:
    tenant = Tenant(served, tokens=1000)
    for _ in range(2):
        assert tenant.chat(max_tokens=10).status == 200
    chat = tenant.begin(max_tokens=900, stream=True)
    assert chat.response.status == 200
    began = tenant.held_tokens()
    assert began < 900, "ten tokens are predicted"
    until(lambda: tenant.held_tokens() >= began + 64)
    tenant.end()


def test_the_settings_formula_goes_before_the_geometry(served: Platform) -> None:
    tenant = Tenant(served, tokens=0, limits={"gpu_memory_gb": 0.15})
    assert tenant.chat(model="ruled", max_tokens=20).status == 200
    assert tenant.chat(model="ruled", max_tokens=60).status == 200, "five tokens are predicted by now"
    other = Tenant(served, tokens=0, limits={"gpu_memory_gb": 0.15})
    refused = other.chat(model="ruled", max_tokens=60)
    assert (refused.status, refused.error["limit_type"]) == (429, "memory")
    assert refused.error["requested"] > (100 + 60) / 1024


def test_a_limit_of_one_model_throttles_what_the_tenant_asks_of_that(served: Platform) -> None:
    tenant = Tenant(served, tokens=1000, model_limits={"stub": {"gpu_memory_gb": 100 * GB_OF_TOKEN}})
    hold(tenant, 80)
    refused = tenant.chat(max_tokens=50)
    assert refused.error["level"] == "tenant_model"
    data = tenant.served.request("GET", "/v1/limits?model=stub", key=tenant.key).json["data"]
    throttled = [one["level"] for one in data if one["throttled_until_ts"] is not None]
    assert throttled == ["tenant_model"]
    tenant.end()
