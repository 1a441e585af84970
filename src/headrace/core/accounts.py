"""Which accounts a caller falls under, and what clients are told of them: refusals, headers, `GET /v1/limits`.

The accounts and every decision about them are `headrace.admission`'s; here they meet the directory, which
knows the limits, and the clock.
"""

from collections.abc import Iterable
from typing import Final

from headrace.admission.accounts import Accounts, LevelLimits
from headrace.api import refusals
from headrace.clock import Clock
from headrace.config.limits import UNLIMITED, Level, Limits
from headrace.core.directory import Directory
from headrace.errors import Refusal
from headrace.ledger.records import OperationRecord
from headrace.limits import memory_book
from headrace.limits.account import Account
from headrace.limits.book import Excess
from headrace.limits.memory import gb_of

CALLERS_MAX: Final = 10_000
"""Callers whose accounts are remembered."""

_REQUEST_HEADERS = (
    b"x-ratelimit-limit: %d\r\nx-ratelimit-remaining: %d\r\n"
    b"x-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %d\r\n"
    b"x-ratelimit-reset-requests: %dms\r\n"
    b'ratelimit-policy: "requests";q=%d;w=1\r\nratelimit: "requests";r=%d;t=%d\r\n'
)
_TOKEN_HEADERS = (
    b"x-ratelimit-limit-tokens: %d\r\nx-ratelimit-remaining-tokens: %d\r\nx-ratelimit-reset-tokens: %dms\r\n"
)
"""OpenAI's names; the draft of the IETF has no unit for tokens, so they stand in OpenAI's form only."""


SHARED_LEVELS: Final = ("cluster", "model")
"""Levels whose accounts many tenants fill together."""


class CallerAccounts:
    """The accounts of callers, in the terms of clients. Belongs to the core's loop."""

    def __init__(self, accounts: Accounts, directory: Directory, clock: Clock, *, cluster: Limits) -> None:
        self._accounts = accounts
        self._directory = directory
        self._clock = clock
        self._cluster = cluster
        self._models: dict[str, Limits] = {}
        self._found: dict[tuple[str, str | None, str], tuple[object, int, tuple[Account, ...]]] = {}
        """By key, user and model: the levels they were made for, the generation, the accounts."""

    def set_model_limits(self, model_id: str, limits: Limits) -> None:
        self._models[model_id] = limits
        self._found.clear()

    def of(
        self, *, tenant_id: str, api_key_id: str, user_id: str | None, model_id: str
    ) -> tuple[Account, ...]:
        """Every account a request falls under, with the limits that are in force now."""
        levels = self._directory.levels(tenant_id, api_key_id, user_id, model_id)
        found = self._found.get((api_key_id, user_id, model_id))
        if found is not None and found[0] is levels and found[1] == self._accounts.generation:
            return found[2]
        shared: tuple[LevelLimits, ...] = (
            ("cluster", "", self._cluster),
            ("model", model_id, self._models.get(model_id, UNLIMITED)),
        )
        accounts = self._accounts.of(shared + levels, self._clock.monotonic_us())
        if len(self._found) >= CALLERS_MAX:
            self._found.clear()
        self._found[api_key_id, user_id, model_id] = (levels, self._accounts.generation, accounts)
        return accounts

    def is_throttled(self, accounts: Iterable[Account], now_us: int) -> bool:
        """Whether one of them was refused for memory not long ago."""
        # Where nobody ever was, which is nearly everywhere, nobody has to be looked at.
        return self._accounts.has_throttled and memory_book.is_throttled(accounts, now_us)

    def restore(self, records: Iterable[OperationRecord]) -> None:
        """Count what was settled before this process began. Oldest first."""
        now_us, wall_us = self._clock.monotonic_us(), self._clock.wall_us()
        for record in records:
            settled_us = now_us - max(0, wall_us - record.end_ts)
            tokens = record.charged_prompt_tokens + record.charged_completion_tokens
            for level, account_id in _levels_of(record):
                self._accounts.restore(level, account_id, tokens=tokens, settled_us=settled_us)

    def refusal(self, excess: Excess) -> Refusal:
        """The reply to a request that does not fit."""
        now_us = self._clock.monotonic_us()
        wait_us = None if excess.free_at_us is None else max(0, excess.free_at_us - now_us)
        shown = gb_of if excess.limit_type == "memory" else _as_it_is
        return refusals.limit_exceeded(
            limit_type=excess.limit_type,
            level=excess.level,
            limit=shown(excess.limit),
            # What others use of a shared limit is not this caller's business.
            used=None if excess.level in SHARED_LEVELS else shown(excess.used),
            held=None if excess.level in SHARED_LEVELS else shown(excess.held),
            requested=shown(excess.requested),
            retry_after_s=None if wait_us is None else max(1, -(-wait_us // 1_000_000)),
            reset_ts=None if wait_us is None else self._clock.wall_us() + wait_us,
        )

    def headers(self, accounts: Iterable[Account]) -> bytes:
        """Rate-limit headers: of the level that leaves the least. Nothing where nothing is limited."""
        limited = [account for account in accounts if account.limits is not UNLIMITED]
        if not limited:
            return b""
        now_us = self._clock.monotonic_us()
        requests: tuple[int, int, int] | None = None
        tightest: Account | None = None
        tokens_left = 0
        for account in limited:
            limits = account.limits
            if limits.rps is not None:
                room = account.rate.room(limits.rps, now_us)
                if requests is None or room < requests:
                    requests = room
            if limits.tpm is not None:
                left = limits.tpm - account.window.used(now_us) - account.window.held
                if tightest is None or left < tokens_left:
                    tightest, tokens_left = account, left
        lines = b""
        if requests is not None:
            remaining, limit, reset_ms = requests
            lines += _REQUEST_HEADERS % (limit, remaining, limit, remaining, reset_ms, limit, remaining,
                                         -(-reset_ms // 1000))  # fmt: skip
        tokens = None if tightest is None else _token_room(tightest, now_us)
        if tokens is not None:
            lines += _TOKEN_HEADERS % (tokens[1], tokens[0], tokens[2])
        return lines

    def describe(self, accounts: Iterable[Account]) -> list[dict[str, object]]:
        """What `GET /v1/limits` says of these accounts."""
        now_us = self._clock.monotonic_us()
        return [
            {
                "level": account.level,
                "id": account.account_id or None,
                "limits": account.limits,
                "tokens_used_60s": account.window.used(now_us),
                "tokens_held": account.window.held,
                "tokens_remaining": room[0] if (room := _token_room(account, now_us)) else None,
                "requests_remaining": room[0] if (room := _request_room(account, now_us)) else None,
                "requests_running": account.running,
                "streams_running": account.streams,
                "recovers_ts": self._recovers_ts(account, now_us),
                "gpu_memory_held_gb": gb_of(account.memory),
                "throttled_until_ts": self._throttled_until_ts(account, now_us),
            }
            for account in accounts
        ]

    def _throttled_until_ts(self, account: Account, now_us: int) -> int | None:
        """Until when an account that was refused for memory is slowed down; None if it is not."""
        left_us = account.throttled_until_us - now_us
        return self._clock.wall_us() + left_us if left_us > 0 else None

    def _recovers_ts(self, account: Account, now_us: int) -> int | None:
        """When the account's tokens are whole again if nothing more is used; None if they are."""
        if not account.window.used(now_us):
            return None
        limit = account.limits.tpm
        if limit is None:
            return None
        free_us = account.window.free_at_us(limit, limit - account.window.held, now_us)
        return self._clock.wall_us() + max(0, free_us - now_us) if free_us else None


def _as_it_is(number: float) -> float:
    return number


def _levels_of(record: OperationRecord) -> list[tuple[Level, str]]:
    """The accounts that an operation counts at, by the ids that `Directory.levels` gives them."""
    tenant = record.tenant_id
    levels: list[tuple[Level, str]] = [
        ("cluster", ""),
        ("model", record.model),
        ("tenant", tenant),
        ("tenant_model", f"{tenant}/{record.model}"),
        ("key", record.api_key_id),
    ]
    if record.department is not None:
        levels.append(("department", f"{tenant}/{record.department}"))
    if record.user_id is not None:
        levels.append(("user", f"{tenant}/{record.user_id}"))
    return levels


def _request_room(account: Account, now_us: int) -> tuple[int, int, int] | None:
    """(requests that pass now, requests per second, milliseconds until all pass again)"""
    rps = account.limits.rps
    if rps is None:
        return None
    return account.rate.room(rps, now_us)


def _token_room(account: Account, now_us: int) -> tuple[int, int, int] | None:
    """(tokens that fit now, tokens per minute, milliseconds until something is given back)"""
    limit = account.limits.tpm
    if limit is None:
        return None
    window = account.window
    left = limit - window.used(now_us) - window.held
    if left < 0:
        left = 0
    free_us = window.free_at_us(limit, left + 1, now_us) - now_us
    return left, limit, free_us // 1000 if free_us > 0 else 0
