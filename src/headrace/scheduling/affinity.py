"""Remembers where conversations and prompts went last, so that what continues them can go there.

A tenant's requests are found by that tenant only; what they mark is found by its group too, if it has joined one. So
where a request goes says nothing of what strangers send. It is a guess: the replica may have let go of it since, which
costs some computing and nothing else.

Everything is bounded: entries have one size whatever they stand for, a tenant has at most `tenant_entries_max` of them,
and where all are taken the tenant that has asked for nothing for longest gives up its oldest one.
"""

from collections import OrderedDict
from typing import Final, Literal

from headrace import bounds
from headrace.scheduling.locality import Warmth
from headrace.scheduling.prompt_keys import PromptKeys

Reason = Literal["session", "prefix", "least_loaded", "only"]
"""Why a replica: its session's, one that has its beginning, the least loaded of several, or the only one."""
WARM_TOKENS_MIN: Final = bounds.CHUNK_GRAIN
"""Workers take over no less."""

_Went = tuple[int, int]
"""The number of a replica, and until when what went there is taken to be in its memory."""
_Scope = tuple[Literal["tenant", "group"], str]
_Entries = OrderedDict[bytes, tuple[_Went, ...]]
"""Least recently used first; of each prompt the end before the beginning, so that no beginning goes before its end."""


class Affinity:
    """The replicas of one model and what went to them."""

    def __init__(
        self,
        *,
        entries_max: int = bounds.AFFINITY_ENTRIES_MAX,
        tenant_entries_max: int = bounds.AFFINITY_TENANT_ENTRIES_MAX,
    ) -> None:
        self._entries_max = entries_max
        self._tenant_entries_max = tenant_entries_max
        self._scopes: OrderedDict[_Scope, _Entries] = OrderedDict()
        self._num_entries = 0
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        """Only of replicas that are there: what went to others counts no more."""
        self._last_number = 0
        self._now_us = 0

    def __len__(self) -> int:
        return self._num_entries

    def advance(self, now_us: int) -> None:
        """Say what time it is. Never goes back."""
        self._now_us = max(self._now_us, now_us)

    def add(self, replica_id: str) -> None:
        """A replica is there, with nothing in its memory."""
        self.remove(replica_id)
        self._last_number += 1
        self._numbers[replica_id] = self._last_number
        self._names[self._last_number] = replica_id

    def bring(self, tenant: str, session: bytes, replica_id: str, *, until_us: int) -> None:
        """A replica has something of a conversation from an earlier life. Where it went since counts more."""
        scope: _Scope = ("tenant", tenant)
        entries = self._open(scope)
        went = entries.get(session, ())
        if not self._living(went) or went[0][1] < until_us:
            self._put(entries, session, ((self._numbers[replica_id], until_us),))
        self._shrink(scope)

    def remove(self, replica_id: str) -> None:
        """A replica is gone, and its memory with it."""
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            del self._names[number]

    def warmth(self, keys: PromptKeys) -> Warmth | None:
        """Where the beginning of a request is. None: nowhere, as far as is known."""
        found: dict[int, int] = {}
        home = None
        own = self._scopes.get(("tenant", keys.tenant))
        if own is not None:
            if keys.session is not None:
                home = next((name for name, _ in self._living(own.get(keys.session, ()))), None)
            self._measure(own, keys, keys.num_own, found)
        if keys.num_shared and keys.group is not None:
            shared = self._scopes.get(("group", keys.group))
            if shared is not None:
                self._measure(shared, keys, keys.num_shared, found)
        tokens = {
            self._names[number]: tokens for number, tokens in found.items() if tokens >= WARM_TOKENS_MIN
        }
        return Warmth(tokens, home) if tokens or home is not None else None

    def place(self, keys: PromptKeys | None, replica_id: str) -> tuple[Reason, int]:
        """A request goes to a replica. Returns why, by what was known, and how many of its prompt's tokens are
        expected to be there. `keys` None: nothing of it may be kept."""
        warmth = None if keys is None else self.warmth(keys)
        if keys is not None:
            self._note(keys, replica_id)
        tokens = 0 if warmth is None else warmth.tokens.get(replica_id, 0)
        if warmth is not None and warmth.home == replica_id:
            return "session", tokens
        if tokens:
            return "prefix", tokens
        return ("only" if len(self._names) == 1 else "least_loaded"), 0

    def end_session(self, tenant: str, session: bytes) -> None:
        """A conversation is over. What its prompts have in common with others is still there."""
        entries = self._scopes.get(("tenant", tenant))
        if entries is not None and entries.pop(session, None) is not None:
            self._num_entries -= 1
            self._drop_if_empty(("tenant", tenant))

    # --- inside -------------------------------------------------------------------------------------

    def _living(self, went: tuple[_Went, ...]) -> list[tuple[str, int]]:
        """(replica, its number), the latest first."""
        now_us, names = self._now_us, self._names
        return [(names[number], number) for number, until_us in went if until_us > now_us and number in names]

    def _measure(self, entries: _Entries, keys: PromptKeys, num_blocks: int, found: dict[int, int]) -> None:
        """For each replica, the longest part that went there: from the end, as a block stands for all before it."""
        missing = set(self._names)
        for at in range(num_blocks - 1, -1, -1):
            went = entries.get(keys.blocks[at])
            if went is None:
                continue
            for _, number in self._living(went):
                if number in missing:
                    missing.discard(number)
                    found[number] = max(found.get(number, 0), keys.tokens_to(at))
            if not missing:
                return

    def _note(self, keys: PromptKeys, replica_id: str) -> None:
        number = self._numbers.get(replica_id)
        if number is None:
            return
        went = (number, self._now_us + keys.ttl_us)
        if keys.num_own or keys.session is not None:
            own: _Scope = ("tenant", keys.tenant)
            self._write(own, keys.blocks[: keys.num_own], went)
            if keys.session is not None:
                self._put(self._open(own), keys.session, (went,))
            self._shrink(own)
        if keys.num_shared and keys.group is not None:
            shared: _Scope = ("group", keys.group)
            self._write(shared, keys.blocks[: keys.num_shared], went)
            self._shrink(shared)

    def _write(self, scope: _Scope, blocks: tuple[bytes, ...], went: _Went) -> None:
        entries = self._open(scope)
        others_max = bounds.PLACES_REMEMBERED_MAX - 1
        for block in reversed(blocks):
            before = entries.get(block)
            if before is None or (len(before) == 1 and before[0][0] == went[0]):
                self._put(entries, block, (went,))
                continue
            others = [one for one in before if one[0] != went[0] and one[1] > self._now_us]
            living = [one for one in others if one[0] in self._names]
            self._put(entries, block, (went, *living[:others_max]))

    def _open(self, scope: _Scope) -> _Entries:
        entries = self._scopes.get(scope)
        if entries is None:
            entries = self._scopes[scope] = OrderedDict()
        self._scopes.move_to_end(scope)
        return entries

    def _put(self, entries: _Entries, key: bytes, went: tuple[_Went, ...]) -> None:
        self._num_entries += key not in entries
        entries[key] = went
        entries.move_to_end(key)

    def _shrink(self, scope: _Scope) -> None:
        """Back within the bounds, and what is over at the front goes too."""
        entries = self._scopes[scope]
        while len(entries) > self._tenant_entries_max or self._is_over(entries):
            entries.popitem(last=False)
            self._num_entries -= 1
        self._drop_if_empty(scope)
        while self._num_entries > self._entries_max:
            idle = next(iter(self._scopes))
            self._scopes[idle].popitem(last=False)
            self._num_entries -= 1
            self._drop_if_empty(idle)

    def _is_over(self, entries: _Entries) -> bool:
        """Whether the oldest one says nothing any more."""
        went = next(iter(entries.values()), None)
        return went is not None and not self._living(went)

    def _drop_if_empty(self, scope: _Scope) -> None:
        if not self._scopes[scope]:
            del self._scopes[scope]
