"""What a request brings along, and what it wants to take of every limit at a given size."""

import msgspec

from headrace.admission.size import Size, clamped, shortened
from headrace.limits import memory_book
from headrace.limits.account import Account
from headrace.limits.book import Ask, Excess
from headrace.limits.memory import NO_MEMORY, MemoryRate
from headrace.scheduling.policy import Demand


class Applicant(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request brings along."""

    request_id: str
    tenant_id: str
    model_id: str
    accounts: tuple[Account, ...]
    """Every account it falls under."""
    prompt_tokens: int
    """Exact, or an upper bound."""
    max_tokens: int | None
    default_max_tokens: int
    context_tokens: int | None
    """Most tokens of prompt and answer together; None where it is not known."""
    is_stream: bool
    is_exact: bool
    """Whether `prompt_tokens` is counted, or all that can be known."""
    can_be_counted: bool
    """Whether a replica of the model can count a prompt."""
    is_final: bool = False
    """Do not ask for the counts of others any more."""
    may_be_shortened: bool = False
    """Rather a shorter answer than a refusal."""
    demand: Demand | None = None
    """What the queue decides by."""
    is_dedicated: bool = False
    """It runs on replicas set aside for its tenant, where there are such."""
    memory_rate: MemoryRate = NO_MEMORY
    output_tokens: int | None = None
    """So long an answer is predicted, at most; None: the longest that is allowed."""
    is_throttled: bool = False
    """One of its accounts was refused memory not long ago: it waits for memory, and is not refused for it."""


def ask_of(applicant: Applicant, size: Size) -> Ask:
    prompt, total, output, rate = applicant.prompt_tokens, size.total, size.maximum, applicant.memory_rate
    predicted = applicant.output_tokens
    if predicted is not None and predicted < output:
        output = predicted
    tokens = prompt + output
    return Ask(
        prompt_tokens=prompt,
        total_tokens=total,
        is_stream=applicant.is_stream,
        output_tokens=output,
        # `rate.bytes_of`, written out: this is on every request's way.
        memory=rate.base + rate.per_token * (tokens if tokens < total else total),
        waits_for_memory=applicant.is_throttled,
    )


def account_of(applicant: Applicant, excess: Excess) -> Account:
    """The one whose limit was exceeded."""
    (account,) = (
        one for one in applicant.accounts if (one.level, one.account_id) == (excess.level, excess.account_id)
    )
    return account


def is_too_large_for_memory(excess: Excess) -> bool:
    return excess.limit_type == "memory" and excess.free_at_us is None


def clamped_to_memory(applicant: Applicant, size: Size) -> Size | None:
    """With the longest answer that every limit of memory allows at all, where the client set no maximum."""
    limit = memory_book.smallest_limit(applicant.accounts)
    assert limit is not None
    room = applicant.memory_rate.tokens_in(limit)
    return clamped(size, prompt_tokens=applicant.prompt_tokens, room=room)


def shortened_to_fit(applicant: Applicant, size: Size, room: int | None) -> Size | None:
    """With the longest answer for which there are tokens (`room`) and memory now."""
    rooms = [] if room is None else [room]
    find = memory_book.smallest_limit if applicant.is_throttled else memory_book.left
    memory = find(applicant.accounts)
    if memory is not None:
        rooms.append(applicant.memory_rate.tokens_in(memory))
    return shortened(size, prompt_tokens=applicant.prompt_tokens, room=min(rooms)) if rooms else None
