"""A client that goes away, in every phase: the engine stops, one record holds its count, nothing is held."""

import json
from typing import Any

from tests.platform_harness import Platform, until


def rows_after(narrow: Platform, number: int) -> list[dict[str, Any]]:
    """The records written since `number` existed, once nothing is open any more."""
    until(lambda: narrow.num_open() == 0, seconds=5, what="every operation is settled")
    until(lambda: narrow.metric("headrace_running") == 0, what="every place is given back")
    return narrow.rows()[number:]


def test_gone_while_waiting_in_the_queue(narrow: Platform) -> None:
    before = len(narrow.rows())
    running = narrow.open_chat(max_tokens=60)
    until(lambda: narrow.metric("headrace_running") == 1)
    waiting = narrow.open_chat(max_tokens=5)
    until(lambda: narrow.metric("headrace_queue_length") == 1)
    waiting.close()
    until(lambda: narrow.metric("headrace_queue_length") == 0, seconds=1)
    assert running.reply().status == 200
    gone, done = sorted(rows_after(narrow, before), key=lambda row: row["completion_tokens"])
    assert (gone["status"], gone["outcome"], gone["count_source"]) == (499, "client_closed", "none")
    assert (gone["prompt_tokens"], gone["completion_tokens"], gone["start_ts"]) == (0, 0, None)
    assert done["completion_tokens"] == 60


def test_gone_in_prefill(narrow: Platform) -> None:
    before = len(narrow.rows())
    url = narrow.workers()[0]["metrics_url"]
    connection = narrow.open_chat("water " * 330, max_tokens=5, stream=True)  # about a second of prefill
    until(lambda: narrow.metric("headrace_worker_running", url=url) or narrow.metric("headrace_running"))
    connection.close()
    (row,) = rows_after(narrow, before)
    assert (row["status"], row["outcome"], row["count_source"]) == (499, "client_closed", "engine")
    assert row["completion_tokens"] <= 1
    assert row["finish_reason"] == "aborted"


def test_gone_after_some_tokens_of_a_stream(narrow: Platform) -> None:
    before = len(narrow.rows())
    connection = narrow.open_chat(max_tokens=400, stream=True)
    response = connection.response
    seen = 0
    while seen < 11:
        line = response.readline()
        if line.startswith(b"data: ") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            seen += 1
    connection.close()
    (row,) = rows_after(narrow, before)
    assert (row["status"], row["outcome"], row["count_source"]) == (499, "client_closed", "engine")
    assert 11 <= row["completion_tokens"] <= 11 + 50, "50 tokens are a second"
    assert row["prompt_tokens"] > 0


def test_gone_while_a_whole_reply_is_made(narrow: Platform) -> None:
    before = len(narrow.rows())
    url = narrow.workers()[0]["metrics_url"]
    start = narrow.metric("headrace_worker_generated_tokens_total", url=url)
    connection = narrow.open_chat(max_tokens=400)
    until(lambda: narrow.metric("headrace_worker_generated_tokens_total", url=url) > start + 5)
    connection.close()
    (row,) = rows_after(narrow, before)
    assert (row["status"], row["outcome"], row["count_source"]) == (499, "client_closed", "engine")
    assert 5 < row["completion_tokens"] < 200
    generated = narrow.metric("headrace_worker_generated_tokens_total", url=url) - start
    assert row["completion_tokens"] == generated, "the record holds the engine's own count"


def test_the_slot_serves_the_next_at_once(narrow: Platform) -> None:
    narrow.open_chat(max_tokens=400).close()
    assert narrow.chat(max_tokens=2).json["usage"]["completion_tokens"] == 2
