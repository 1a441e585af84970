"""Why a request waits: told to its tenant and to the administrator, in headers, bodies, the log and metrics."""

import json
from collections.abc import Iterator
from typing import Any, Self

import pytest

from tests.platform_harness import OpenChat, Platform, platform, until

STUB = {"decode_us_per_step": 20_000, "output_tokens": 400}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """One slow place, and a queue of four."""
    model = {"id": "narrow", "engine": {"max_batch_size": 1, "max_context_tokens": 512, "stub": STUB}}
    with platform(
        tmp_path_factory.mktemp("explained"),
        models=[model],
        queue={"length": 4, "tenant_length": 3, "timeout_s": 20},
        headers_after_ms=300,
        keep_alive_ms=100,
    ) as served:
        yield served


def new_key(served: Platform, tenant: str, **fields: Any) -> str:
    made = served.admin("POST", "/admin/v1/tenants", {"id": tenant, **fields})
    assert made.status == 201, made.body
    key: str = served.admin("POST", "/admin/v1/keys", {"tenant": tenant}).json["key"]
    return key


def waiting(served: Platform) -> float:
    return served.metric("headrace_queue_length")


def queue_of(served: Platform, key: str) -> dict[str, Any]:
    reply = served.request("GET", "/v1/queue", key=key)
    assert reply.status == 200, reply.body
    shown: dict[str, Any] = reply.json
    return shown


class Crowd:
    """Chats that are under way; each waits before the next is sent."""

    def __init__(self, served: Platform) -> None:
        self.served = served
        self.chats: list[OpenChat] = []

    def __enter__(self) -> Self:
        until(lambda: self.served.num_open() == 0)
        return self

    def __exit__(self, *error: object) -> None:
        for chat in self.chats:
            chat.close()
        until(lambda: self.served.num_open() == 0)

    def send(self, key: str, **fields: Any) -> OpenChat:
        number = len(self.chats) + 1
        self.chats.append(self.served.open_chat("go", key=key, **fields))
        until(lambda: self.served.metric("headrace_running") + waiting(self.served) == number)
        return self.chats[-1]


def log_line(served: Platform, request_id: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        lines = (json.loads(line) for line in served.log.read_text().splitlines() if request_id in line)
        return next((line for line in lines if line["event"] == "request"), None)

    line: dict[str, Any] = until(found)
    return line


def test_a_waiting_request_is_seen_by_its_tenant_and_the_administrator_and_by_nobody_else(
    narrow: Platform,
) -> None:
    flood, quiet = new_key(narrow, "flood"), new_key(narrow, "quiet", weight=3.0)
    with Crowd(narrow) as crowd:
        for _ in range(3):
            crowd.send(flood, max_tokens=300)
        crowd.send(quiet, max_tokens=1)
        own = queue_of(narrow, quiet)
        (mine,) = own["data"]
        assert (mine["position"], mine["is_position_exact"], mine["share"]) == (2, True, 0.75)
        assert (mine["reason"], mine["service_class"], mine["priority"]) == (
            "replicas_full",
            "interactive",
            0,
        )
        assert mine["waited_ms"] >= 0 and "replica" in mine["reason_text"]
        assert own["tenant"] == {
            "id": "quiet", "is_shared": False, "is_throttled": False, "weight": 3.0, "share": 0.75, "lead": 0.0, "received_60s": 0.0,
        }  # fmt: skip
        assert (own["length"], own["length_max"], own["tenants"], own["running"], own["places"]) == (
            3,
            4,
            2,
            1,
            1,
        )
        assert (own["tenant_length"], own["tenant_length_max"], own["has_more"]) == (1, 3, False)

        others = queue_of(narrow, flood)
        assert [one["position"] for one in others["data"]] == [1, 3]
        assert others["tenant"]["share"] == 0.25
        shown = json.dumps(others)
        assert "quiet" not in shown and mine["request_id"] not in shown
        assert "flood" not in json.dumps(own)

        usage = narrow.request("GET", f"/v1/usage/{mine['request_id']}", key=quiet).json
        assert (usage["state"], usage["queue"]["position"]) == ("open", 2)
        assert narrow.request("GET", f"/v1/usage/{mine['request_id']}", key=flood).status == 404

        (view,) = narrow.admin("GET", "/admin/v1/queue").json["data"]
        assert [one["tenant"] for one in view["requests"]] == ["flood", "quiet", "flood"]
        assert view["requests"][1]["request_id"] == mine["request_id"]
        assert view["waiting_by_class"] == {"interactive": 3, "batch": 0}
        assert [(one["tenant"], one["waiting"], one["running"]) for one in view["tenants"]] == [
            ("flood", 2, 1),
            ("quiet", 1, 0),
        ]
        (first,) = narrow.admin("GET", "/admin/v1/queue?model=narrow&limit=1").json["data"]
        assert len(first["requests"]) == 1


def test_a_request_that_waited_says_so_in_its_reply_and_its_log_line(narrow: Platform) -> None:
    key = new_key(narrow, "told")
    with Crowd(narrow) as crowd:
        running = crowd.send(key, max_tokens=400)
        whole = crowd.send(key, max_tokens=2)
        stream = crowd.send(key, max_tokens=2, stream=True)
        running.close()
        for chat, position in ((whole, "1"), (stream, "2")):
            headers = chat.reply().headers
            assert (headers["x-queue-position"], headers["x-queue-reason"]) == (position, "replicas_full")
            assert headers["x-queue-share"] == "1.0000"
            exposed = headers["access-control-expose-headers"].lower()
            assert all(name in exposed for name in headers if name.startswith("x-queue-"))
            if chat is whole:
                assert int(headers["x-queue-wait-ms"]) > 0
            line = log_line(narrow, headers["x-request-id"])
            assert (line["queue_position"], line["queue_reason"]) == (int(position), "replicas_full")
            assert line["queue_share"] == 1.0
    at_once = narrow.chat("go", max_tokens=1)
    assert at_once.status == 200
    assert not any(name.startswith("x-queue-") for name in at_once.headers)
    assert "queue_position" not in log_line(narrow, at_once.headers["x-request-id"])


def test_a_stream_whose_headers_leave_while_it_waits_says_where_it_stands(narrow: Platform) -> None:
    key = new_key(narrow, "impatient")
    with Crowd(narrow) as crowd:
        crowd.send(key, max_tokens=60)
        response = crowd.send(key, max_tokens=1, stream=True).response
        assert response.getheader("x-queue-position") == "1"
        assert response.getheader("x-queue-wait-ms") is None, "nobody knows yet"


def test_who_finds_the_queue_full_is_told_how_full_and_what_is_its_part(narrow: Platform) -> None:
    key, other = new_key(narrow, "many"), new_key(narrow, "few")
    with Crowd(narrow) as crowd:
        for _ in range(4):
            crowd.send(key, max_tokens=300)
        refused = narrow.chat("go", key=key)
        assert (refused.status, refused.error["limit_type"], refused.error["level"]) == (
            429,
            "queue_full",
            "tenant",
        )
        queue = refused.error["queue"]
        assert (queue["length"], queue["length_max"], queue["tenants"], queue["share"]) == (3, 4, 1, 1.0)
        assert (queue["tenant_length"], queue["tenant_length_max"]) == (3, 3)
        assert queue["position"] is queue["reason"] is queue["waited_ms"] is None, "it never waited"
        assert (refused.headers["x-queue-length"], refused.headers["x-queue-length-max"]) == ("3", "4")
        assert refused.headers["x-queue-share"] == "1.0000"
        assert "x-queue-position" not in refused.headers
        crowd.send(other, max_tokens=300)
        last = crowd.chats[3]
        served = narrow.open_chat("go", key=new_key(narrow, "third"), max_tokens=1)
        displaced = last.reply()
        assert (displaced.status, displaced.error["limit_type"]) == (429, "queue_full")
        queue = displaced.error["queue"]
        assert (queue["position"], queue["is_position_exact"], queue["reason"]) == (3, True, "replicas_full")
        assert queue["waited_ms"] > 0
        headers = displaced.headers
        assert (headers["x-queue-position"], headers["x-queue-share"]) == ("3", "1.0000")
        assert int(headers["x-queue-wait-ms"]) > 0
        assert b"many" not in narrow.request("GET", "/v1/queue", key=other).body
        served.close()


def test_who_waits_too_long_is_told_where_it_stood(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = {"id": "narrow", "engine": {"max_batch_size": 1, "max_context_tokens": 512, "stub": STUB}}
    with platform(tmp_path_factory.mktemp("late"), models=[model], queue={"timeout_s": 0.5}) as served:
        running = served.open_chat("go", max_tokens=300)
        until(lambda: served.metric("headrace_running") == 1)
        late = served.chat("go", max_tokens=1)
        assert (late.status, late.error["limit_type"]) == (429, "queue_timeout")
        queue = late.error["queue"]
        assert (queue["position"], queue["reason"], queue["length_max"]) == (1, "replicas_full", 256)
        assert queue["waited_ms"] >= 500
        assert late.headers["x-queue-position"] == "1"
        assert int(late.headers["x-queue-wait-ms"]) >= 500
        running.close()


def test_metrics_of_waiting_are_moved(narrow: Platform) -> None:
    day, night = new_key(narrow, "day"), new_key(narrow, "night", service_class="batch")
    before = narrow.metric("headrace_tenant_queue_seconds_count", tenant="day")
    with Crowd(narrow) as crowd:
        crowd.send(day, max_tokens=400)
        crowd.send(day, max_tokens=1)
        crowd.send(night, max_tokens=1)
        for name in ("interactive", "batch"):
            until(
                lambda name=name: (
                    narrow.metric("headrace_queue_waiting", model="narrow", service_class=name) == 1
                )
            )
        assert narrow.metric("headrace_fairness_jain_index", model="narrow") == 1.0, "too early to say"
        # Both want more all the time, and one place serves one of them.
        until(lambda: narrow.metric("headrace_fairness_jain_index", model="narrow") < 0.6)
        (view,) = narrow.admin("GET", "/admin/v1/queue").json["data"]
        assert view["jain_index"] < 0.6
        assert next(one for one in view["tenants"] if one["tenant"] == "day")["received_60s"] > 0
    assert narrow.metric("headrace_queue_waiting") == 0
    assert narrow.metric("headrace_tenant_queue_seconds_count", tenant="day") > before


def test_a_model_that_is_not_there(narrow: Platform) -> None:
    refused = narrow.request("GET", "/v1/queue?model=nothing")
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    for path, status, code in (
        ("model=nothing", 404, "model_not_found"),
        ("limit=257", 400, "invalid_limit"),
        ("limit=x", 400, "invalid_limit"),
        ("colour=red", 400, "unknown_field"),
    ):
        reply = narrow.admin("GET", f"/admin/v1/queue?{path}")
        assert (reply.status, reply.json["code"]) == (status, code), reply.body
    assert narrow.request("POST", "/v1/queue", {}).status == 405
    assert narrow.request("GET", "/v1/queue", key=None).status == 401
