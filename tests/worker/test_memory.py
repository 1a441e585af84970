"""A worker with fewer KV cells than its slots could hold: who waits, who leaves, who goes on, and what is told of it."""

from pathlib import Path
from typing import Any

import pytest

from headrace.bounds import TENANT_LABELS_MAX
from headrace.caching.slots import CacheOrder
from headrace.engine.protocol import Span
from headrace.request.controls import Controls
from headrace.request.sampling import Sampling
from headrace.scheduling.memory import QUIET_STEPS
from headrace.worker.parking import Parking
from headrace.worker.sequence import Sequence
from headrace.worker.slots import EngineSlots
from tests.worker.test_loop import Bench as LoopBench

OFF = CacheOrder(mode="off")


class Bench(LoopBench):
    def __init__(
        self, directory: Path, *, kv_tokens: int | None, layout: str = "per_sequence", **options: Any
    ):
        options.setdefault("batch_tokens", 200)
        options.setdefault("output_tokens", 10_000)
        engine = {"kv_tokens": kv_tokens, "kv_layout": layout, **options.pop("engine", {})}
        super().__init__(directory, engine=engine, **options)
        self.order: list[str] = []

    def begin(self, name: str, *, prompt: int, answer: int, tenant: str = "t", **options: Any) -> Sequence:
        first = sum(name.encode())
        sequence = Sequence(
            attempt_id=name,
            tenant_id=tenant,
            connection_id=1,
            prompt=options.pop("tokens", None) or [(first + number) % 250 for number in range(prompt)],
            max_tokens=answer,
            sampling=Sampling(seed=first),
            stop=[],
            arrived_us=self.clock.monotonic_us(),
            order=options.pop("order", OFF),
            **options,
        )
        self.loop.submit(sequence)
        return sequence

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def preemptions(self, reason: str = "memory") -> float | None:
        return self.metric("headrace_worker_preemptions_total", reason=reason)


LAYOUTS = pytest.mark.parametrize("layout", ["per_sequence", "unified"])


@LAYOUTS
def test_a_newcomer_waits_until_its_prompt_and_some_growth_fit(tmp_path: Path, layout: str) -> None:
    bench = Bench(tmp_path, kv_tokens=200, layout=layout)
    first = bench.begin("first", prompt=100, answer=20)
    large = bench.begin("large", prompt=90, answer=20)
    small = bench.begin("small", prompt=10, answer=5)
    bench.steps(10)
    assert (first.slot, large.slot) == (0, -1)
    assert small.slot == -1, "nobody overtakes: the large one would wait for ever"
    bench.run_dry()
    assert [one.preemptions for one in (first, large, small)] == [0, 0, 0]
    assert large.started_ts == small.started_ts > first.started_ts


@LAYOUTS
@pytest.mark.parametrize("mode", ["off", "full"])
def test_who_grows_beyond_what_is_there_leaves_and_goes_on_with_the_same_answer(
    tmp_path: Path, layout: str, mode: Any
) -> None:
    roomy = Bench(tmp_path, kv_tokens=None)
    bench = Bench(tmp_path, kv_tokens=256, layout=layout)
    for one in (roomy, bench):
        for number in range(4):
            one.begin(f"a{number}", prompt=40, answer=90 + number, order=CacheOrder(mode=mode))
        one.run_dry()
    assert bench.texts == roomy.texts
    assert {name: record.completion_tokens for name, record in bench.records.items()} == {
        f"a{number}": 90 + number for number in range(4)
    }
    assert bench.preemptions() == sum(record.preemptions for record in bench.records.values()) > 0
    recomputed = sum(record.recomputed_tokens for record in bench.records.values())
    assert bench.metric("headrace_worker_recomputed_tokens_total") == recomputed
    if mode == "off":
        assert recomputed > 40
    assert bench.records["a0"].preemptions == 0, "the oldest stays"
    assert bench.preemptions("queue") == 0
    assert roomy.preemptions() == 0


def test_a_preempted_one_goes_on_before_newcomers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=256)
    bench.begin("old", prompt=100, answer=60)
    young = bench.begin("young", prompt=100, answer=60)
    while not young.preemptions:
        bench.loop.step()
    assert young.slot < 0
    bench.begin("new", prompt=5, answer=2)
    bench.run_dry()
    assert list(bench.records) == ["old", "young", "new"], (
        "one at a time, until it has been quiet for a while"
    )


def test_the_tenant_that_holds_most_gives_way(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=250)
    bench.begin("modest", prompt=30, answer=80, tenant="modest")
    hogs = [bench.begin(f"hog{number}", prompt=60, answer=60, tenant="hog") for number in range(2)]
    late = bench.begin("late", prompt=20, answer=40, tenant="late")
    bench.run_dry()
    assert [one.preemptions > 0 for one in (*hogs, late)] == [False, True, False]


def test_preempted_twice_over_they_go_on_in_their_old_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=220)
    bench.begin("a", prompt=60, answer=120)
    b, c = (bench.begin(name, prompt=40, answer=120) for name in "bc")
    while not (b.preemptions and c.preemptions):
        bench.loop.step()
    assert [one.attempt_id for one in bench.loop._waiting] == ["b", "c"]
    bench.run_dry()
    assert list(bench.records) == ["a", "b", "c"]


def test_kept_prefixes_go_before_anybody_is_preempted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=256)
    for name in ("k1", "k2"):
        bench.begin(name, prompt=64, answer=2, order=CacheOrder())
        bench.run_dry()
    assert bench.metric("kv_cache_cells", state="kept") == 2 * 65
    one = bench.begin("one", prompt=150, answer=60)
    bench.steps(2)
    assert bench.metric("kv_cache_evictions_total", reason="pressure") == 1
    assert bench.metric("kv_cache_cells", state="kept") == 65
    bench.run_dry()
    assert bench.metric("kv_cache_evictions_total", reason="pressure") == 2
    assert (one.preemptions, bench.metric("kv_cache_cells", state="kept")) == (0, 0)


def test_the_owners_preemption_and_abort_reach_one_that_waits_for_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=256)
    bench.begin("old", prompt=100, answer=60)
    young = bench.begin("young", prompt=100, answer=60)
    while not young.preemptions:
        bench.loop.step()
    bench.loop.preempt("young")
    bench.run_dry()
    assert (bench.loop.num_suspended, list(bench.records)) == (1, ["old"])
    assert young.preemptions == 1, "it had no slot to lose"
    bench.loop.resume("young")
    bench.steps(2)
    bench.loop.abort("young")
    bench.steps(1)
    assert bench.records["young"].finish_reason == "aborted"


def test_the_worker_runs_fewer_at_once_and_slowly_more_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=256)
    assert bench.loop._memory.running_max == 4
    for number in range(4):
        bench.begin(f"a{number}", prompt=30, answer=60)
    bench.steps(1)
    assert bench.loop.num_running == 4
    while not bench.preemptions():
        bench.loop.step()
    assert bench.metric("headrace_worker_running_max") == bench.loop.num_running == 3
    while "a0" not in bench.records:
        bench.loop.step()
        assert bench.loop.num_running <= bench.loop._memory.running_max
    bench.run_dry()
    bench.begin("quiet", prompt=10, answer=QUIET_STEPS * 2)
    bench.run_dry()
    assert bench.metric("headrace_worker_running_max") == 4


def test_the_worker_settles_instead_of_thrashing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=256)
    for number in range(40):
        bench.begin(f"a{number}", prompt=20, answer=100)
    bench.run_dry()
    assert len(bench.records) == 40
    wasted = sum(record.recomputed_tokens for record in bench.records.values())
    useful = 40 * 120
    assert wasted < useful / 4, "most of what is computed counts"


def test_controls_hold_beside_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=256)
    bench.loop.adjust(Controls(max_batch_size=2))
    for number in range(3):
        bench.begin(f"a{number}", prompt=10, answer=10)
    bench.steps(2)
    assert (bench.loop.num_running, bench.metric("headrace_worker_running_max")) == (2, 2)
    bench.run_dry()


def test_a_static_batch_gives_way_too(tmp_path: Path) -> None:
    engine = {"batching": "static", "batch_cost_alpha": 0.3}
    bench = Bench(tmp_path, kv_tokens=150, engine=engine)
    for number in range(3):
        bench.begin(f"a{number}", prompt=20, answer=90)
    bench.run_dry()
    assert bench.preemptions()
    assert {record.completion_tokens for record in bench.records.values()} == {90}


def test_one_that_could_never_end_is_not_begun(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=100)
    bench.begin("most", prompt=60, answer=41)
    bench.begin("more", prompt=60, answer=42)
    bench.run_dry()
    assert bench.records["most"].completion_tokens == 41
    assert bench.records["more"].finish_reason == "error"
    assert "more KV memory than this worker has" in (bench.records["more"].error or "")


def test_running_sequences_share_a_beginning_in_a_pool(tmp_path: Path) -> None:
    """Eight of them need 100 cells together and 20 each: only where they share them all can run."""
    tokens = [number % 250 for number in range(96)]
    started: dict[str, int] = {}
    for layout in ("per_sequence", "unified"):
        bench = Bench(tmp_path, kv_tokens=256, sequences=8, layout=layout)
        for number in range(8):
            bench.begin(
                f"a{number}", prompt=0, tokens=[*tokens, number], answer=4, order=CacheOrder(ttl_s=1.0)
            )
        bench.steps(3)
        started[layout] = bench.loop.num_running
        bench.run_dry()
        assert len(bench.records) == 8
    assert started == {"per_sequence": 2, "unified": 8}


def test_metrics_say_who_holds_what(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=512, sequences=4)
    assert bench.metric("kv_cache_fragmentation") == 0
    bench.begin("a", prompt=64, answer=3, tenant="acme", order=CacheOrder())
    bench.run_dry()
    bench.begin("b", prompt=40, answer=10, tenant="beta")
    bench.steps(2)
    assert [bench.metric("kv_cache_cells", state=state) for state in ("running", "kept", "free")] == [
        41,
        66,
        512 - 107,
    ]
    assert bench.metric("kv_cache_tenant_tokens", tenant="acme") == 66
    assert bench.metric("kv_cache_tenant_tokens", tenant="beta") == 40, "when it came"
    assert bench.metric("kv_cache_fragmentation") == pytest.approx(1 - 107 / 512)
    bench.run_dry()
    bench.loop.step()
    assert bench.metric("kv_cache_tenant_tokens", tenant="beta") is None, (
        "labels are for those that hold something"
    )
    assert bench.metric("kv_cache_cells", state="running") == 0


def test_a_pool_with_holes_is_fragmented(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=400, layout="unified")
    for name, answer in (("short", 2), ("long", 60)):
        bench.begin(name, prompt=50, answer=answer)
    bench.steps(4)
    assert bench.metric("kv_cache_fragmentation") == pytest.approx(50 / (400 - 52), abs=0.02)
    bench.run_dry()


def test_tenant_labels_are_bounded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, kv_tokens=None, sequences=1)
    stats = bench.loop._stats.memory
    stats.tenants_hold({f"t{number}": 1 for number in range(TENANT_LABELS_MAX + 5)})
    assert bench.metric("kv_cache_tenant_tokens", tenant="other") == 5
    stats.tenants_hold({f"t{number}": 2 for number in range(50, TENANT_LABELS_MAX + 5)})
    assert bench.metric("kv_cache_tenant_tokens", tenant="other") is None
    assert bench.metric("kv_cache_tenant_tokens", tenant=f"t{TENANT_LABELS_MAX + 4}") == 2


@pytest.mark.parametrize("harm", ["engine", "books", "sequence"])
def test_the_check_finds_books_that_are_wrong(tmp_path: Path, harm: str) -> None:
    bench = Bench(tmp_path, kv_tokens=256)
    one = bench.begin("a", prompt=40, answer=20)
    bench.steps(3)
    match harm:
        case "engine":
            bench.engine._slots[2].take([1, 2, 3])
        case "books":
            bench.loop._slots.cells.grew(3, 1)
        case "sequence":
            one.held -= 1
    with pytest.raises(AssertionError):
        bench.loop._memory.check(bench.loop._running())


def test_a_chosen_state_may_be_pushed_out_by_the_one_put_aside_for_it(tmp_path: Path) -> None:
    """A tenant's marked prefix lies in a file, and a longer prompt with the same beginning in the only slot. A newcomer of
    the same group may take the first only; what leaves the slot for it replaces that file.
    """
    bench = Bench(tmp_path, kv_tokens=None, sequences=1)
    parking = Parking(tmp_path / "kv", state_key="stub", bytes_max=1 << 20)
    slots = EngineSlots(bench.engine, clock=bench.clock, stats=bench.loop._stats, parking=parking)

    def run(name: str, tokens: list[int], **options: Any) -> int:
        one = bench.begin(name, prompt=0, tokens=tokens, answer=1, **options)
        assert slots.open(one)
        slots.forward([Span(one.slot, one.held, tokens[one.held :], False)])
        one.grew(len(tokens) - one.held, now_us=0)
        slots.computed(one)
        slots.close(one, is_sound=True)
        return one.cached

    head, shared = list(range(64)), CacheOrder(group="g")
    run("marked", head, tenant="owner", order=shared, cacheable=64)
    run("noise", list(range(150, 200)), tenant="noise")
    assert run("longer", [*head, *range(100, 190)], tenant="owner", order=CacheOrder()) == 64
    assert run("taker", [*head, 7, 8], tenant="other", order=shared) == 64
