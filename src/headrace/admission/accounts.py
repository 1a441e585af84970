"""Which accounts there are: one for each tenant, key, model and so on that a request falls under.

They are a projection of the ledger: built anew at the start from what was settled in the last minute, moved
on by the same decisions that are journalled. An account that limits nothing and holds nothing may be dropped.
"""

from collections.abc import Iterable
from typing import Final

from headrace.config.limits import UNLIMITED, Level, Limits
from headrace.limits.book import Account

ACCOUNTS_MAX: Final = 100_000
"""When there are so many, those that hold nothing are dropped."""

LevelLimits = tuple[Level, str, Limits]
"""(level, id of the account, its limits). Ids are unique within a level."""


class Accounts:
    """All accounts, by level and id."""

    def __init__(self, *, accounts_max: int = ACCOUNTS_MAX) -> None:
        self._accounts_max = accounts_max
        self._accounts: dict[tuple[Level, str], Account] = {}
        self._throttled: dict[Account, None] = {}
        """Those that were throttled, who has been so for longest first: all are for the same time."""
        self.has_throttled = False
        """Whether any has ever been throttled."""
        self.generation = 0
        """Grows whenever accounts are dropped: what was found before may no longer be one of them."""

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, levels: tuple[LevelLimits, ...], now_us: int) -> tuple[Account, ...]:
        """The accounts of these levels, with the limits that are in force now."""
        return tuple(self._account(level, name, limits, now_us) for level, name, limits in levels)

    def restore(self, level: Level, account_id: str, *, tokens: int, settled_us: int) -> None:
        """Count what was settled before this process began. Oldest first."""
        account = self._accounts.get((level, account_id))
        if account is None:
            account = self._account(level, account_id, UNLIMITED, settled_us)
        account.window.add(tokens, settled_us)

    def find(self, level: Level, account_id: str) -> Account | None:
        """An account that is there. None: nothing was ever counted in it, or it was dropped."""
        return self._accounts.get((level, account_id))

    def throttle(self, account: Account, *, now_us: int, until_us: int) -> None:
        """It was refused memory: slow it down. `until_us` never goes back from call to call."""
        account.throttled_until_us = until_us
        throttled = self._throttled
        throttled.pop(account, None)
        while throttled and (oldest := next(iter(throttled))).throttled_until_us <= now_us:
            del throttled[oldest]
        throttled[account] = None
        self.has_throttled = True

    def num_throttled(self, now_us: int) -> int:
        """May be asked from another thread."""
        return sum(account.throttled_until_us > now_us for account in list(self._throttled))

    def all(self) -> Iterable[Account]:
        return self._accounts.values()

    def _account(self, level: Level, account_id: str, limits: Limits, now_us: int) -> Account:
        account = self._accounts.get((level, account_id))
        if account is None:
            if len(self._accounts) >= self._accounts_max:
                self._drop_idle(now_us)
            account = self._accounts[level, account_id] = Account(level, account_id, limits)
        account.limit(limits)
        return account

    def _drop_idle(self, now_us: int) -> None:
        self.generation += 1
        self._accounts = {
            name: account for name, account in self._accounts.items() if not account.is_idle(now_us)
        }
