"""One run: arrivals against a simulated fleet, decided by the production admission and queue."""

import heapq
import random
from collections.abc import Sequence

from headrace.admission.applicant import Applicant
from headrace.admission.controller import AdmissionController
from headrace.admission.entry import Entry, Phase
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.locality import Warmth
from headrace.scheduling.policy import Demand
from headrace.scheduling.queue_bounds import QueueBounds, QueueFull
from headrace.simulate import engine as engines
from headrace.simulate.engine import Engine
from headrace.simulate.outcome import Outcome, Served, Setup
from headrace.simulate.workload import Arrival

MODEL = "model"
LEASE_US = 10**15
"""Nobody dies here."""
_NEVER_US = 10**17


class Fleet:
    """The parts of a run."""

    def __init__(self, setup: Setup, arrivals: Sequence[Arrival]) -> None:
        self._setup = setup
        self._arrivals = arrivals
        self._served = [Served() for _ in arrivals]
        self._draw = random.Random(setup.seed)  # noqa: S311 - the same run for the same seed
        self._engines = {
            f"worker-{number}": Engine(f"worker-{number}", setup.engine) for number in range(setup.workers)
        }
        self._controller = AdmissionController(lease_us=LEASE_US)
        self._queue = self._make_queue()
        self._ready: list[tuple[float, str]] = []
        """A heap of the engines that compute, by when their round ends."""
        self._rounds: dict[str, tuple[list[engines.Sequence], list[engines.Sequence]]] = {}
        """What will have begun and ended in each one's round."""
        self._next_arrival_us = 0
        self._entries: dict[int, Entry] = {}
        self._stopped: dict[int, tuple[engines.Sequence, int]] = {}
        """Those that were stopped for others and wait again, and since when."""

    def _make_queue(self) -> FairQueue[Entry]:
        setup, model = self._setup, self._setup.engine
        many = setup.queue_length * 1_000_000
        bounds = QueueBounds(
            length=setup.queue_length, tokens=many, tenant_length=setup.queue_length, tenant_tokens=many
        )
        queue: FairQueue[Entry] = FairQueue(
            bounds,
            setup.policy,
            describe=self._describe,
            fits=self._fits if model.has_lookahead else None,
            warm_on=self._warm_on if model.cache_blocks != 0 else None,
        )
        for name in self._engines:
            queue.add(name, capacity=model.slots, kv_tokens=None if model.has_lookahead else model.kv_tokens)
        self._controller.add_model(MODEL, queue)
        return queue

    def run(self) -> Outcome:
        """Until everybody is served."""
        arrivals = self._arrivals
        place, count = 0, len(arrivals)
        while place < count or self._ready:
            next_us = arrivals[place].arrival_us if place < count else _NEVER_US
            self._next_arrival_us = next_us
            if self._ready and self._ready[0][0] < next_us:
                self._end_round()
                continue
            while place < count and arrivals[place].arrival_us <= next_us:
                self._accept(place)
                place += 1
            self._next_arrival_us = arrivals[place].arrival_us if place < count else _NEVER_US
            self._dispatch(next_us)
        return self._outcome()

    def _accept(self, number: int) -> None:
        arrival = self._arrivals[number]
        applicant = Applicant(
            request_id=str(number),
            tenant_id=arrival.tenant,
            model_id=MODEL,
            accounts=(),
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.output_tokens,
            default_max_tokens=arrival.output_tokens,
            context_tokens=None,
            is_stream=True,
            is_exact=True,
            can_be_counted=True,
        )
        self._queue.advance(arrival.arrival_us)
        try:
            admitted = self._controller.accept(applicant, arrival.arrival_us)
        except QueueFull:
            self._served[number].is_refused = True
            return
        for evicted in admitted.evicted:
            self._served[int(evicted.request_id)].is_refused = True
            self._controller.settle(evicted, used=0, now_us=arrival.arrival_us)
            del self._entries[int(evicted.request_id)]
            self._stopped.pop(int(evicted.request_id), None)
        self._entries[number] = admitted.entry

    def _dispatch(self, now_us: int) -> None:
        self._queue.advance(now_us)
        idle: list[Engine] = []
        for entry in self._controller.dispatch(MODEL, now_us):
            number = int(entry.request_id)
            assert entry.replica_id is not None
            engine = self._engines[entry.replica_id]
            if number in self._stopped:
                sequence, since_us = self._stopped.pop(number)
            else:
                arrival = self._arrivals[number]
                sequence, since_us = engines.Sequence(number, arrival), arrival.arrival_us
            if engine.is_idle and engine.replica_id not in self._rounds:
                idle.append(engine)
            engine.start(sequence, now_us)
            served = self._served[number]
            if not served.num_preemptions:
                served.granted_us, served.cached_tokens = now_us, sequence.cached_tokens
            served.replica = entry.replica_id
            served.waited_us += now_us - since_us
        for engine in idle:
            self._begin_round(engine)

    def _begin_round(self, engine: Engine) -> None:
        """Compute up to the next thing that happens elsewhere. What comes of it is known when it is over."""
        until_us = float(self._next_arrival_us)
        if self._ready:
            until_us = min(until_us, self._ready[0][0])
        self._rounds[engine.replica_id] = engine.run(max(until_us, engine.now_us + 1))
        heapq.heappush(self._ready, (engine.now_us, engine.replica_id))

    def _end_round(self) -> None:
        """The round that ends first is over: what ended makes room for others, here and now."""
        _, name = heapq.heappop(self._ready)
        engine = self._engines[name]
        begun, ended = self._rounds.pop(name)
        now_us = round(engine.now_us)
        for sequence in begun:
            self._served[sequence.number].first_us = sequence.first_us
            if self._setup.policy.long_prompt_tokens is not None or self._setup.engine.cache_blocks != 0:
                self._queue.progress(self._entries[sequence.number], sequence.done_tokens + 1)
        for sequence in ended:
            self._finish(sequence, now_us)
        if self._setup.prediction == "none":
            for sequence in engine.decoding():
                self._queue.progress(self._entries[sequence.number], sequence.output_tokens(engine.steps))
        # Before its next round, so that newcomers are in it.
        if ended or begun or self._setup.engine.has_lookahead:
            self._dispatch(now_us)
        if self._setup.has_preemption and self._queue.num_waiting:
            self._preempt(engine, now_us)
        if not engine.is_idle and name not in self._rounds:
            self._begin_round(engine)

    def _preempt(self, engine: Engine, now_us: int) -> None:
        """Stop what the queue names, as long as it is on this engine, which is between two steps."""
        while engine.replica_id not in self._rounds:
            wanted = self._controller.wants_preemption(MODEL)
            if wanted is None or wanted[0].replica_id != engine.replica_id:
                return
            victim, favoured = wanted
            sequence = engine.stop(int(victim.request_id))
            served = self._served[sequence.number]
            served.num_preemptions += 1
            served.lost_tokens = sequence.lost_tokens
            self._stopped[sequence.number] = (sequence, now_us)
            victim.move(Phase.WAITING)
            victim.replica_id = None
            self._queue.preempted(
                victim,
                engine.replica_id,
                tokens=victim.held,
                output_tokens=sequence.done_tokens,
                in_favour_of=favoured,
            )
            self._dispatch(now_us)

    def _finish(self, sequence: engines.Sequence, now_us: int) -> None:
        arrival = sequence.arrival
        self._served[sequence.number].last_us = sequence.last_us
        entry = self._entries.pop(sequence.number)
        self._queue.settle(entry, output_tokens=arrival.output_tokens, cached_tokens=sequence.cached_tokens)
        self._controller.settle(entry, used=arrival.prompt_tokens + arrival.output_tokens, now_us=now_us)

    def _describe(self, entry: Entry) -> Demand:
        arrival = self._arrivals[int(entry.request_id)]
        expected = arrival.expected_output_tokens
        if expected is None:
            expected = self._predict(arrival.output_tokens)
        self._served[int(entry.request_id)].expected_output_tokens = expected
        return Demand(
            prompt_tokens=arrival.prompt_tokens,
            expected_output_tokens=expected,
            cached_tokens=arrival.cached_tokens,
            weight=arrival.weight,
            service_class=arrival.service_class,
            priority=arrival.priority,
            gate=True,
        )

    def _predict(self, output_tokens: int) -> int:
        if self._setup.prediction == "half":
            return round(output_tokens * self._draw.uniform(0.5, 1.5))
        return 0 if self._setup.prediction == "none" else output_tokens

    def _fits(self, entry: Entry, replica_id: str) -> bool:
        engine = self._engines[replica_id]
        return engine.is_idle or engine.fits(self._arrivals[int(entry.request_id)])

    def _warm_on(self, entry: Entry) -> Warmth | None:
        arrival = self._arrivals[int(entry.request_id)]
        found = {name: engine.match(arrival) for name, engine in self._engines.items()}
        return Warmth(found) if any(found.values()) else None

    def _outcome(self) -> Outcome:
        all_engines = list(self._engines.values())
        end_us = max((served.last_us for served in self._served), default=0)
        time_us = max(end_us, 1) * len(all_engines)
        return Outcome(
            setup=self._setup,
            arrivals=self._arrivals,
            served=self._served,
            end_us=end_us,
            busy_share=min(sum(engine.busy_us for engine in all_engines) / time_us, 1.0),
            slot_share=sum(engine.slot_us for engine in all_engines) / (time_us * self._setup.engine.slots),
        )


def simulate(setup: Setup, arrivals: Sequence[Arrival]) -> Outcome:
    """Serve all arrivals (in order of their times) with this fleet. The same arguments, the same outcome."""
    return Fleet(setup, arrivals).run()
