"""What a request is recognised by when it comes to where its beginning is in memory.

Where requests are placed nobody has a tokenizer. So the text stands for the tokens: a prompt is cut at places that depend
only on what is before them, and at each cut a key is taken that stands for everything up to there. Equal keys, equal
beginnings. There is a cut at the end of every message, and within long ones. Those are farther apart the farther they are
from the beginning: a long text has few keys and is known to an eighth of its length. Only keys are kept, never text.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from headrace import bounds
from headrace.request.messages import Message

BLOCK_CHARACTERS_MIN: Final = 1024
"""Within a message there is a cut after so many characters, or after an eighth of what is before the last one."""
_KEY_BYTES: Final = 16


class PromptKeys(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The keys of one request, and who may find what under them."""

    tenant: str
    group: str | None
    """The tenants of this name share what their requests mark."""
    session: bytes | None
    """Of the conversation. It is its tenant's alone."""
    blocks: tuple[bytes, ...]
    """Keys of everything up to each cut, in order."""
    ends: tuple[int, ...]
    """For each: so many characters of the prompt are computed where it was the last one."""
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
    cuts = _Cuts()
    num_marked = 0
    for number, message in enumerate(messages):
        if cuts.is_full:
            num_marked = len(cuts.keys) if any(one.is_cache_end for one in messages[number:]) else num_marked
            break
        is_cut = cuts.add(message)
        if message.is_cache_end:
            num_marked = len(cuts.keys)
        if is_cut and is_kept_in_full and number + 1 < len(messages):
            following = messages[number + 1]
            if following.role == "assistant":
                # Where a request ended here its answer was written, and is kept too.
                cuts.ends[-1] += len(following.content)
    return PromptKeys(
        tenant=tenant,
        group=group,
        session=None if session is None else session_key_of(session),
        blocks=tuple(cuts.keys),
        ends=tuple(cuts.ends),
        num_own=len(cuts.keys) if is_kept_in_full else num_marked,
        num_shared=num_marked if group is not None else 0,
        characters=sum(len(message.content) for message in messages),
        prompt_tokens=prompt_tokens,
        ttl_us=ttl_us,
    )


class _Cuts:
    """Where a prompt is cut, and the keys."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.ends: list[int] = []
        self.at = 0
        """Characters so far."""
        self._last = 0
        """Where the last cut is."""
        self._digest = blake2b(digest_size=_KEY_BYTES)

    @property
    def is_full(self) -> bool:
        """What follows is not looked at."""
        return len(self.keys) >= bounds.PROMPT_KEYS_MAX or self.at >= bounds.PROMPT_CHARACTERS_MAX

    def add(self, message: Message) -> bool:
        """Whether there is a cut at its end."""
        # No text has these bytes, so it cannot pretend to be the end of a message.
        self._digest.update(b"\xff" + message.role.encode() + b"\xff")
        content = message.content
        start, size = 0, min(len(content), bounds.PROMPT_CHARACTERS_MAX - self.at)
        while start < size:
            block = max(BLOCK_CHARACTERS_MIN, self._last // 8)
            end = min(start + self._last + block - self.at, size)
            self._digest.update(content[start:end].encode())
            self.at += end - start
            start = end
            if self.at == self._last + block:
                self._cut()
        if self.at > self._last:
            self._cut()
        return self.ends[-1:] == [self.at]

    def _cut(self) -> None:
        self._last = self.at
        self.keys.append(self._digest.copy().digest())
        self.ends.append(self.at)
