"""Who has taken how much, and whether one more request fits: one decision over all levels and dimensions.

What is counted here is a projection of the ledger's entries (reservations held, records settled), not a
second truth: at the start it is rebuilt from them. A refusal changes nothing.

    decide ──▶ hold (accepted) ──▶ grant (on a worker) ──▶ release ──▶ settle
                  │      └── trim (the exact prompt is known) ──▲
                  └───────────────── settle ────────────────────▲

Memory is taken with the grant, in bytes, at all accounts: those that do not limit it know all the same what is held,
should a limit be set while requests run. Whether a refusal slows its account down is for the caller of `decide` to say.
"""

from collections.abc import Iterable, Sequence

import msgspec

from headrace.config.limits import UNLIMITED, Level, LimitType
from headrace.limits.account import Account as Account
from headrace.limits.memory_book import has_room
from headrace.limits.window import WINDOW_US


class Ask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request wants to take."""

    prompt_tokens: int
    total_tokens: int
    """Prompt and longest answer together: what is held."""
    is_stream: bool
    output_tokens: int = 0
    """So long an answer is reckoned with, which decides `memory`."""
    memory: int = 0
    """Bytes that it is expected to need on a worker."""
    waits_for_memory: bool = False
    """Wait rather than be refused where memory is taken at the moment."""


class Excess(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request does not fit: which limit of which level, and what stands against it."""

    limit_type: LimitType
    level: Level
    account_id: str
    limit: float
    """Of memory, like what follows, in bytes."""
    used: int
    held: int
    requested: int
    free_at_us: int | None
    """When it could pass, if nothing else came; None if never."""


def decide(accounts: Iterable[Account], ask: Ask, now_us: int, *, room: int | None = None) -> Excess | None:
    """The first limit that the request would exceed; None if it fits everywhere. Changes nothing.

    `room`: what `tightest_room` said at the same instant, where it was asked.
    """
    has_room = room is not None and ask.total_tokens <= room
    for account in accounts:
        if account.limits is not UNLIMITED:
            excess = _excess(account, ask, now_us, has_room=has_room)
            if excess is not None:
                return excess
    return None


def hold(accounts: Iterable[Account], ask: Ask, now_us: int) -> None:
    """Take what `decide` allowed: the request counts in the rates, its tokens are held."""
    tokens = ask.total_tokens
    for account in accounts:
        rps = account.limits.rps
        if rps is not None:
            account.rate.take(rps, now_us)
        account.window.held += tokens


def may_start(
    accounts: Iterable[Account], *, is_stream: bool, memory: int = 0, is_begun: bool = False
) -> bool:
    """Whether a request that is held may go to a worker now, where it needs so many bytes. `is_begun`: it has been on
    one before.
    """
    for account in accounts:
        limits = account.limits
        if limits is UNLIMITED:
            continue
        if limits.concurrency is not None and account.running >= limits.concurrency:
            return False
        if is_stream and limits.streams is not None and account.streams >= limits.streams:
            return False
        if account.memory_max is not None and not has_room(account, memory, is_begun=is_begun):
            return False
    return True


def grant(accounts: Iterable[Account], *, is_stream: bool, memory: int = 0) -> None:
    for account in accounts:
        account.running += 1
        account.streams += is_stream
        account.memory += memory


def release(accounts: Iterable[Account], *, is_stream: bool, memory: int = 0) -> None:
    for account in accounts:
        assert account.running > 0
        account.running -= 1
        account.streams -= is_stream
        account.memory -= memory
        assert account.streams >= 0
        assert account.memory >= 0


def trim(accounts: Iterable[Account], tokens: int) -> None:
    """The prompt turned out shorter than its bound: give the difference back."""
    for account in accounts:
        account.window.trim(tokens)


def settle(accounts: Iterable[Account], *, held: int, used: int, now_us: int) -> None:
    """The hold becomes what was really used."""
    for account in accounts:
        account.window.settle(held, used, now_us)


def tightest_room(accounts: Iterable[Account], now_us: int) -> int | None:
    """Tokens that could be held now at every level; None if no level limits tokens."""
    tightest: int | None = None
    for account in accounts:
        limits = account.limits
        if limits is UNLIMITED:
            continue
        if limits.tpm is not None:
            room = limits.tpm - account.window.used(now_us) - account.window.held
            if tightest is None or room < tightest:
                tightest = room
        if limits.max_total_tokens is not None and (tightest is None or limits.max_total_tokens < tightest):
            tightest = limits.max_total_tokens
    return tightest if tightest is None or tightest > 0 else 0


def _excess(account: Account, ask: Ask, now_us: int, *, has_room: bool) -> Excess | None:
    limits = account.limits
    if limits.max_prompt_tokens is not None and ask.prompt_tokens > limits.max_prompt_tokens:
        return _outright(
            account, "prompt_tokens", limits.max_prompt_tokens, requested=ask.prompt_tokens, is_final=True
        )
    if limits.max_total_tokens is not None and ask.total_tokens > limits.max_total_tokens:
        return _outright(
            account, "total_tokens", limits.max_total_tokens, requested=ask.total_tokens, is_final=True
        )
    memory_max = account.memory_max
    if memory_max is not None and ask.memory > memory_max:
        return _too_much_memory(account, memory_max, ask, is_final=True)
    if limits.concurrency is not None and account.running >= limits.concurrency:
        return _busy(account, "concurrency", limits.concurrency, account.running)
    if ask.is_stream and limits.streams is not None and account.streams >= limits.streams:
        return _busy(account, "streams", limits.streams, account.streams)
    if limits.rps is not None:
        wait_us = account.rate.wait_us(limits.rps, now_us)
        if wait_us:
            return Excess(
                limit_type="rps",
                level=account.level,
                account_id=account.account_id,
                limit=limits.rps,
                used=0,
                held=0,
                requested=1,
                free_at_us=now_us + wait_us,
            )
    if limits.tpm is not None and not has_room:
        window = account.window
        used = window.used(now_us)
        if used + window.held + ask.total_tokens > limits.tpm:
            return _too_many_tokens(account, limits.tpm, used, ask, now_us)
    # Last, because this refusal has consequences: what another limit refuses as well is not slowed down for it.
    if memory_max is not None and account.memory + ask.memory > memory_max and not ask.waits_for_memory:
        return _too_much_memory(account, memory_max, ask, is_final=False)
    return None


def _too_many_tokens(account: Account, limit: int, used: int, ask: Ask, now_us: int) -> Excess:
    window = account.window
    free_at_us: int | None = window.free_at_us(limit, ask.total_tokens, now_us)
    if not free_at_us:
        # What is held has to be settled and to grow old first; how long that takes is not known.
        free_at_us = now_us + WINDOW_US if ask.total_tokens <= limit else None
    return Excess(
        limit_type="tpm",
        level=account.level,
        account_id=account.account_id,
        limit=limit,
        used=used,
        held=window.held,
        requested=ask.total_tokens,
        free_at_us=free_at_us,
    )


def _too_much_memory(account: Account, limit: int, ask: Ask, *, is_final: bool) -> Excess:
    return _outright(
        account, "memory", limit, requested=ask.memory, running=account.memory, is_final=is_final
    )


def _busy(account: Account, limit_type: LimitType, limit: int, running: int) -> Excess:
    return _outright(account, limit_type, limit, requested=1, running=running, is_final=limit == 0)


def _outright(
    account: Account, limit_type: LimitType, limit: int, *, requested: int, running: int = 0, is_final: bool
) -> Excess:
    """An excess in which no token window plays a part. One that is not final may end at any moment."""
    return Excess(
        limit_type=limit_type,
        level=account.level,
        account_id=account.account_id,
        limit=limit,
        used=running,
        held=running,
        requested=requested,
        free_at_us=None if is_final else 0,
    )


Accounts = Sequence[Account]
