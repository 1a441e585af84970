"""The state machine of admission under every policy of the queue: the same histories, the same invariants."""

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from headrace.admission.entry import Phase
from headrace.scheduling.policy import POLICIES, Demand, PolicyName, QueuePolicy
from tests.admission.test_controller import ControllerMachine
from tests.scheduling import oracle


class DemandingMachine(ControllerMachine):
    """Requests of all classes and weights, expected to write more or less than they do."""

    def demand(self, tenant: str, prompt: int, is_stream: bool) -> Demand:
        return Demand(
            prompt_tokens=prompt,
            expected_output_tokens=prompt // 3,
            weight=2.0 if tenant == "a" else 1.0,
            service_class="batch" if tenant == "c" else "interactive",
            priority=prompt % 3,
            gate=is_stream,
        )

    @invariant()
    def waiting_requests_are_explained(self) -> None:
        for entry in getattr(self, "open", []):
            explanation = oracle.explain(self.desk.queue, entry)
            assert (explanation is not None) == (entry.phase is Phase.WAITING)

    @invariant()
    def nothing_is_kept_of_what_has_ended(self) -> None:
        if hasattr(self, "desk"):
            queue = self.desk.queue
            assert {job.ticket for job in queue._grants} == set(self.granted())
            assert {*queue._jobs} == {entry for entry in self.open if entry.phase is not Phase.DROPPED}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy(name: PolicyName) -> None:
    class Machine(DemandingMachine):
        policy = QueuePolicy(name=name)

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=50, stateful_step_count=40, deadline=None)
    )
