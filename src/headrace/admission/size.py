"""How large a request may become: what is held for it, and the maximum that makes it enough."""

from typing import Final

import msgspec

SHORTENED_TOKENS_MIN: Final = 16
"""An answer is not shortened to less than this: it would be of no use, and still be paid for."""


class Size(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How large a request may become, in tokens."""

    maximum: int
    """Most tokens of the answer: what the client asked for, or what stands in for it."""
    total: int
    """Prompt and answer: what is held."""
    is_clamped: bool
    """The client set no maximum and a limit made it smaller than the default."""
    is_limited: bool
    """Some level limits tokens, so the maximum has to be kept."""
    is_shortened: bool = False
    """A limit made it smaller than the client asked for, with its leave."""


def size_of(
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    default_max_tokens: int,
    context_tokens: int | None,
    room: int | None,
) -> Size:
    """`max_tokens` is what the client asked for, `room` what could be held now at every level (None: no limit)."""
    maximum = default_max_tokens if max_tokens is None else max_tokens
    if context_tokens is not None:
        maximum = min(maximum, context_tokens)
    is_clamped = False
    if max_tokens is None and room is not None and prompt_tokens + maximum > room > prompt_tokens:
        is_clamped = True
        maximum = room - prompt_tokens
    total = prompt_tokens + maximum
    return Size(
        maximum=maximum,
        total=total if context_tokens is None else min(total, context_tokens),
        is_clamped=is_clamped,
        is_limited=room is not None,
    )


def clamped(size: Size, *, prompt_tokens: int, room: int) -> Size | None:
    """With the longest answer for which there is room, where the client set no maximum; None if there is none."""
    maximum = min(size.maximum, room - prompt_tokens)
    if maximum < 1:
        return None
    return Size(
        maximum=maximum,
        total=prompt_tokens + maximum,
        is_clamped=True,
        is_limited=True,
    )


def shortened(size: Size, *, prompt_tokens: int, room: int) -> Size | None:
    """With the longest answer for which there is room; None if that would be too short to be of use."""
    maximum = min(size.maximum, room - prompt_tokens)
    if maximum < SHORTENED_TOKENS_MIN:
        return None
    return Size(
        maximum=maximum,
        total=prompt_tokens + maximum,
        is_clamped=False,
        is_limited=True,
        is_shortened=True,
    )
