"""One tenant's flood never refuses another: the queue takes back what the flood has put into it."""

from collections.abc import Iterator

import pytest

from tests.platform_harness import OpenChat, Platform, platform, until


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    stub = {"decode_us_per_step": 20_000, "output_tokens": 60}
    model = {"id": "narrow", "engine": {"max_batch_size": 1, "max_context_tokens": 512, "stub": stub}}
    with platform(
        tmp_path_factory.mktemp("queue"),
        models=[model],
        queue={"length": 3, "tenant_length": 10, "tenant_tokens": 1600},
        headers_after_ms=100,
        keep_alive_ms=100,
    ) as served:
        yield served


def new_key(served: Platform, tenant_id: str) -> str:
    assert served.admin("POST", "/admin/v1/tenants", {"id": tenant_id}).status == 201
    key: str = served.admin("POST", "/admin/v1/keys", {"tenant": tenant_id}).json["key"]
    return key


def waiting(served: Platform) -> float:
    return served.metric("headrace_queue_length")


def test_another_tenant_takes_the_place_of_the_newest_of_the_flood(narrow: Platform) -> None:
    flood, quiet = new_key(narrow, "flood"), new_key(narrow, "quiet")
    chats: list[OpenChat] = []
    for number, is_stream in enumerate((True, True, False, True)):
        chats.append(narrow.open_chat("go", key=flood, stream=is_stream))
        until(lambda number=number: narrow.metric("headrace_running") + waiting(narrow) == number + 1)
    refused = narrow.chat("go", key=flood)
    assert (refused.status, refused.error["limit_type"]) == (429, "queue_full")
    served = narrow.open_chat("go", key=quiet, max_tokens=1)
    displaced = chats[-1].reply()
    assert b"its newest request made room" in displaced.body, "in a stream that waits, as its last event"
    assert b"[DONE]" not in displaced.body
    assert waiting(narrow) == 3
    for chat in chats[:-1]:
        reply = chat.reply()
        assert reply.status == 200
    assert served.reply().status == 200
    rows = [row for row in narrow.rows() if row["tenant_id"] == "flood"]
    assert sorted(row["outcome"] for row in rows) == ["completed"] * 3 + ["refused"] * 2
    assert narrow.num_open() == 0


def test_a_tenants_own_part_is_bounded_in_tokens(narrow: Platform) -> None:
    large, small = new_key(narrow, "large"), new_key(narrow, "small")
    running = narrow.open_chat("go", key=small, stream=True)
    until(lambda: narrow.metric("headrace_running") == 1)
    waits = [narrow.open_chat("x" * 1000, key=large, max_tokens=400) for _ in range(3)]
    until(lambda: waiting(narrow) == 3)
    refused = narrow.chat("x" * 1000, key=large, max_tokens=400)
    error = refused.error
    assert (error["limit_type"], error["level"], error["unit"], error["limit"]) == (
        "queue_full",
        "tenant",
        "tokens",
        1600,
    )
    for chat in waits:
        chat.close()
    running.close()
    until(lambda: narrow.num_open() == 0)
