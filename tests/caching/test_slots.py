"""Slots and what is kept in them: the longest prefix is found, tenants stay apart, nothing is lost or doubled."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.bounds import BLOCK_TOKENS
from headrace.caching.index import Holding, PrefixIndex
from headrace.caching.slots import LESS_TOKENS_MAX, CacheOrder, Placement, SlotBook, Wanted

B = BLOCK_TOKENS
LETTERS = {name: list(range(1000 * at, 1000 * at + 20 * B)) for at, name in enumerate("abcdef", 1)}


def text(*parts: tuple[str, int]) -> list[int]:
    """Tokens: so many of each letter's row."""
    return [token for letter, length in parts for token in LETTERS[letter][:length]]


def wanted(prompt: list[int], *, tenant: str = "t", cacheable: int = 0, **order: object) -> Wanted:
    return Wanted(tenant=tenant, prompt=prompt, cacheable=cacheable, order=CacheOrder(**order))  # type: ignore[arg-type]


class Desk:
    def __init__(
        self, num_slots: int, *, grain: int = 1, is_shared: bool = False, is_parking: bool = False
    ) -> None:
        self.book = SlotBook(num_slots, grain=grain, is_shared=is_shared, can_park=lambda tokens: is_parking)
        self.now_us = 0

    def start(self, one: Wanted) -> Placement:
        self.now_us += 1
        placement = self.book.place(one, self.now_us)
        assert placement is not None
        return placement

    def run(self, one: Wanted, generated: int = 0) -> Placement:
        """From its start to its end."""
        placement = self.start(one)
        self.end(placement.slot, one, generated)
        return placement

    def end(self, slot: int, one: Wanted, generated: int = 0) -> int:
        self.now_us += 1
        self.book.computed(slot, len(one.prompt))
        return self.book.finish(slot, [7] * generated, one, self.now_us)


def told(placement: Placement) -> tuple[int, str, int]:
    return placement.slot, placement.source, placement.length


def test_a_conversation_goes_on_where_it_ended_with_what_was_generated() -> None:
    desk = Desk(2)
    first = wanted(text(("a", 2 * B)))
    assert told(desk.run(first, generated=10)) == (0, "cold", 0)
    second = wanted(first.prompt + [7] * 10 + text(("b", 50)))
    assert told(desk.run(second)) == (0, "place", 2 * B + 10)


def test_at_least_one_token_is_computed() -> None:
    desk = Desk(1)
    one = wanted(text(("a", 2 * B)))
    desk.run(one)
    assert told(desk.run(one)) == (0, "place", 2 * B - 1)


def test_a_prefix_is_copied_so_that_its_owner_keeps_the_rest() -> None:
    desk = Desk(3)
    desk.run(wanted(text(("a", 4 * B), ("b", 4 * B))))
    other = desk.start(wanted(text(("a", 4 * B), ("c", 4 * B))))
    assert told(other) == (1, "copy", 4 * B)
    assert other.donor is not None and other.donor.slot == 0
    running = desk.start(wanted(text(("a", 4 * B), ("d", B))))
    assert told(running) == (2, "copy", 4 * B)


def long_start(desk: Desk, question: str, *, tail: int = 2 * B + 8, **order: object) -> Wanted:
    """Ends behind a beginning of 40 blocks and `tail` tokens of its own."""
    one = wanted(text(("a", 20 * B), ("b", 20 * B), (question, tail)), **order)
    desk.run(one)
    return one


def shared_start(*question: tuple[str, int], **order: object) -> Wanted:
    """Begins with 40 blocks that many begin with."""
    return wanted(text(("a", 20 * B), ("b", 20 * B), *question), **order)


def test_where_no_slot_is_empty_a_short_tail_is_given_up_for_having_the_rest_in_place() -> None:
    desk = Desk(3, is_parking=True)
    for letter in "cde":
        long_start(desk, letter)
    newcomer = desk.start(shared_start(("f", B)))
    assert (newcomer.source, newcomer.length, newcomer.park) == ("place", 40 * B, None)
    # Of the running one a few tokens more could be copied, for which another slot's would have to be put aside.
    desk.book.computed(newcomer.slot, 41 * B)
    other = desk.start(shared_start(("f", 10), ("a", B)))
    assert (other.source, other.length, other.park) == ("place", 40 * B, None)


def test_what_runs_and_has_more_is_copied_all_the_same() -> None:
    desk = Desk(3, is_parking=True)
    for letter in "cde":
        long_start(desk, letter)
    newcomer = desk.start(shared_start(("f", B)))
    desk.book.computed(newcomer.slot, 41 * B)
    other = desk.start(shared_start(("f", LESS_TOKENS_MAX + 1), ("a", B)))
    assert (other.source, other.length) == ("copy", 40 * B + LESS_TOKENS_MAX + 1)
    assert other.park is not None


def test_a_tail_stays_where_a_slot_is_empty_or_it_is_a_conversations_or_longer() -> None:
    newcomer = shared_start(("f", B))
    desk = Desk(4)
    for letter in "cde":
        long_start(desk, letter)
    assert told(desk.start(newcomer)) == (3, "copy", 40 * B)
    for order, tail in (({"session": "talk"}, 2 * B + 8), ({}, 3 * B)):
        desk = Desk(3)
        for letter in "cde":
            long_start(desk, letter, tail=tail, **order)
        assert desk.start(newcomer).source == "copy"


def test_where_copies_take_no_memory_nothing_is_given_up_for_having_it_in_place() -> None:
    desk = Desk(3, is_shared=True)
    for letter in "cde":
        long_start(desk, letter)
    assert desk.start(shared_start(("f", B))).source == "copy"


def test_the_only_kept_slot_is_not_taken_from_a_conversation_for_being_nearly_as_long() -> None:
    desk = Desk(2, is_parking=True)
    long_start(desk, "c", tail=8 * B, session="talk")
    running = desk.start(shared_start(("f", B)))
    assert running.source == "copy"
    desk.book.computed(running.slot, 41 * B)
    other = desk.start(shared_start(("f", 10), ("a", B)))
    assert (other.source, other.length) == ("copy", 40 * B + 10)
    assert other.park is not None
    assert other.park.session == "talk"


def test_with_a_grain_a_slot_in_place_is_not_preferred_for_less_than_a_portion() -> None:
    desk = Desk(3, grain=2 * B, is_parking=True)
    for letter in "cde":
        long_start(desk, letter, tail=4 * B)
    newcomer = desk.start(shared_start(("f", 4 * B)))
    desk.book.computed(newcomer.slot, 44 * B)
    other = desk.start(shared_start(("f", 2 * B + 4), ("a", B)))
    assert (other.source, other.length) == ("copy", 42 * B)


def test_a_stopped_request_goes_on_with_all_that_was_put_aside_of_it() -> None:
    desk = Desk(2, is_parking=True)
    one = shared_start(("f", 10))
    desk.run(one)
    (holding,) = desk.book.kept()
    desk.book.release(holding, is_parked=True)
    desk.book.parked(holding, "one")
    long_start(desk, "c")
    long_start(desk, "d")
    again = Wanted(tenant="t", prompt=one.prompt, cacheable=0, order=one.order, is_answered=True)
    placement = desk.start(again)
    assert (placement.source, placement.length) == ("restore", 40 * B + 10)


def test_who_shares_a_prefix_that_is_being_computed_waits_for_it() -> None:
    desk = Desk(3)
    first, second = wanted(text(("a", 4 * B), ("b", B))), wanted(text(("a", 4 * B), ("c", B)))
    slot = desk.start(first).slot
    assert desk.book.place(second, desk.now_us) is None
    assert desk.book.place(wanted(text(("d", 4 * B))), desk.now_us) is not None, "others go on"
    desk.book.computed(slot, 3 * B)
    assert desk.book.place(second, desk.now_us) is None
    desk.book.computed(slot, 4 * B)
    placement = desk.start(second)
    assert (placement.source, placement.length) == ("copy", 4 * B)


def test_a_donor_that_fails_leaves_nothing_to_wait_for() -> None:
    desk = Desk(2)
    slot = desk.start(wanted(text(("a", 4 * B)))).slot
    desk.book.abandon(slot)
    assert desk.start(wanted(text(("a", 4 * B)))).source == "cold"


def test_another_tenant_finds_nothing() -> None:
    desk = Desk(2)
    one = wanted(text(("a", 4 * B)))
    desk.run(one)
    assert told(desk.run(wanted(one.prompt, tenant="u"))) == (1, "cold", 0)
    assert desk.run(wanted(one.prompt, tenant="v")).source == "cold", "not even when slots are short"
    assert desk.book.take_freed()[-1].reason == "pressure"


def test_a_group_shares_what_is_marked_and_no_token_more() -> None:
    desk = Desk(3)
    desk.run(wanted(text(("a", 4 * B), ("b", 2 * B)), cacheable=3 * B + 5, group="g"))
    prompt = text(("a", 4 * B), ("b", 2 * B))
    assert told(desk.run(wanted(prompt, tenant="u", group="g"))) == (1, "copy", 3 * B + 5)
    assert desk.run(wanted(prompt, tenant="v", group="h")).source == "cold"
    assert desk.run(wanted(prompt, tenant="w")).source == "cold"


def test_prefix_only_keeps_what_is_marked() -> None:
    desk = Desk(2)
    prompt = text(("a", 4 * B), ("b", 2 * B))
    one = wanted(prompt, cacheable=4 * B, mode="prefix_only")
    slot = desk.start(one).slot
    assert desk.end(slot, one, generated=9) == 4 * B
    assert desk.run(wanted(prompt, mode="prefix_only")).length == 4 * B
    assert (
        desk.end(desk.start(wanted(prompt, mode="prefix_only")).slot, wanted(prompt, mode="prefix_only")) == 0
    )


def test_off_keeps_and_takes_nothing() -> None:
    desk = Desk(2)
    one = wanted(text(("a", 4 * B)))
    desk.run(one)
    off = wanted(one.prompt, mode="off")
    placement = desk.start(off)
    assert placement.source == "cold"
    assert desk.end(placement.slot, off) == 0


def test_the_least_recently_used_goes_first_and_conversations_last() -> None:
    desk = Desk(3)
    session = wanted(text(("a", 2 * B)), session="s")
    desk.run(session)
    desk.run(wanted(text(("b", 2 * B))))
    desk.run(wanted(text(("c", 2 * B))))
    assert desk.run(wanted(text(("d", 2 * B)))).slot == 1
    assert desk.run(wanted(text(("e", 2 * B)))).slot == 2
    assert desk.run(wanted(text(("a", 2 * B), ("f", 9)), session="s")).is_session


def test_time_ends_what_is_kept() -> None:
    desk = Desk(1)
    one = wanted(text(("a", 2 * B)), ttl_s=1)
    desk.run(one)
    desk.now_us += 1_000_001
    assert desk.run(one).source == "cold"
    assert [freed.reason for freed in desk.book.take_freed()] == ["expired"]


def test_what_is_parked_is_found_and_restored() -> None:
    desk = Desk(1, is_parking=True)
    one = wanted(text(("a", 4 * B)))
    desk.run(one)
    placement = desk.start(wanted(text(("b", 2 * B))))
    assert placement.park is not None
    desk.book.parked(placement.park, "file")
    desk.end(placement.slot, wanted(text(("b", 2 * B))))
    back = desk.start(one)
    assert (back.source, back.length) == ("restore", 4 * B - 1)
    assert back.donor is placement.park and back.park is not None


def test_a_session_can_be_ended() -> None:
    desk = Desk(2)
    one = wanted(text(("a", 2 * B)), session="s")
    desk.run(one)
    assert desk.book.end_session("other") == 0
    assert desk.book.end_session("s") == 1
    assert desk.run(one).source == "cold"


def test_with_a_grain_only_whole_portions_of_prompts_are_taken_over() -> None:
    desk = Desk(2, grain=64)
    one = wanted(text(("a", 150)))
    assert desk.end(desk.start(one).slot, one, generated=50) == 128
    assert desk.run(wanted(text(("a", 150), ("b", 9)))).length == 128
    assert desk.run(wanted(text(("a", 128)))).length == 64, "the last portion gives the answer's first token"


class SlotsMachine(RuleBasedStateMachine):
    """Random sequences of three tenants on few slots, against what each slot really holds."""

    @initialize(num_slots=st.integers(1, 4), grain=st.sampled_from((1, 64)), is_parking=st.booleans())
    def begin(self, num_slots: int, grain: int, is_parking: bool) -> None:
        self.num_slots = num_slots
        self.grain = grain
        self.book = SlotBook(num_slots, grain=grain, can_park=lambda tokens: is_parking)
        self.now_us = 0
        self.memory: dict[int, tuple[str, list[int]]] = {slot: ("", []) for slot in range(num_slots)}
        self.files: dict[str, tuple[str, list[int]]] = {}
        self.running: dict[int, Wanted] = {}
        self.computed_tokens: dict[int, int] = {}
        self.num_files = 0

    @rule(
        tenant=st.sampled_from("tuv"),
        head=st.sampled_from("ab"),
        head_length=st.integers(0, 5 * B),
        tail=st.sampled_from("cd"),
        tail_length=st.integers(1, 3 * B),
        marked=st.booleans(),
        mode=st.sampled_from(("full", "full", "prefix_only", "off")),
        group=st.sampled_from((None, "g")),
        session=st.sampled_from((None, None, "s1", "s2")),
    )
    def start(
        self,
        tenant: str,
        head: str,
        head_length: int,
        tail: str,
        tail_length: int,
        marked: bool,
        mode: str,
        group: str | None,
        session: str | None,
    ) -> None:
        prompt = text((head, head_length), (tail, tail_length))
        one = wanted(
            prompt,
            tenant=tenant,
            cacheable=head_length if marked else 0,
            mode=mode,
            group=group,
            session=None if session is None else tenant + session,
            ttl_s=50.0,
        )
        placement = self.book.place(one, self.now_us)
        self.clean()
        if placement is None:
            assert len(self.running) == self.num_slots or self.is_shared_and_computed_now(prompt)
            return
        slot = placement.slot
        assert slot not in self.running
        if placement.park is not None:
            self.num_files += 1
            name = f"f{self.num_files}"
            owner, tokens = self.memory[slot]
            assert tokens[: len(placement.park.tokens)] == placement.park.tokens
            self.files[name] = (owner, placement.park.tokens)
            self.book.parked(placement.park, name)
        donor = placement.donor
        if placement.source == "copy":
            assert donor is not None and donor.slot != slot
            source = self.memory[donor.slot]
        elif placement.source == "restore":
            assert donor is not None and donor.parked is not None
            source = self.files[donor.parked]
        else:
            source = self.memory[slot]
        owner, held = source[0], source[1][: placement.length]
        assert len(held) == placement.length < len(prompt)
        assert held == prompt[: placement.length], "never a foreign token"
        assert placement.length % self.grain == 0
        if placement.length:
            assert mode != "off"
            assert owner == tenant or group == "g", "tenants stay apart"
        self.memory[slot] = (tenant, held)
        self.running[slot] = one
        self.computed_tokens[slot] = placement.length

    def is_shared_and_computed_now(self, prompt: list[int]) -> bool:
        return any(
            one.prompt[:B] == prompt[:B] and self.computed_tokens[slot] < len(one.prompt)
            for slot, one in self.running.items()
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        self.advance(slot, data.draw(st.integers(1, 3 * B)))

    def advance(self, slot: int, tokens: int) -> None:
        one = self.running[slot]
        done = min(len(one.prompt), self.computed_tokens[slot] + tokens)
        self.memory[slot] = (one.tenant, one.prompt[:done])
        self.computed_tokens[slot] = done
        self.book.computed(slot, done)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), generated=st.integers(0, 40), is_whole=st.booleans())
    def finish(self, data: st.DataObject, generated: int, is_whole: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        if is_whole:
            self.advance(slot, 10_000)
        one = self.running.pop(slot)
        is_done = self.computed_tokens.pop(slot) == len(one.prompt)
        more = [9] * generated if is_done else []
        self.memory[slot] = (one.tenant, self.memory[slot][1] + more)
        keep = self.book.finish(slot, more, one, self.now_us)
        assert keep <= len(self.memory[slot][1])
        if one.order.mode == "prefix_only":
            assert keep <= one.cacheable
        self.memory[slot] = (one.tenant, self.memory[slot][1][:keep])
        self.clean()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[slot], self.computed_tokens[slot]
        self.book.abandon(slot)
        self.memory[slot] = ("", [])
        self.clean()

    @rule(session=st.sampled_from(("ts1", "us2")))
    def end_session(self, session: str) -> None:
        self.book.end_session(session)
        self.clean()
        assert not [one for one in self.book.holdings if one.session == session and not one.is_running]

    @rule(seconds=st.sampled_from((1, 20, 60)))
    def wait(self, seconds: int) -> None:
        self.now_us += seconds * 1_000_000
        self.book.expire(self.now_us)
        self.clean()

    def clean(self) -> None:
        for freed in self.book.take_freed():
            assert not freed.holding.is_running
            if freed.holding.parked is not None:
                del self.files[freed.holding.parked]

    @invariant()
    def the_book_says_what_is_there(self) -> None:
        if not hasattr(self, "book"):
            return
        assert self.book.num_running == len(self.running)
        assert self.book.num_free == self.num_slots - len(self.running)
        parked = set()
        for holding in self.book.holdings:
            owner, tokens = (
                self.files[holding.parked] if holding.parked is not None else self.memory[holding.slot]
            )
            assert owner == holding.tenant
            assert tokens[: holding.num_valid] == holding.tokens[: holding.num_valid]
            if holding.parked is not None:
                parked.add(holding.parked)
        assert parked == set(self.files)

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for slot in list(self.running):
            self.book.abandon(slot)
        self.now_us += 10**9
        self.book.expire(self.now_us)
        assert not list(self.book.holdings)
        assert self.book._index.is_empty, "nothing is left in the index"


SlotsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestSlotsMachine = SlotsMachine.TestCase


def test_the_index_forgets_what_is_removed() -> None:
    index = PrefixIndex()
    holdings = [
        Holding(tenant="t", tokens=text(("a", number * B)), slot=number, num_valid=number * B)
        for number in range(1, 6)
    ]
    for holding in holdings:
        index.add(holding)
    scope = [("tenant", "t")]
    best = max(index.find(text(("a", 3 * B + 4)), scope), key=lambda match: match.length)
    assert best.length == 3 * B + 4
    for holding in holdings:
        index.remove(holding)
    assert index.is_empty
