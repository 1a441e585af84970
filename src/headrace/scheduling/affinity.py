"""Remembers where conversations and prompts went last, so that what continues them can go there.

A tenant's requests are found by that tenant only; what they mark is found by its group too, if it has joined one. So
where a request goes says nothing of what strangers send. It is a guess: the replica may have let go of it since, which
costs some computing and nothing else.

What is remembered is counted in *places*: a piece of a prompt, or a conversation, at one replica. All have one size,
whatever they stand for. Where there are too many, first those go whose time is over, then the least recently used ones of
those who have most: a tenant that floods forgets its own.
"""

from collections import OrderedDict
from typing import Final, Literal

from headrace import bounds
from headrace.scheduling.locality import Warmth
from headrace.scheduling.prompt_keys import PromptKeys

Reason = Literal["session", "prefix", "least_loaded", "only"]
"""Why a replica: its session's, one that has its beginning, the least loaded of several, or the only one."""
WARM_TOKENS_MIN: Final = bounds.BLOCK_TOKENS
"""Workers take over no less."""
FREED_PART: Final = 32
"""When there are too many places, such a part of all that may be is let go at once."""

_Went = tuple[int, int]
"""The number of a replica, and until when what went there is taken to be in its memory."""
_Scope = tuple[Literal["tenant", "group"], str]


class _Part:
    """What is remembered of one tenant or group."""

    __slots__ = ("entries", "num_places")

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, tuple[_Went, ...]] = OrderedDict()
        """Least recently used first; of each prompt the end before the beginning, so that no beginning goes before its
        end. Of each the latest place first."""
        self.num_places = 0

    def get(self, key: bytes) -> tuple[_Went, ...]:
        return self.entries.get(key, ())

    def put(self, key: bytes, went: tuple[_Went, ...]) -> int:
        """How many places more there are."""
        more = len(went) - len(self.entries.get(key, ()))
        self.entries[key] = went
        self.entries.move_to_end(key)
        self.num_places += more
        return more

    def oldest(self) -> tuple[_Went, ...]:
        return next(iter(self.entries.values()), ())

    def drop_oldest(self) -> int:
        """How many places there are less."""
        number = len(self.entries.popitem(last=False)[1])
        self.num_places -= number
        return number

    def drop(self, key: bytes) -> int:
        number = len(self.entries.pop(key, ()))
        self.num_places -= number
        return number


class Affinity:
    """The replicas of one model and what went to them."""

    def __init__(self, *, places_max: int = bounds.AFFINITY_PLACES_MAX) -> None:
        self._places_max = places_max
        self._parts: dict[_Scope, _Part] = {}
        self._num_places = 0
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        """Only of replicas that are there: what went to others counts no more."""
        self._last_number = 0
        self._now_us = 0

    def __len__(self) -> int:
        """Places that are remembered."""
        return self._num_places

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
        part = self._part(("tenant", tenant))
        went = part.get(session)
        if until_us > self._now_us and (not self._living(went) or went[0][1] < until_us):
            self._num_places += part.put(session, ((self._numbers[replica_id], until_us),))
        self._tidy(("tenant", tenant))

    def remove(self, replica_id: str) -> None:
        """A replica is gone, and its memory with it."""
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            del self._names[number]

    def warmth(self, keys: PromptKeys) -> Warmth | None:
        """Where the beginning of a request is. None: nowhere, as far as is known."""
        found: dict[int, int] = {}
        home = None
        own = self._parts.get(("tenant", keys.tenant))
        if own is not None:
            if keys.session is not None:
                home = next((name for name, _ in self._living(own.get(keys.session))), None)
            self._measure(own, keys, keys.num_own, found)
        if keys.num_shared and keys.group is not None:
            shared = self._parts.get(("group", keys.group))
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
        scope: _Scope = ("tenant", tenant)
        if scope in self._parts:
            self._num_places -= self._parts[scope].drop(session)
            self._tidy(scope)

    # --- inside -------------------------------------------------------------------------------------

    def _living(self, went: tuple[_Went, ...]) -> list[tuple[str, int]]:
        """(replica, its number), the latest first."""
        now_us, names = self._now_us, self._names
        return [(names[number], number) for number, until_us in went if until_us > now_us and number in names]

    def _measure(self, part: _Part, keys: PromptKeys, num_blocks: int, found: dict[int, int]) -> None:
        """For each replica, the longest part that went there: from the end, as a key stands for all before it."""
        missing = set(self._names)
        for at in range(num_blocks - 1, -1, -1):
            for _, number in self._living(part.get(keys.blocks[at])):
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
        own = keys.blocks[: keys.num_own]
        self._write(("tenant", keys.tenant), own, went, session=keys.session)
        if keys.group is not None:
            self._write(("group", keys.group), keys.blocks[: keys.num_shared], went)
        if self._num_places > self._places_max:
            self._make_room()

    def _write(
        self, scope: _Scope, blocks: tuple[bytes, ...], went: _Went, *, session: bytes | None = None
    ) -> None:
        part = self._part(scope)
        now_us, names = self._now_us, self._names
        more = 0
        for block in reversed(blocks):
            others = [
                one for one in part.get(block) if one[0] != went[0] and one[1] > now_us and one[0] in names
            ]
            more += part.put(block, (went, *others))
        if session is not None:
            more += part.put(session, (went,))
        self._num_places += more
        self._tidy(scope)

    def _part(self, scope: _Scope) -> _Part:
        part = self._parts.get(scope)
        if part is None:
            part = self._parts[scope] = _Part()
        return part

    def _tidy(self, scope: _Scope) -> None:
        """Let go of what is over, as far as it is at the front, and of a part without anything in it."""
        part = self._parts[scope]
        while part.entries and not self._living(part.oldest()):
            self._num_places -= part.drop_oldest()
        if not part.entries:
            del self._parts[scope]

    def _make_room(self) -> None:
        """A part of all at once, as this looks at every tenant."""
        for scope in list(self._parts):
            self._tidy(scope)
        surplus = self._num_places - (self._places_max - self._places_max // FREED_PART)
        if surplus <= 0:
            return
        level = _level([part.num_places for part in self._parts.values()], surplus)
        for scope, part in list(self._parts.items()):
            while part.num_places > level:
                self._num_places -= part.drop_oldest()
            self._tidy(scope)


def _level(sizes: list[int], surplus: int) -> int:
    """The size to which the largest have to shrink, so that together they give up at least so much."""
    sizes.sort(reverse=True)
    left = surplus
    for number, (size, below) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True), 1):
        if number * (size - below) >= left:
            return size - -(-left // number)
        left -= number * (size - below)
    return 0
