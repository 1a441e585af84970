"""Which replica a request goes to for what is in memory there: the rule, alone and in the queue."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.request.messages import Message
from headrace.scheduling.affinity import Affinity
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.locality import NEIGHBOUR_TOKENS, Warmth, choose
from headrace.scheduling.policy import Demand
from headrace.scheduling.prompt_keys import PromptKeys, prompt_keys
from headrace.scheduling.queue_bounds import QueueBounds
from headrace.scheduling.replicas import Replica

ANY = 10**12
BOUNDS = QueueBounds(length=ANY, tokens=ANY, tenant_length=ANY, tenant_tokens=ANY)
PROMPT = 1000


def replica(name: str, running: int, *, capacity: int = 32, unread: int = 0) -> Replica:
    one = Replica(name, capacity=capacity, kv_tokens=None)
    one.running, one.unread_tokens = running, unread
    return one


def chosen(warmth: Warmth, *replicas: Replica, prompt_tokens: int = PROMPT) -> str | None:
    found = choose(warmth, replicas, prompt_tokens=prompt_tokens, slack=0.25)
    return None if found is None else found[0].replica_id


def test_a_session_stays_while_it_is_not_crowded_even_for_little() -> None:
    assert chosen(Warmth({"r": 40}, home="r"), replica("r", 8), replica("s", 0)) == "r"
    assert chosen(Warmth({}, home="r"), replica("r", 8), replica("s", 0)) == "r"
    assert chosen(Warmth({}, home="r"), replica("r", 9), replica("s", 0)) == "s"
    assert chosen(Warmth({}, home="r"), replica("r", 30), replica("s", 25)) == "r", "both are busy"


def test_a_session_stays_in_a_crowd_for_as_much_as_the_crowd_is_worth() -> None:
    ahead = 10 * NEIGHBOUR_TOKENS
    assert chosen(Warmth({"r": ahead + 1}, home="r"), replica("r", 10), replica("s", 0)) == "r"
    assert chosen(Warmth({"r": ahead}, home="r"), replica("r", 10), replica("s", 0)) == "s"
    other = Warmth({"r": ahead + 1, "s": 100}, home="r")
    assert chosen(other, replica("r", 10), replica("s", 0)) == "s", "most of it is there too"


def test_a_prefix_is_worth_its_tokens() -> None:
    warm = Warmth({"r": 500})
    assert chosen(warm, replica("r", 7), replica("s", 0)) == "r"
    assert chosen(warm, replica("r", 8), replica("s", 0)) == "s"
    assert chosen(warm, replica("r", 0, unread=499), replica("s", 0)) == "r"
    assert chosen(warm, replica("r", 0, unread=501), replica("s", 0)) == "s"
    assert chosen(warm, replica("r", 20, unread=501), replica("s", 20, unread=900)) == "r"


def test_a_popular_prefix_does_not_pile_up_on_one() -> None:
    huge = Warmth({"r": 100_000})
    assert chosen(huge, replica("r", 8), replica("s", 0), prompt_tokens=100_100) == "r"
    assert chosen(huge, replica("r", 9), replica("s", 0), prompt_tokens=100_100) == "s"
    small = [replica("r", 1, capacity=2), replica("s", 0, capacity=2)]
    assert chosen(huge, *small, prompt_tokens=100_100) == "r", "one place is no crowd"


def test_of_several_that_have_it_the_one_with_least_to_do() -> None:
    warm = Warmth({"r": 500, "s": 500, "u": 600})
    assert chosen(warm, replica("r", 2), replica("s", 1), replica("u", 3), replica("v", 1)) == "s"
    assert chosen(warm, replica("r", 1), replica("s", 1, capacity=64), replica("u", 3)) == "s"
    assert chosen(Warmth({"u": 500})) is None, "none has room"
    assert chosen(Warmth({"gone": 500}, home="gone"), replica("r", 0)) == "r"


replicas_lists = st.lists(
    st.tuples(st.integers(0, 32), st.integers(1, 40), st.integers(0, 5000)), min_size=1, max_size=6
)


@given(
    replicas_lists,
    st.dictionaries(st.sampled_from(["r0", "r1", "r2", "r3", "gone"]), st.integers(0, 4000)),
    st.sampled_from([None, "r0", "r1", "gone"]),
    st.integers(0, 4000),
    st.floats(0, 1),
)
def test_the_rule_holds_for_whatever_there_is(
    made: list[tuple[int, int, int]],
    tokens: dict[str, int],
    home: str | None,
    prompt_tokens: int,
    slack: float,
) -> None:
    replicas = [
        replica(f"r{number}", running, capacity=running + more, unread=unread)
        for number, (running, more, unread) in enumerate(made)
    ]
    found = choose(Warmth(tokens, home), replicas, prompt_tokens=prompt_tokens, slack=slack)
    least = min(replicas, key=lambda one: one.running / one.capacity)

    def work(one: Replica) -> int:
        return one.unread_tokens + NEIGHBOUR_TOKENS * one.running

    def places_ahead(one: Replica) -> float:
        return one.running - least.running / least.capacity * one.capacity

    assert found is not None
    one, warm_tokens = found
    assert warm_tokens == tokens.get(one.replica_id, 0)
    is_crowded = places_ahead(one) > max(one.capacity * slack, 1)
    if one.replica_id == home:
        assert not is_crowded or warm_tokens - tokens.get(least.replica_id, 0) > work(one) - work(least)
    else:
        assert not is_crowded
        for other in replicas:
            if places_ahead(other) <= max(other.capacity * slack, 1):
                uncached = max(prompt_tokens - tokens.get(other.replica_id, 0), 0)
                assert work(one) + max(prompt_tokens - warm_tokens, 0) <= work(other) + uncached


def test_nobody_waits_for_a_warm_replica() -> None:
    warm = {"a0": Warmth({"r": 900}, home="r"), "a1": Warmth({"r": 900}, home="r")}
    queue: FairQueue[str] = FairQueue(BOUNDS, warm_on=warm.get)
    queue.add("r", capacity=1)
    queue.add("s", capacity=1)
    for ticket in ("a0", "a1"):
        queue.enter(ticket, tenant="a", tokens=1, demand=Demand(prompt_tokens=PROMPT))
    assert list(queue.dispatch()) == [("a0", "r"), ("a1", "s")]


def test_prompts_to_be_read_in_count_until_they_are() -> None:
    warm = {"b": Warmth({"r": 400})}
    queue: FairQueue[str] = FairQueue(BOUNDS, warm_on=warm.get)
    queue.add("r", capacity=8)
    queue.add("s", capacity=8)
    for ticket in ("a0", "a1"):
        queue.enter(ticket, tenant="a", tokens=1, demand=Demand(prompt_tokens=3000))
    assert dict(queue.dispatch()) == {"a0": "r", "a1": "s"}
    queue.progress("a1", 1)
    queue.enter("b", tenant="b", tokens=1, demand=Demand(prompt_tokens=500))
    assert list(queue.dispatch()) == [("b", "s")]
    queue.settle("b", output_tokens=1)
    queue.release("s")
    queue.progress("a0", 1)
    queue.enter("b", tenant="b", tokens=1, demand=Demand(prompt_tokens=500))
    assert list(queue.dispatch()) == [("b", "r")]


@pytest.mark.parametrize("has_names", [True, False])
@pytest.mark.parametrize("num_at_once", [4, 12, 20])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shared_system_prompt_spreads_and_conversations_stay(
    seed: int, num_at_once: int, has_names: bool
) -> None:
    """Four workers of eight places, 200 users of one tenant, 4 000 tokens in front of three turns each."""
    draw = random.Random(seed)
    affinity = Affinity()
    keys: dict[str, PromptKeys] = {}
    queue: FairQueue[str] = FairQueue(BOUNDS, warm_on=lambda ticket: affinity.warmth(keys[ticket]))
    for number in range(4):
        queue.add(f"r{number}", capacity=8)
        affinity.add(f"r{number}")
    users = [f"u{number}" for number in range(200)]
    texts = {
        user: [Message("system", "s" * 16_000), Message("user", f"{user} asks. " * 10)] for user in users
    }
    went: dict[str, list[str]] = {user: [] for user in users}
    waiting, running = users[:], []
    while waiting or running:
        while waiting and len(running) < num_at_once:
            user = waiting.pop(0)
            turn = f"{user}/{len(went[user])}"
            tokens = sum(len(message.content) for message in texts[user]) // 4
            keys[turn] = prompt_keys(
                texts[user],
                tenant="t",
                session=f"t/c/k/{user}" if has_names else None,
                prompt_tokens=tokens,
                ttl_us=10**12,
            )
            queue.enter(turn, tenant="t", tokens=1, demand=Demand(prompt_tokens=tokens))
            for ticket, where in queue.dispatch():
                affinity.place(keys[ticket], where)
                went[user].append(where)
                running.append((ticket, where))
        ticket, where = running.pop(draw.randrange(len(running)))
        queue.progress(ticket, 1)
        queue.settle(ticket, output_tokens=100)
        queue.release(where)
        user = ticket.partition("/")[0]
        if len(went[user]) < 3:
            texts[user] += [Message("assistant", "a" * 1000), Message("user", f"{user} asks on. " * 10)]
            waiting.insert(draw.randrange(len(waiting) + 1), user)
    shares = Counter(where for places in went.values() for where in places)
    assert max(shares.values()) <= (1.25 if has_names else 1.3) * 600 / 4
    stayed = sum(places[turn] == places[turn - 1] for places in went.values() for turn in (1, 2))
    assert stayed >= (0.9 if has_names else 0.7) * 400
