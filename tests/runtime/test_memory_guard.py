"""The memory guard before a real model (LI-6): what is reckoned with is the geometry, to the byte."""

from pathlib import Path
from typing import Any

from tests.platform_harness import platform, until

KV_BYTES_PER_TOKEN = 23_040
"""Of the built-in model: 30 layers, 3 heads of 64 values for keys and as many for values, 2 bytes each."""


def test_the_estimate_is_the_model_s_geometry_and_the_ledger_finds_the_same(tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [
        {
            "id": "smollm2",
            "path": "builtin",
            "engine": {"max_batch_size": 2, "max_context_tokens": 1024, "threads": 1},
        }
    ]
    gb = 200 * KV_BYTES_PER_TOKEN / 2**30
    with platform(tmp_path / "data", models=models) as served:
        made = served.admin("POST", "/admin/v1/tenants", {"id": "small", "limits": {"gpu_memory_gb": gb}})
        assert made.status == 201, made.body
        key: str = served.admin("POST", "/admin/v1/keys", {"tenant": "small"}).json["key"]

        refused = served.chat("Say hello.", key=key, max_tokens=250)
        assert (refused.status, refused.error["limit_type"]) == (429, "memory")
        assert refused.headers["x-ratelimit-reason"] == "GPU_MEMORY_EXCEEDED"
        assert refused.headers["x-should-retry"] == "false"

        chat = served.open_chat("Count from one to a thousand.", key=key, max_tokens=150, stream=True)

        def held() -> float:
            levels = served.request("GET", "/v1/limits", key=key).json["data"]
            found: float = next(one["gpu_memory_held_gb"] for one in levels if one["level"] == "tenant")
            return found

        assert chat.response.status == 200  # the prompt is counted
        tokens = round(held() * 2**30 / KV_BYTES_PER_TOKEN)
        reply = chat.reply()
        assert reply.status == 200
        until(lambda: held() == 0)
        row = served.rows()[-1]
        assert row["outcome"] == "completed"
        assert tokens == row["prompt_tokens"] + row["prompt_tokens_cached"] + 150
        peak_tokens = row["gpu_memory_mb"] * 2**20 / KV_BYTES_PER_TOKEN
        assert row["completion_tokens"] < peak_tokens <= tokens, "never more than was reckoned with"
