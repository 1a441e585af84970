"""What the journal says of one operation that has ended, and the row that this amounts to."""

from typing import Final

import msgspec

from headrace.ledger.charging import without_charge
from headrace.ledger.records import OperationRecord, Refund, Reservation

TOKENS_MAX: Final = 2**53
"""What every reader of the ledger can represent exactly. No sum of real operations comes near."""


class History(msgspec.Struct):
    """The journal's entries of one operation. Corrections are added; what stood before stays."""

    reservation: Reservation | None
    """None for a refusal that held nothing."""
    record: OperationRecord
    """As it was settled, voided, expired or refused."""
    late: OperationRecord | None = None
    refund: Refund | None = None

    @property
    def row(self) -> OperationRecord:
        """The present state: the one row in `operations`. A refund holds for what is settled late, too."""
        row = self.record if self.late is None else self.late
        return row if self.refund is None else without_charge(row)


def flaw_of(record: OperationRecord) -> str | None:
    """Why this record may not enter the ledger, or None: no negative numbers, no charge above the use."""
    if (
        0 <= record.charged_prompt_tokens <= record.prompt_tokens <= TOKENS_MAX
        and 0 <= record.charged_completion_tokens <= record.completion_tokens <= TOKENS_MAX
        and record.prompt_tokens_cached >= 0
        and record.delivered_tokens >= 0
        and record.num_requests >= 1
    ):
        return None
    return (
        f"{record.request_id} has tokens or charges out of range: {record.prompt_tokens} prompt"
        f" ({record.prompt_tokens_cached} cached), {record.completion_tokens} completion,"
        f" {record.delivered_tokens} delivered, charged {record.charged_prompt_tokens}"
        f" and {record.charged_completion_tokens}, {record.num_requests} requests"
    )


def flaw_of_reservation(reservation: Reservation) -> str | None:
    """Why this reservation may not enter the ledger, or None."""
    if 0 <= reservation.reserved_tokens <= TOKENS_MAX and reservation.prompt_tokens_estimated >= 0:
        return None
    return f"{reservation.request_id} reserves {reservation.reserved_tokens} tokens"
