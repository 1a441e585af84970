"""The state machine of admission over the fair queue: the same histories, the same invariants."""

from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from headrace.admission.controller import AdmissionController
from headrace.admission.entry import Entry, Phase
from headrace.scheduling.dispatch import QueueBounds
from headrace.scheduling.fair import FairQueue
from headrace.scheduling.policy import POLICIES, Demand, PolicyName, QueuePolicy
from tests.admission.test_controller import ControllerMachine


def describe(entry: Entry) -> Demand:
    return Demand(
        prompt_tokens=entry.held,
        expected_output_tokens=entry.held // 3,
        service_class="batch" if entry.tenant_id == "c" else "interactive",
        gate=entry.is_stream,
    )


class FairController(AdmissionController):
    """All that has to be added for the fair queue: a granted request is settled before its place is free."""

    def _leave(self, entry: Entry, phase: Phase) -> None:
        queue: FairQueue[Entry] = self.queues[entry.model_id]  # type: ignore[assignment]
        queue.settle(entry, output_tokens=entry.held // 4)
        super()._leave(entry, phase)


class FairControllerMachine(ControllerMachine):
    @initialize(
        tpm=st.integers(20, 200),
        concurrency=st.none() | st.integers(0, 3),
        length=st.integers(0, 4),
        capacity=st.integers(1, 3),
    )
    def begin(self, tpm: int, concurrency: int | None, length: int, capacity: int) -> None:
        name: PolicyName = POLICIES[tpm % len(POLICIES)]

        def make(bounds: QueueBounds, *, is_taking_turns: bool) -> FairQueue[Entry]:
            return FairQueue(bounds, QueuePolicy(name=name), describe=describe)

        with (
            mock.patch("headrace.admission.controller.ModelQueue", make),
            mock.patch("tests.admission.test_controller.AdmissionController", FairController),
        ):
            super().begin(tpm, concurrency, length, capacity)

    @invariant()
    def waiting_requests_are_explained(self) -> None:
        for entry in getattr(self, "open", []):
            explanation = self.desk.queue.explain(entry)
            assert (explanation is not None) == (entry.phase is Phase.WAITING)

    @invariant()
    def nothing_is_kept_of_what_has_ended(self) -> None:
        if hasattr(self, "desk"):
            queue: FairQueue[Entry] = self.desk.queue  # type: ignore[assignment]
            assert {job.ticket for job in queue._grants} == set(self.granted())
            assert {*queue._jobs} == {entry for entry in self.open if entry.phase is not Phase.DROPPED}


FairControllerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFairControllerMachine = FairControllerMachine.TestCase
