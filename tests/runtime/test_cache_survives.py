"""What is kept outlives its worker: put aside at an orderly end, computed anew after a kill, never wrong."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.platform_harness import Platform, Reply, platform, until

STUB = {"decode_us_per_step": 1_000, "output_tokens": 12}
LONG = "The mill stands where the river bends. " * 30
ENGINE = {"max_batch_size": 2, "max_context_tokens": 1024, "stub": STUB}


def chat(served: Platform, text: str, **fields: Any) -> Reply:
    reply = served.chat(text, seed=3, max_tokens=6, **fields)
    assert reply.status == 200, reply.body
    return reply


def cached(reply: Reply) -> int:
    tokens: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def text_of(reply: Reply) -> str:
    text: str = reply.json["choices"][0]["message"]["content"]
    return text


def kill_the_worker(served: Platform) -> None:
    (worker,) = served.workers()
    os.kill(worker["pid"], signal.SIGKILL)
    until(
        lambda: (
            served.workers()[0]["restarts"] > worker["restarts"] and served.workers()[0]["status"] == "ready"
        )
    )


def test_a_session_goes_on_after_its_worker_was_killed(tmp_path: Path) -> None:
    with platform(tmp_path, models=[{"id": "stub", "engine": ENGINE}]) as served:
        session = served.request("POST", "/v1/sessions", {}).json["id"]
        first = chat(served, LONG, session_id=session)
        assert cached(chat(served, LONG + " And?", session_id=session)) > 200
        kill_the_worker(served)
        again = chat(served, LONG, session_id=session)
        assert text_of(again) == text_of(first)
        assert cached(again) == 0, "what was only in its memory is computed anew"
        assert cached(chat(served, LONG + " And?", session_id=session)) > 200


def test_what_was_put_aside_is_there_after_a_kill(tmp_path: Path) -> None:
    with platform(tmp_path, models=[{"id": "stub", "engine": ENGINE}]) as served:
        first = chat(served, LONG)
        for number in range(4):  # others need the slots
            chat(served, f"{number}: " + LONG)
        kill_the_worker(served)
        again = chat(served, LONG)
        assert cached(again) > 200
        assert text_of(again) == text_of(first)


def test_an_orderly_restart_loses_nothing_and_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    models = [{"id": "stub", "engine": ENGINE}]
    with platform(tmp_path, models=models) as served:
        first = chat(served, LONG)
        assert not list(served.data.glob("kv/*/*.kv"))
    files = list(served.data.glob("kv/*/*.kv"))
    assert len(files) == 1
    assert files[0].stat().st_mode & 0o077 == 0, "readable by this user only"
    with platform(tmp_path, models=models) as served:
        again = chat(served, LONG)
        assert cached(again) > 200
        assert text_of(again) == text_of(first)
    (file,) = served.data.glob("kv/*/*.kv")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    with platform(tmp_path, models=models) as served:
        again = chat(served, LONG)
        assert cached(again) == 0
        assert text_of(again) == text_of(first)
        assert served.metric("kv_cache_restore_failures_total", url=served.workers()[0]["metrics_url"]) == 1


def test_nothing_is_put_aside_where_that_is_off(tmp_path: Path) -> None:
    engine = {**ENGINE, "parking_mib": 0}
    with platform(tmp_path, models=[{"id": "stub", "engine": engine}]) as served:
        chat(served, LONG)
    assert not list(served.data.glob("kv/*/*.kv"))
    with platform(tmp_path, models=[{"id": "stub", "engine": {**ENGINE, "prefix_cache": False}}]) as served:
        chat(served, LONG)
        assert cached(chat(served, LONG)) == 0
