"""How static batches form: the flush rule by example, and what holds whatever comes."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.settings import EngineSettings
from headrace.request.latency import LatencySla
from headrace.scheduling.batch_wait import batch_wait_ms
from headrace.scheduling.static_batch import Batch, BatchLimits, Member, StaticBatcher

LIMITS = BatchLimits(tokens_max=100, size_max=4, alpha=0.5)
WINDOW_US = 5_000


def batcher(limits: BatchLimits = LIMITS) -> StaticBatcher:
    return StaticBatcher(limits, wait_us=WINDOW_US)


def member(
    key: str, prompt: int = 10, output: int = 10, *, at_us: int = 0, wait_us: int | None = None
) -> Member:
    return Member(key=key, prompt_tokens=prompt, output_tokens_max=output, arrived_us=at_us, wait_us=wait_us)


def taken(collected: StaticBatcher, now_us: int) -> tuple[str, str | None] | None:
    """The names of the batch that is due, and why it is."""
    batch = collected.take(now_us)
    return None if batch is None else ("".join(one.key for one in batch.members), batch.reason)


# --- the flush rule -------------------------------------------------------------------------------------


def test_a_batch_waits_for_company_until_its_first_members_window_ends() -> None:
    collected = batcher()
    assert collected.take(0) is None
    assert collected.due_us() is None
    collected.add(member("a", at_us=1_000))
    collected.add(member("b", at_us=4_000))
    assert collected.due_us() == 6_000
    assert taken(collected, 5_999) is None
    assert taken(collected, 6_000) == ("ab", "window")
    assert len(collected) == 0


def test_the_first_that_does_not_fit_by_cost_flushes_at_once_and_opens_the_next() -> None:
    collected = batcher()
    collected.add(member("a", 30, 20))  # cost 40
    collected.add(member("b", 30, 20))  # 80
    collected.add(member("c", 11, 20))  # would be 101; prompts and members are only 74
    assert taken(collected, 0) == ("ab", "does_not_fit")
    assert taken(collected, 0) is None, "the next one has a window of its own"
    collected.add(member("d", 10, 20))
    assert taken(collected, WINDOW_US) == ("cd", "window")


def test_the_last_token_of_the_cost_bound_is_usable() -> None:
    collected = batcher()
    collected.add(member("a", 40, 20))
    collected.add(member("b", 40, 20))  # exactly 100
    assert taken(collected, 0) == ("ab", "full"), "no request at all could join"


def test_prompts_and_a_token_for_each_member_are_bounded_too() -> None:
    collected = batcher()
    collected.add(member("a", 49, 1))
    collected.add(member("b", 50, 1))  # 99 tokens and two members are 101; the cost is only 100
    assert taken(collected, 0) == ("a", "does_not_fit")


def test_alpha_says_how_much_of_a_longest_answer_counts() -> None:
    for alpha, expected in ((0.3, "ab"), (1.0, "a")):
        collected = batcher(BatchLimits(tokens_max=100, size_max=4, alpha=alpha))
        collected.add(member("a", 20, 80))
        collected.add(member("b", 20, 80))
        found = taken(collected, WINDOW_US)
        assert found is not None and found[0] == expected


def test_a_full_batch_flushes_at_once() -> None:
    collected = batcher()
    for key in "abcde":
        collected.add(member(key, 1, 1))
    assert taken(collected, 0) == ("abcd", "full")
    assert taken(collected, 0) is None


def test_whoever_exceeds_the_bounds_alone_runs_alone() -> None:
    collected = batcher()
    for key, prompt, output in (("a", 10, 10), ("B", 90, 4000), ("C", 4000, 1), ("d", 10, 10)):
        collected.add(member(key, prompt, output))
    assert taken(collected, 0) == ("a", "does_not_fit")
    assert taken(collected, 0) == ("B", "full"), "waiting for company would be in vain"
    assert taken(collected, 0) == ("C", "full")
    assert taken(collected, WINDOW_US) == ("d", "window")


def test_a_window_that_ends_while_the_engine_is_busy_flushes_nothing() -> None:
    collected = batcher()
    collected.add(member("a", at_us=0))
    collected.add(member("b", at_us=10 * WINDOW_US))  # nobody has asked for a batch meanwhile
    assert taken(collected, 10 * WINDOW_US) == ("ab", "window")


def test_one_impatient_member_shortens_the_wait_of_all_and_patient_ones_wait_longer() -> None:
    collected = batcher()
    collected.add(member("a", wait_us=50_000))
    collected.add(member("b", wait_us=50_000, at_us=100))
    assert collected.due_us() == 50_000
    collected.add(member("c", wait_us=2_000, at_us=1_000))
    assert taken(collected, 3_000) == ("abc", "window")


def test_who_gives_up_leaves_no_trace() -> None:
    collected = batcher()
    collected.add(member("a", 60, 20, wait_us=0))
    collected.add(member("b", 10, 20))
    assert collected.remove("a")
    assert not collected.remove("a")
    assert collected.due_us() == WINDOW_US, "its window went with it"
    collected.add(member("c", 60, 20))
    assert taken(collected, WINDOW_US) == ("bc", "window"), "its tokens, too"
    collected.add(member("d", 60, 20))
    collected.add(member("e", 60, 20))
    assert collected.remove("d"), "out of a batch that is flushed"
    assert taken(collected, WINDOW_US) == ("e", "window")


def test_changed_bounds_and_windows_hold_for_those_who_wait() -> None:
    collected = batcher()
    for key in "abc":
        collected.add(member(key, 10, 10))
    collected.set_limits(BatchLimits(tokens_max=100, size_max=2, alpha=0.5))
    assert taken(collected, 0) == ("ab", "full")
    collected.set_wait(100)
    assert collected.due_us() == 100
    collected.add(member("d", wait_us=60_000_000))
    collected.hurry()
    assert taken(collected, 0) == ("cd", "full")


# --- whatever comes -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What an engine would see: batches taken as soon as they are due and the engine is free."""

    limits: BatchLimits
    collected: StaticBatcher
    now_us: int = 0
    free_us: int = 0
    arrived: list[Member] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    started: list[tuple[int, int, Batch]] = field(default_factory=list)
    """Begin, end, batch."""

    def advance(self, until_us: int | None, durations: list[int]) -> None:
        """Let time pass; None: until nobody waits."""
        while (due_us := self.collected.due_us()) is not None:
            at_us = max(due_us, self.free_us, self.now_us)
            if until_us is not None and at_us > until_us:
                break
            batch = self.collected.take(at_us)
            assert batch is not None and batch.members, "due means due, and no batch is empty"
            self.free_us = at_us + durations[len(self.started) % len(durations)]
            self.started.append((at_us, self.free_us, batch))
            self.now_us = at_us
        if until_us is not None:
            self.now_us = until_us


limits_of = st.builds(
    BatchLimits,
    tokens_max=st.integers(8, 300),
    size_max=st.integers(1, 6),
    alpha=st.floats(0.3, 1.0),
)
arrivals_of = st.lists(
    st.tuples(
        st.integers(0, 8_000),  # since the one before
        st.integers(1, 120),  # prompt
        st.integers(1, 200),  # longest answer
        st.none() | st.integers(0, 30_000),  # own window
        st.none() | st.integers(0, 12),  # cancels the one so many places before it
    ),
    max_size=40,
)


@given(limits_of, arrivals_of, st.lists(st.integers(0, 40_000), min_size=1, max_size=5))
def test_bounds_order_waits_and_nobody_lost(
    limits: BatchLimits,
    arrivals: list[tuple[int, int, int, int | None, int | None]],
    durations: list[int],
) -> None:
    run = Run(limits, batcher(limits))
    for number, (gap_us, prompt, output, wait_us, cancels) in enumerate(arrivals):
        run.advance(run.now_us + gap_us, durations)
        if cancels is not None and cancels < number:
            key = str(number - 1 - cancels)
            if run.collected.remove(key):
                run.gone.add(key)
        one = member(str(number), prompt, output, at_us=run.now_us, wait_us=wait_us)
        run.arrived.append(one)
        run.collected.add(one)
    run.advance(None, durations)

    for began_us, _, batch in run.started:
        within = (
            len(batch.members) <= limits.size_max
            and batch.prompt_tokens + len(batch.members) <= limits.tokens_max
            and batch.estimated_cost(limits.alpha) <= limits.tokens_max
        )
        assert within or len(batch.members) == 1
        for one in batch.members:
            window_us = WINDOW_US if one.wait_us is None else one.wait_us
            busy_us = sum(
                max(0, min(end_us, began_us) - max(start_us, one.arrived_us))
                for start_us, end_us, _ in run.started
            )
            assert began_us - one.arrived_us <= window_us + busy_us
    ran = [one.key for _, _, batch in run.started for one in batch.members]
    assert ran == [one.key for one in run.arrived if one.key not in run.gone], "all, once, in order"
    assert len(run.collected) == 0


@given(limits_of, st.lists(st.tuples(st.integers(1, 120), st.integers(1, 200)), min_size=1, max_size=40))
def test_every_flush_has_the_reason_it_says(limits: BatchLimits, sizes: list[tuple[int, int]]) -> None:
    collected = batcher(limits)
    for number, (prompt, output) in enumerate(sizes):
        collected.add(member(str(number), prompt, output))
    batches: list[Batch] = []
    while (batch := collected.take(WINDOW_US)) is not None:
        batches.append(batch)
    nobody = Member(key="", prompt_tokens=1, output_tokens_max=1, arrived_us=0)
    for at, batch in enumerate(batches):
        following = batches[at + 1].members[0] if at + 1 < len(batches) else None
        match batch.reason:
            case "full":
                assert not could_join(batch, nobody, limits)
            case "does_not_fit":
                assert following is not None and not could_join(batch, following, limits)
                assert could_join(batch, nobody, limits)
            case _:
                assert following is None, "only the last one is still open"


@given(limits_of, limits_of, st.lists(st.tuples(st.integers(1, 120), st.integers(1, 200)), max_size=40))
def test_changed_bounds_lose_nobody(
    before: BatchLimits, after: BatchLimits, sizes: list[tuple[int, int]]
) -> None:
    members = [member(str(number), *size) for number, size in enumerate(sizes)]
    changed, fresh = batcher(before), batcher(after)
    for one in members:
        changed.add(one)
        fresh.add(one)
    changed.set_limits(after)
    while (expected := fresh.take(WINDOW_US)) is not None:
        assert changed.take(WINDOW_US) == expected, "as if they had always been so"
    assert len(changed) == 0


def could_join(batch: Batch, one: Member, limits: BatchLimits) -> bool:
    whole = Batch(members=[*batch.members, one])
    return (
        len(whole.members) <= limits.size_max
        and whole.prompt_tokens + len(whole.members) <= limits.tokens_max
        and whole.estimated_cost(limits.alpha) <= limits.tokens_max
    )


# --- what a latency_sla waits ----------------------------------------------------------------------------------


def test_presets() -> None:
    def wait(sla: LatencySla) -> float | None:
        return batch_wait_ms(sla, interactive_wait_ms=8.0, offline_wait_ms=60.0)

    assert (wait("low"), wait("normal"), wait("throughput")) == (2.0, None, 60.0)


@pytest.mark.parametrize(("interactive_ms", "offline_ms"), [(0.0, 50.0), (1.0, 0.0), (300.0, 50.0)])
def test_a_more_urgent_preset_never_waits_longer(interactive_ms: float, offline_ms: float) -> None:
    low, normal, throughput = (
        batch_wait_ms(sla, interactive_wait_ms=interactive_ms, offline_wait_ms=offline_ms)
        for sla in ("low", "normal", "throughput")
    )
    assert normal is None, "the model's"
    assert low is not None and throughput is not None
    assert low <= interactive_ms <= throughput


def test_the_default_of_the_offline_preset_is_in_its_range() -> None:
    assert 20 <= EngineSettings().offline_batch_wait_ms <= 100
