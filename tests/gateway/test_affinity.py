"""A model with two workers: what continues goes where its beginning is, and nothing depends on that."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.platform_harness import Platform, Reply, platform, until

STUB = {"decode_us_per_step": 1_000, "output_tokens": 24, "prefill_us_per_token": 10}
LONG = "Everything that runs downhill can be measured. " * 20
TOKENS = len(LONG) // 4
TURN_TOKENS_MAX = 60
"""The last answer, the next question, what the template puts between, and a piece of a block."""


def two_workers(**engine: Any) -> dict[str, Any]:
    return {
        "id": "stub",
        "workers": 2,
        "engine": {"max_batch_size": 8, "max_context_tokens": 2048, "stub": STUB, **engine},
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with platform(tmp_path_factory.mktemp("affinity"), models=[two_workers()]) as running:
        yield running


def new_key(served: Platform, tenant: str, **fields: Any) -> str:
    assert served.admin("POST", "/admin/v1/tenants", {"id": tenant, **fields}).status == 201
    key: str = served.admin("POST", "/admin/v1/keys", {"tenant": tenant}).json["key"]
    return key


def ask(served: Platform, key: str, messages: list[dict[str, Any]], **fields: Any) -> Reply:
    body = {"model": "stub", "messages": messages, "seed": 5, **fields}
    reply = served.request("POST", "/v1/chat/completions", body, key=key)
    assert reply.status == 200, reply.body
    return reply


def user(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def text_of(reply: Reply) -> str:
    text: str = reply.json["choices"][0]["message"]["content"]
    return text


def cached(reply: Reply) -> int:
    tokens: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def prompt_tokens(reply: Reply) -> int:
    tokens: int = reply.json["usage"]["prompt_tokens"]
    return tokens


def worker_of(served: Platform, reply: Reply) -> str:
    (row,) = (row for row in served.rows() if row["request_id"] == reply.headers["x-request-id"])
    worker: str = row["worker_id"]
    return worker


def placements(served: Platform) -> dict[str, float]:
    return {
        reason: served.metric("headrace_placements_total", model="stub", reason=reason)
        for reason in ("session", "prefix", "least_loaded", "only")
    }


def talk(served: Platform, key: str, name: str, *, turns: int = 10, **fields: Any) -> list[Reply]:
    messages = [user(f"{name}: {LONG}")]
    replies = []
    for number in range(turns):
        reply = ask(served, key, messages, max_tokens=8, **fields)
        replies.append(reply)
        messages += [{"role": "assistant", "content": text_of(reply)}, user(f"{name}, number {number}?")]
    return replies


def test_conversations_of_several_tenants_stay_on_their_workers_and_pay_for_new_tokens_only(
    served: Platform,
) -> None:
    keys = {tenant: new_key(served, tenant) for tenant in ("one", "two", "three")}
    before = placements(served)
    names = [(tenant, f"{tenant}-{number}") for tenant in keys for number in range(2)]
    with ThreadPoolExecutor(len(names)) as pool:
        talks = list(pool.map(lambda one: talk(served, keys[one[0]], one[1], conversation_id=one[1]), names))
    workers = [{worker_of(served, reply) for reply in replies} for replies in talks]
    assert all(len(one) == 1 for one in workers)
    assert set().union(*workers) == {"stub-0", "stub-1"}, "and both have something to do"
    for replies in talks:
        for reply in replies[1:]:
            assert prompt_tokens(reply) - cached(reply) < TURN_TOKENS_MAX
    after = placements(served)
    assert after["session"] - before["session"] == 9 * len(names)
    assert after["least_loaded"] - before["least_loaded"] == len(names)


def test_a_conversation_without_a_name_is_found_by_its_beginning(served: Platform) -> None:
    key = new_key(served, "unnamed")
    talks = [talk(served, key, name) for name in ("first", "second")]
    for replies in talks:
        assert len({worker_of(served, reply) for reply in replies}) == 1
        assert all(prompt_tokens(reply) - cached(reply) < TURN_TOKENS_MAX for reply in replies[1:])


def test_the_expected_warm_tokens_are_about_what_is_taken_over(served: Platform) -> None:
    key = new_key(served, "expected")
    before = served.metric("headrace_placement_warm_tokens_total", model="stub")
    prefixes = placements(served)["prefix"]
    replies = talk(served, key, "expected", turns=4)
    expected = served.metric("headrace_placement_warm_tokens_total", model="stub") - before
    taken = sum(cached(reply) for reply in replies)
    assert placements(served)["prefix"] == prefixes + 3
    assert taken > 3 * (TOKENS - 32)
    assert 0.9 * taken < expected < 1.1 * taken


def test_another_tenants_identical_prompt_is_not_placed_by_this_ones_warmth(served: Platform) -> None:
    mine, other = new_key(served, "mine"), new_key(served, "theirs")
    prompt = [user("A secret of mine. " + LONG, cache_control={"type": "ephemeral"})]
    for _ in range(3):
        ask(served, mine, prompt, max_tokens=2, conversation_id="same")
    before = placements(served)
    reply = ask(served, other, prompt, max_tokens=2, conversation_id="same")
    after = placements(served)
    assert after["least_loaded"] - before["least_loaded"] == 1
    assert (after["session"], after["prefix"]) == (before["session"], before["prefix"])
    assert cached(reply) == 0


def test_a_marked_prefix_is_found_across_tenants_that_share_it_by_consent(served: Platform) -> None:
    one = new_key(served, "house1", shared_prefix="house")
    two = new_key(served, "house2", shared_prefix="house")
    prompt = [user("The house's rules. " + LONG, cache_control={"type": "ephemeral"})]
    first = ask(served, one, prompt, max_tokens=2)
    before = placements(served)["prefix"]
    second = ask(served, two, [*prompt, user("A question of two's.")], max_tokens=2)
    assert placements(served)["prefix"] == before + 1
    assert worker_of(served, second) == worker_of(served, first)
    assert cached(second) > TOKENS - 32


def test_a_tenant_that_lets_nothing_be_kept_leaves_no_trace(served: Platform) -> None:
    key = new_key(served, "trackless", cache="off")
    before = placements(served)
    replies = talk(served, key, "trackless", turns=3, conversation_id="c")
    after = placements(served)
    assert after["least_loaded"] - before["least_loaded"] == 3
    assert all(cached(reply) == 0 for reply in replies)


def test_an_ended_session_has_no_home_any_more(served: Platform) -> None:
    key = new_key(served, "ending")
    begun = served.request("POST", "/v1/sessions", {}, key=key).json["id"]
    before = placements(served)["session"]
    talk(served, key, "ending", turns=3, session_id=begun)
    assert placements(served)["session"] == before + 2
    assert served.request("DELETE", f"/v1/sessions/{begun}", key=key).status == 200


def test_a_conversation_does_not_wait_for_its_worker_while_that_one_is_full(tmp_path: Path) -> None:
    slow = {**STUB, "decode_us_per_step": 20_000, "output_tokens": 500}
    with platform(tmp_path / "data", models=[two_workers(max_batch_size=1, stub=slow)]) as served:
        first = ask(served, served.key, [user(LONG)], max_tokens=2, conversation_id="c")
        home = worker_of(served, first)
        more = [user(LONG), {"role": "assistant", "content": text_of(first)}, user("And?")]
        blocker = served.open_chat("x", max_tokens=500, stream=True)
        assert blocker.response.readline()
        second = ask(served, served.key, more, max_tokens=2, conversation_id="c")
        blocker.close()
        until(lambda: served.metric("headrace_running") == 0)
        blocked = next(row["worker_id"] for row in served.rows() if row["mode"] == "stream")
        assert blocked == home
        assert worker_of(served, second) != home
        assert cached(second) == 0


def test_after_its_worker_was_killed_a_conversation_goes_on_elsewhere_and_is_right(tmp_path: Path) -> None:
    with platform(tmp_path / "data", models=[two_workers()]) as served:
        messages = [user(LONG)]
        for number in range(3):
            reply = ask(served, served.key, messages, max_tokens=8, conversation_id="c")
            messages += [{"role": "assistant", "content": text_of(reply)}, user(f"Number {number}?")]
        home = worker_of(served, reply)
        key = new_key(served, "cold")
        (pid,) = (worker["pid"] for worker in served.workers() if worker["id"] == home)
        os.kill(pid, signal.SIGKILL)
        until(lambda: any(worker["status"] != "ready" for worker in served.workers()))
        moved = ask(served, served.key, messages, max_tokens=8, conversation_id="c")
        assert cached(moved) == 0
        assert text_of(moved) == text_of(ask(served, key, messages, max_tokens=8)), "as if nothing was kept"
        new_home = worker_of(served, moved)
        messages += [{"role": "assistant", "content": text_of(moved)}, user("And now?")]
        until(lambda: all(worker["status"] == "ready" for worker in served.workers()))
        after = ask(served, served.key, messages, max_tokens=8, conversation_id="c")
        assert worker_of(served, after) == new_home, "its home is where it went last"
        assert prompt_tokens(after) - cached(after) < TURN_TOKENS_MAX


def test_conversations_go_back_to_their_workers_after_a_restart(tmp_path: Path) -> None:
    names = [f"talk-{number}" for number in range(6)]
    with platform(tmp_path, models=[two_workers()]) as served:
        with ThreadPoolExecutor(len(names)) as pool:
            talks = list(
                pool.map(lambda name: talk(served, served.key, name, turns=2, conversation_id=name), names)
            )
        homes = [worker_of(served, replies[-1]) for replies in talks]
        assert set(homes) == {"stub-0", "stub-1"}
        key = served.key
    with platform(tmp_path, models=[two_workers()]) as served:
        for name, home in zip(names, homes, strict=True):
            reply = ask(served, key, [user(f"{name}: {LONG}")], max_tokens=2, conversation_id=name)
            assert worker_of(served, reply) == home
            assert cached(reply) > TOKENS - 32
        assert placements(served)["session"] == len(names)


def test_a_model_with_one_worker_has_no_choice(tmp_path: Path) -> None:
    model = {**two_workers(), "workers": 1}
    with platform(tmp_path / "data", models=[model]) as served:
        talk(served, served.key, "alone", turns=3, conversation_id="c")
        assert placements(served) == {"session": 0, "prefix": 0, "least_loaded": 0, "only": 3}
        assert served.metric("headrace_placement_warm_tokens_total", model="stub") == 0
