"""What a request asks of its queue: the tenant's part in it, what the client wishes, and what is expected."""

from typing import TYPE_CHECKING

from headrace.admission.controller import Took
from headrace.config.scheduling import Sharing
from headrace.core.served_model import ServedModel
from headrace.ledger.records import OperationRecord, Reservation
from headrace.limits.account import Account
from headrace.scheduling.policy import Demand

if TYPE_CHECKING:
    from headrace.core.operation import Operation

SHARED_FLOW = "@shared"
"""The one queue of all tenants that share one. No tenant can be called so."""


THROTTLED_SHARE = 0.5
"""What is left of its weight to a caller that was refused for memory, for a while."""


def flow_of(tenant_id: str, sharing: Sharing, *, is_throttled: bool) -> str:
    """Whose counter a tenant's requests are charged to. Who is throttled shares it with nobody."""
    return SHARED_FLOW if sharing.isolation == "shared" and not is_throttled else tenant_id


def weight_of(sharing: Sharing, *, is_throttled: bool) -> float:
    """What divides the cost of its requests. All who share a queue have the weight of one."""
    weight = 1.0 if sharing.isolation == "shared" else sharing.weight
    return weight * THROTTLED_SHARE if is_throttled else weight


def demand_of(
    model: ServedModel,
    reservation: Reservation,
    sharing: Sharing,
    accounts: tuple[Account, ...],
    *,
    maximum: int,
    priority: int,
    is_exact: bool,
    is_throttled: bool,
) -> Demand:
    """`maximum`: most tokens of the answer; `priority`: what the client asked for."""
    prompt_tokens = reservation.prompt_tokens_estimated
    if not is_exact:
        prompt_tokens = model.expectations.prompt_tokens(prompt_tokens)
    return Demand(
        prompt_tokens=prompt_tokens,
        expected_output_tokens=model.expectations.output_tokens(reservation.tenant_id, maximum),
        weight=weight_of(sharing, is_throttled=is_throttled),
        service_class=reservation.priority,
        priority=min(priority, sharing.priority_max),
        # Requests of one caller may start or may not, all alike. Where its memory is limited, a smaller one might where
        # a larger one before it may not; it stays behind that one, or the large one would wait for ever.
        gate=(accounts, reservation.mode),
        flow=SHARED_FLOW if sharing.isolation == "shared" and not is_throttled else None,
    )


def took(record: OperationRecord) -> Took:
    """What an operation took of its replica, by its final record."""
    return Took(
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.prompt_tokens_cached,
        output_tokens=record.completion_tokens,
    )


def count_service(operation: "Operation", record: OperationRecord) -> None:
    """Count what its tenant got of the model with it."""
    if record.prompt_tokens or record.completion_tokens:
        model = operation.model
        cost = model.queue.policy.prices.cost(
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.prompt_tokens_cached,
            output_tokens=record.completion_tokens,
        )
        model.service.settled(operation.entry.flow, cost)


def learn(model: ServedModel, reservation: Reservation, record: OperationRecord) -> None:
    """Expect more of the same."""
    if record.outcome == "completed":
        if reservation.prompt_tokens_estimated > record.prompt_tokens:  # else it had been counted
            model.expectations.counted(reservation.prompt_tokens_estimated, record.prompt_tokens)
        model.expectations.answered(reservation.tenant_id, record.completion_tokens)
    elif record.completion_tokens:
        model.expectations.broken_off(reservation.tenant_id, record.completion_tokens)
