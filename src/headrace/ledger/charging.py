"""What an operation is charged: what it used, less what its ending forgives.

A completed operation is charged what the engine counted. What any other ending costs is a policy
(`ledger.abort_policy`), and the policy in force stands on the row.
"""

from typing import Final

import msgspec

from headrace.ledger.records import AbortPolicy, OperationRecord, Outcome

OUR_FAULTS: Final[frozenset[Outcome]] = frozenset(
    {
        "worker_lost",
        "worker_error",
        "upstream_error",
        "timeout",
        "shutdown",
        "recovered",
        "expired",
        "late",  # was `expired` before it became known
    }
)
"""Endings that `free_on_error` does not charge. A client that left and a refusal are not among them."""

NOT_CHARGED: Final = (0, 0)


def charge(
    policy: AbortPolicy,
    outcome: Outcome,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    delivered_tokens: int | None,
) -> tuple[int, int]:
    """Tokens charged, of the prompt and of the answer.

    `prompt_tokens` and `completion_tokens` are the engine's, `delivered_tokens` those of the answer that the
    client's connection got; None where nobody knows, which `delivered` takes for none.
    """
    used = (prompt_tokens, completion_tokens)
    if outcome == "completed":
        return used
    match policy:
        case "generated":
            return used
        case "delivered":
            return (
                (prompt_tokens, min(delivered_tokens, completion_tokens)) if delivered_tokens else NOT_CHARGED
            )
        case "free_on_error":
            return NOT_CHARGED if outcome in OUR_FAULTS else used


def without_charge(record: OperationRecord) -> OperationRecord:
    """The row of an operation once it is refunded."""
    return msgspec.structs.replace(
        record, charged_prompt_tokens=0, charged_completion_tokens=0, refunded=True
    )
