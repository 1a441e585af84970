"""Changing how a model is served while it is: in force with the next step, undone by a restart."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.platform_harness import OpenChat, Platform, platform, until

STUB = {"decode_us_per_step": 10_000, "output_tokens": 300}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    engine = {"max_batch_size": 4, "max_context_tokens": 512, "stub": STUB}
    with platform(tmp_path_factory.mktemp("controls"), models=[{"id": "a/b", "engine": engine}]) as running:
        yield running


def change(served: Platform, **controls: Any) -> Any:
    reply = served.admin("PATCH", "/admin/v1/models/a/b", controls)
    assert reply.status == 200, reply.body
    return reply.json


def running_of(served: Platform, number: int) -> int:
    """How many of so many streams run at once."""
    chats: list[OpenChat] = [
        served.open_chat(f"{at} go", stream=True, max_tokens=250) for at in range(number)
    ]
    try:
        until(
            lambda: served.metric("headrace_running") + served.metric("headrace_queue_length") == number,
            what="all are accepted",
        )
        return int(served.metric("headrace_running"))
    finally:
        for chat in chats:
            chat.close()
        until(lambda: served.metric("headrace_running") == 0)


def test_fewer_and_more_requests_at_once(served: Platform) -> None:
    assert running_of(served, 6) == 4
    shown = change(served, max_batch_size=2)
    assert shown["controls"] == {"max_batch_size": 2}
    assert running_of(served, 6) == 2
    change(served, max_batch_size=100)
    assert running_of(served, 6) == 4, "never beyond what the worker was loaded for"
    change(served, max_batch_size=None, max_concurrent_requests=1)
    assert running_of(served, 6) == 1
    assert change(served, max_concurrent_requests=None)["controls"] == {}
    assert running_of(served, 6) == 4


def test_the_portion_of_a_prompt_in_a_step(served: Platform) -> None:
    url = served.workers()[0]["metrics_url"]

    def steps(text: str) -> float:
        before = served.metric("headrace_worker_steps_total", url=url)
        assert served.chat(text * 40, max_tokens=1).status == 200
        return served.metric("headrace_worker_steps_total", url=url) - before

    whole = steps("another prompt of four hundred tokens ")
    change(served, max_batch_tokens=64)
    cut = steps("yet a different one of as many tokens ")
    assert cut >= whole + 4
    change(served, max_batch_tokens=None)


def test_the_first_step_waits_for_company(served: Platform) -> None:
    url = served.workers()[0]["metrics_url"]
    change(served, batch_wait_ms=300)
    chats = [served.open_chat(f"wait {at}", max_tokens=3) for at in range(4)]
    assert all(chat.reply().status == 200 for chat in chats)
    change(served, batch_wait_ms=None)
    assert served.metric("headrace_worker_batch_size_max", url=url) == 4


def test_the_window_of_a_static_batch(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = {"max_batch_size": 4, "batching": "static", "batch_wait_ms": 60_000, "stub": STUB}
    with platform(tmp_path_factory.mktemp("static"), models=[{"id": "a/b", "engine": engine}]) as static:
        url = static.workers()[0]["metrics_url"]
        chats = [static.open_chat(f"collected {at}", max_tokens=3) for at in range(2)]
        until(lambda: static.metric("headrace_worker_waiting", url=url) == 2, what="both are collected")
        gone = static.open_chat("gives up", max_tokens=3)
        until(lambda: static.metric("headrace_worker_waiting", url=url) == 3)
        gone.close()
        until(lambda: static.metric("headrace_worker_waiting", url=url) == 2, what="one has given up")
        change(static, batch_wait_ms=0)
        assert all(chat.reply().status == 200 for chat in chats)
        assert static.metric("headrace_worker_batch_size_max", url=url) == 2
        assert static.metric("headrace_worker_batches_flushed_total", url=url, reason="window") == 1


@pytest.mark.parametrize(
    ("controls", "code"),
    [
        ({"max_batch_size": 0}, "invalid_value"),
        ({"max_batch_tokens": 5}, "invalid_value"),
        ({"target_step_ms": -1}, "invalid_value"),
        ({"batch_size": 3}, "unknown_field"),
        ({"max_batch_size": "many"}, "invalid_value"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(
    served: Platform, controls: dict[str, Any], code: str
) -> None:
    refused = served.admin("PATCH", "/admin/v1/models/a/b", controls)
    assert (refused.status, refused.json["code"]) == (400, code)
    (model,) = served.admin("GET", "/admin/v1/models").json["data"]
    assert (model["id"], model["controls"]) == ("a/b", {})
    assert served.admin("PATCH", "/admin/v1/models/none", {}).status == 404


def test_a_request_brings_its_own_window(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = {"max_batch_size": 4, "batching": "static", "batch_wait_ms": 60_000, "stub": {}}
    model = {"id": "s", "engine": {**engine, "offline_batch_wait_ms": 60_000}}
    with platform(tmp_path_factory.mktemp("window"), models=[model]) as static:
        patient = [
            static.open_chat("a", max_tokens=2),
            static.open_chat("b", max_tokens=2, latency_sla="throughput"),
        ]
        until(lambda: static.metric("headrace_running") == 2)
        # Whoever cannot wait takes along who waits.
        assert static.chat("c", max_tokens=2, latency_sla="low").status == 200
        assert [one.reply().status for one in patient] == [200, 200]
        assert static.metric("headrace_worker_batch_size_max", url=static.workers()[0]["metrics_url"]) == 3


def test_a_static_batch_is_not_preempted(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = {"id": "s", "engine": {"max_batch_size": 2, "batching": "static", "stub": {}}}
    with platform(tmp_path_factory.mktemp("static"), models=[model]) as static:
        reply = static.admin("PATCH", "/admin/v1/models/s", {"preemption": True})
        assert (reply.status, reply.json["code"]) == (400, "invalid_value")
        assert "static batches" in reply.json["detail"]
