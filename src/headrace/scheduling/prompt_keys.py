"""What a request is recognised by when it comes to where its beginning is in memory.

Where requests are placed nobody has a tokenizer. So the text stands for the tokens: every message is cut into blocks of
`BLOCK_CHARACTERS`, and each block has a key that stands for everything up to its end. Equal keys, equal beginnings. Only
keys are kept, never text.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from headrace import bounds
from headrace.request.messages import Message

BLOCK_CHARACTERS: Final = 1024
_KEY_BYTES: Final = 16


class PromptKeys(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The keys of one request, and who may find what under them."""

    tenant: str
    group: str | None
    """The tenants of this name share what their requests mark."""
    session: bytes | None
    """Of the conversation. It is its tenant's alone."""
    blocks: tuple[bytes, ...]
    ends: tuple[int, ...]
    """For each block: so many characters of the prompt are computed where it was the last one."""
    num_own: int
    """So many of the blocks may be found by the tenant's later requests."""
    num_shared: int
    """So many by those of the group."""
    characters: int
    """Of the whole prompt."""
    prompt_tokens: int
    """Expected, of the whole prompt."""
    ttl_us: int

    def tokens_to(self, block: int) -> int:
        """How many of the prompt's tokens a replica has, by the last of its blocks that went there."""
        return self.prompt_tokens * self.ends[block] // max(self.characters, 1)


def session_key_of(session: str) -> bytes:
    """The key of a conversation, by the name that workers know it by."""
    return blake2b(session.encode(), digest_size=_KEY_BYTES).digest()


def prompt_keys(
    messages: Sequence[Message],
    *,
    tenant: str,
    group: str | None = None,
    session: str | None = None,
    is_kept_in_full: bool = True,
    prompt_tokens: int,
    ttl_us: int,
) -> PromptKeys:
    """The keys of a request that may be kept. `is_kept_in_full` False: only what is marked as cacheable is."""
    blocks: list[bytes] = []
    ends: list[int] = []
    key = b""
    at = num_marked = 0
    has_room = True
    for number, message in enumerate(messages):
        content = message.content
        size = len(content)
        for start in range(0, size or 1, BLOCK_CHARACTERS):
            has_room = len(blocks) < bounds.PROMPT_BLOCKS_MAX
            if not has_room:
                break
            end = min(start + BLOCK_CHARACTERS, size)
            # Role and length keep apart what would read the same once it is joined.
            head = f"{message.role}:{end - start}:{'.' if end == size else '+'}"
            key = blake2b(key + head.encode() + content[start:end].encode(), digest_size=_KEY_BYTES).digest()
            blocks.append(key)
            ends.append(at + end)
        at += size
        if message.is_cache_end:
            num_marked = len(blocks)
        if (
            is_kept_in_full
            and has_room
            and number + 1 < len(messages)
            and messages[number + 1].role == "assistant"
        ):
            # Where a request ended here its answer was written, and is kept too.
            ends[-1] += len(messages[number + 1].content)
    return PromptKeys(
        tenant=tenant,
        group=group,
        session=None if session is None else session_key_of(session),
        blocks=tuple(blocks),
        ends=tuple(ends),
        num_own=len(blocks) if is_kept_in_full else num_marked,
        num_shared=num_marked if group is not None else 0,
        characters=at,
        prompt_tokens=prompt_tokens,
        ttl_us=ttl_us,
    )
