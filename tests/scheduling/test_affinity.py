"""Where things went: against a plain model of it, within bounds, and each tenant for itself."""

import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace import bounds
from headrace.request.messages import Message
from headrace.scheduling.affinity import WARM_TOKENS_MIN, Affinity, _level
from headrace.scheduling.locality import Warmth
from headrace.scheduling.prompt_keys import BLOCK_CHARACTERS_MIN, PromptKeys, prompt_keys

TEXT = "Everything that runs downhill can be measured. " * 12


def keys_of(*contents: str, tenant: str = "t", **fields: Any) -> PromptKeys:
    """Turns of user and assistant; a token for four characters. `marked`: up to which message."""
    marked = fields.pop("marked", 0)
    messages = [
        Message(("user", "assistant")[at % 2], content, is_cache_end=at + 1 == marked)
        for at, content in enumerate(contents)
    ]
    tokens = sum(map(len, contents)) // 4
    return prompt_keys(
        messages,
        tenant=tenant,
        **{"prompt_tokens": tokens, "ttl_us": 1_000_000, **fields},
    )


def affinity_of(*replicas: str, **limits: int) -> Affinity:
    affinity = Affinity(**limits)
    for replica in replicas:
        affinity.add(replica)
    return affinity


def test_a_conversation_is_found_where_it_went_last_and_so_is_its_beginning() -> None:
    affinity = affinity_of("r", "s")
    first = keys_of(TEXT, session="t/c/k/talk")
    assert affinity.warmth(first) is None
    assert affinity.place(first, "s") == ("least_loaded", 0)
    second = keys_of(TEXT, "An answer..", "And then???", session="t/c/k/talk")
    found = affinity.warmth(second)
    assert found == Warmth({"s": (len(TEXT) + len("An answer..")) // 4}, home="s")
    assert affinity.place(second, "s") == ("session", found.tokens["s"])
    unnamed = keys_of(TEXT, "An answer..", "Or else?")
    assert affinity.warmth(unnamed) == Warmth(found.tokens)
    assert affinity.place(unnamed, "r") == ("least_loaded", 0), "it went where nothing is"
    assert affinity.place(unnamed, "r")[0] == "prefix"
    assert set(affinity.warmth(unnamed).tokens) == {"r", "s"}  # type: ignore[union-attr]


def test_another_tenants_identical_prompt_is_not_placed_by_this_ones_warmth() -> None:
    """Else the time to its first token would tell what this one sends."""
    affinity = affinity_of("r", "s")
    affinity.place(keys_of(TEXT, tenant="one", session="one/c/k/talk", marked=1), "r")
    for group in (None, "house"):
        other = keys_of(TEXT, tenant="other", session="one/c/k/talk", group=group, marked=1)
        assert affinity.warmth(other) is None
    assert affinity.place(other, "r") == ("least_loaded", 0)


def test_what_two_tenants_of_a_group_mark_is_found_by_both_and_nothing_behind_it() -> None:
    affinity = affinity_of("r")
    long = TEXT + "A secret of one."
    affinity.place(keys_of(TEXT, "Yes.", long, tenant="one", group="house", marked=1), "r")
    other = keys_of(TEXT, "Yes.", long, tenant="other", group="house", marked=1)
    found = affinity.warmth(other)
    assert found is not None
    # The answer behind the marked part is credited by what this prompt says, not by what the other's said.
    assert found.tokens["r"] == other.tokens_to(0) < other.prompt_tokens // 2 + 10
    assert affinity.warmth(keys_of(TEXT, "Yes.", long, tenant="other", group="house")) is None, "not marked"
    assert affinity.warmth(keys_of(TEXT, tenant="third", marked=1)) is None, "not in the group"
    assert affinity.warmth(keys_of(TEXT, tenant="third", group="other", marked=1)) is None


def test_what_is_short_is_nothing_but_a_session_has_its_home() -> None:
    affinity = affinity_of("r", "s")
    short = keys_of("x" * 4 * (WARM_TOKENS_MIN - 1), session="t/c/k/a")
    affinity.place(short, "r")
    assert affinity.warmth(short) == Warmth({}, home="r")
    assert affinity.place(short, "r") == ("session", 0)


def test_a_replica_that_leaves_is_forgotten_also_if_its_name_comes_back() -> None:
    affinity = affinity_of("r", "s")
    keys = keys_of(TEXT, session="t/c/k/a")
    affinity.place(keys, "r")
    affinity.remove("r")
    assert affinity.warmth(keys) is None
    affinity.add("r")
    assert affinity.warmth(keys) is None
    affinity.remove("s")
    assert affinity.place(keys, "r") == ("only", 0)
    affinity.place(keys, "gone")
    assert affinity.warmth(keys) == Warmth({"r": len(TEXT) // 4}, home="r")


def test_it_is_forgotten_in_time_and_when_the_session_ends() -> None:
    affinity = affinity_of("r")
    keys = keys_of(TEXT, session="t/c/k/a")
    affinity.place(keys, "r")
    affinity.advance(999_999)
    assert affinity.warmth(keys) is not None
    affinity.place(keys, "r")
    affinity.advance(1_999_998)
    assert affinity.warmth(keys) is not None, "asked for again"
    assert keys.session is not None
    affinity.end_session("t", keys.session)
    assert affinity.warmth(keys) == Warmth({"r": len(TEXT) // 4})
    affinity.advance(1_999_999)
    assert affinity.warmth(keys) is None
    affinity.place(keys_of("y" * 400), "r")
    assert len(affinity) == 1, "what is over makes room by itself"


def test_what_an_earlier_life_has_put_aside_counts_less_than_where_it_went_since() -> None:
    affinity = affinity_of("r", "s")
    keys = keys_of(TEXT, session="t/c/k/a")
    assert keys.session is not None
    affinity.bring("t", keys.session, "r", until_us=500)
    assert affinity.warmth(keys) == Warmth({}, home="r")
    affinity.bring("t", keys.session, "s", until_us=400)
    assert affinity.warmth(keys) == Warmth({}, home="r"), "used there later"
    affinity.advance(600)
    assert affinity.warmth(keys) is None
    affinity.bring("t", keys.session, "s", until_us=500)
    assert (affinity.warmth(keys), len(affinity)) == (None, 0), "over before it came"
    affinity.place(keys, "s")
    affinity.bring("t", keys.session, "r", until_us=700)
    assert affinity.warmth(keys) == Warmth({"s": len(TEXT) // 4}, home="s")


def test_a_tenant_that_floods_forgets_its_own() -> None:
    affinity = affinity_of("r", places_max=64)
    quiet = [keys_of(f"{number} " + TEXT, tenant="quiet") for number in range(20)]
    for keys in quiet:
        affinity.place(keys, "r")
    for number in range(500):
        affinity.place(keys_of(f"{number} " + TEXT, tenant="flood"), "r")
        assert len(affinity) <= 64
    assert all(affinity.warmth(keys) for keys in quiet)
    assert affinity.warmth(keys_of("499 " + TEXT, tenant="flood"))
    assert affinity.warmth(keys_of("10 " + TEXT, tenant="flood")) is None
    for number in range(100):
        affinity.place(keys_of(TEXT, tenant=f"t{number}"), "r")
        assert len(affinity) <= 64
    assert affinity.warmth(quiet[0]) is None
    affinity.advance(1_000_000)
    affinity.place(quiet[0], "r")
    for number in range(63):
        affinity.place(keys_of(TEXT, tenant=f"u{number}"), "r")
    assert affinity.warmth(quiet[0]), "what is over goes before what is not"


def test_a_tenant_alone_has_it_all() -> None:
    affinity = affinity_of("r", places_max=64)
    sent = [keys_of(f"{number} " + TEXT) for number in range(64)]
    for keys in sent:
        affinity.place(keys, "r")
    assert all(affinity.warmth(keys) for keys in sent)


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    affinity = affinity_of("r", places_max=4)
    long = "x" * 3 * BLOCK_CHARACTERS_MIN
    affinity.place(keys_of(long), "r")
    affinity.place(keys_of("z" * 2 * BLOCK_CHARACTERS_MIN), "r")
    assert affinity.warmth(keys_of(long)) == Warmth({"r": 2 * BLOCK_CHARACTERS_MIN // 4})


def test_a_place_takes_no_more_memory_than_is_said_whatever_it_stands_for() -> None:
    replicas = [f"model-{number}#1" for number in range(10)]
    for at_once in (1, 10):
        tracemalloc.start()
        try:
            affinity = affinity_of(*replicas, places_max=4000)
            before = tracemalloc.get_traced_memory()[0]
            for number in range(4000):
                affinity.advance(number * 1000)
                name = f"{number} " * 40
                keys = keys_of(name, tenant="x" * 100 + str(number % 2), session=name, ttl_us=10**12)
                for replica in replicas[:at_once]:
                    affinity.place(keys, replica)
            used = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert 3800 < len(affinity) <= 4000
        assert used / 4000 <= bounds.AFFINITY_PLACE_BYTES_MAX


class AgainstAPlainModel(RuleBasedStateMachine):
    """Prompts are strings of letters, one block each; the model remembers whole prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.affinity = Affinity()
        self.now_us = 0
        self.replicas: set[str] = set()
        self.went: list[tuple[str, str, str, int]] = []
        """(tenant, prompt, replica, until when)"""
        self.homes: dict[tuple[str, str], tuple[str, int]] = {}

    def keys(self, tenant: str, prompt: str, session: str | None, ttl_us: int = 100) -> PromptKeys:
        messages = [Message("user", letter * 400) for letter in prompt]
        return prompt_keys(
            messages, tenant=tenant, session=session, prompt_tokens=100 * len(prompt), ttl_us=ttl_us
        )

    @rule(replica=st.sampled_from("rsu"))
    def comes(self, replica: str) -> None:
        self.leaves(replica)
        self.affinity.add(replica)
        self.replicas.add(replica)

    @rule(replica=st.sampled_from("rsu"))
    def leaves(self, replica: str) -> None:
        self.affinity.remove(replica)
        self.replicas.discard(replica)
        self.went = [one for one in self.went if one[2] != replica]
        self.homes = {name: one for name, one in self.homes.items() if one[0] != replica}

    @rule(by_us=st.integers(0, 80))
    def time_passes(self, by_us: int) -> None:
        self.now_us += by_us
        self.affinity.advance(self.now_us)

    @rule(
        tenant=st.sampled_from("ab"),
        prompt=st.text("xy", min_size=1, max_size=4),
        session=st.sampled_from([None, "1", "2"]),
        data=st.data(),
    )
    def goes(self, tenant: str, prompt: str, session: str | None, data: st.DataObject) -> None:
        if not self.replicas:
            return
        replica = data.draw(st.sampled_from(sorted(self.replicas)))
        expected = self.expected(tenant, prompt, session)
        reason, tokens = self.affinity.place(self.keys(tenant, prompt, session), replica)
        assert tokens == expected.tokens.get(replica, 0)
        if expected.home == replica:
            assert reason == "session"
        elif tokens:
            assert reason == "prefix"
        else:
            assert reason == ("only" if len(self.replicas) == 1 else "least_loaded")
        self.went.append((tenant, prompt, replica, self.now_us + 100))
        if session is not None:
            self.homes[tenant, session] = (replica, self.now_us + 100)

    @rule(tenant=st.sampled_from("ab"), session=st.sampled_from("12"))
    def ends(self, tenant: str, session: str) -> None:
        key = self.keys(tenant, "x", session).session
        assert key is not None
        self.affinity.end_session(tenant, key)
        self.homes.pop((tenant, session), None)

    @rule(
        tenant=st.sampled_from("ab"),
        prompt=st.text("xy", min_size=1, max_size=4),
        session=st.sampled_from([None, "1"]),
    )
    def is_looked_for(self, tenant: str, prompt: str, session: str | None) -> None:
        found = self.affinity.warmth(self.keys(tenant, prompt, session)) or Warmth({})
        assert found == self.expected(tenant, prompt, session)

    @invariant()
    def counts_its_entries(self) -> None:
        parts = self.affinity._parts.values()
        assert len(self.affinity) == sum(part.num_places for part in parts)
        for part in parts:
            assert 0 < part.num_places == sum(map(len, part.entries.values()))

    def expected(self, tenant: str, prompt: str, session: str | None) -> Warmth:
        tokens: dict[str, int] = {}
        for owner, other, replica, until_us in self.went:
            if owner == tenant and until_us > self.now_us:
                same = next(
                    (at for at, (one, two) in enumerate(zip(prompt, other, strict=False)) if one != two),
                    min(len(prompt), len(other)),
                )
                if same:
                    tokens[replica] = max(tokens.get(replica, 0), 100 * same)
        home, until_us = self.homes.get((tenant, session or ""), (None, 0))
        return Warmth(tokens, home if until_us > self.now_us else None)


TestAgainstAPlainModel = AgainstAPlainModel.TestCase
TestAgainstAPlainModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 30), st.integers(1, 6)), max_size=60),
    st.integers(8, 40),
)
def test_it_never_grows_beyond_its_bound_and_the_last_request_is_known(
    sent: list[tuple[str, int, int]], limit: int
) -> None:
    affinity = affinity_of("r", "s", places_max=limit)
    for at, (tenant, number, blocks) in enumerate(sent):
        keys = keys_of(*[f"{number} " * 50] * blocks, tenant=tenant, session=str(number))
        affinity.place(keys, "rs"[at % 2])
        assert len(affinity) <= limit
        assert affinity.warmth(keys)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 200))
def test_the_largest_give_up_and_no_more_than_they_must(sizes: list[int], surplus: int) -> None:
    surplus = min(surplus, sum(sizes))
    level = _level(sizes[:], surplus)
    assert sum(max(0, size - level) for size in sizes) >= surplus
    assert sum(max(0, size - level - 1) for size in sizes) < surplus
