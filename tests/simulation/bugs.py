"""Bugs to plant, one at a time, so that the simulation can show that it would find them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from headrace.core.admission import Admission
from headrace.limits import book
from headrace.limits.book import Account
from headrace.limits.window import TokenWindow
from headrace.worker.link import WorkerLink


def _released_twice() -> Any:
    """What an operation holds is given back twice when it is settled; the window takes it without a word."""

    def trim(self: TokenWindow, tokens: int) -> None:
        self.held = max(0, self.held - tokens)

    def settle(self: TokenWindow, held: int, tokens: int, now_us: int) -> None:
        self.trim(2 * held)
        if tokens:
            self.add(tokens, now_us)

    return mock.patch.multiple(TokenWindow, trim=trim, settle=settle)


def _refusal_charged() -> Any:
    """A request that is refused counts in the rate."""
    excess = Admission.excess

    def charge(self: Admission, accounts: Any, ask: Any) -> Any:
        found = excess(self, accounts, ask)
        if found is not None:
            for account in accounts:
                if account.limits.rps is not None:
                    account.rate.take(account.limits.rps, self._clock.monotonic_us())
        return found

    return mock.patch.object(Admission, "excess", charge)


def _lost_cancel() -> Any:
    """An abort never reaches the worker."""
    return mock.patch.object(WorkerLink, "abort", lambda self, attempt: None)


def _hold_kept() -> Any:
    """A settlement counts what was used and forgets to give back the hold."""
    settle = book.settle

    def keep(accounts: Iterable[Account], *, held: int, used: int, now_us: int) -> None:
        settle(accounts, held=0, used=used, now_us=now_us)

    return mock.patch.object(book, "settle", keep)


def _held_forgotten() -> Any:
    """The window compares what was settled with the limit and leaves out what is held."""

    def without_held(decide: Callable[..., Any]) -> Callable[..., Any]:
        def decide_without(accounts: Iterable[Account], *arguments: Any) -> Any:
            accounts = list(accounts)
            held = [account.window.held for account in accounts]
            for account in accounts:
                account.window.held = 0
            try:
                return decide(accounts, *arguments)
            finally:
                for account, tokens in zip(accounts, held, strict=True):
                    account.window.held = tokens

        return decide_without

    return mock.patch.multiple(
        book, decide=without_held(book.decide), tightest_room=without_held(book.tightest_room)
    )


def _stale_window() -> Any:
    """Settled tokens count for longer than a minute."""
    used = TokenWindow.used
    return mock.patch.object(TokenWindow, "used", lambda self, now_us: used(self, now_us - 5_000_000))


BUGS: dict[str, Callable[[], Any]] = {
    "released-twice": _released_twice,
    "refusal-charged": _refusal_charged,
    "lost-cancel": _lost_cancel,
    "hold-kept": _hold_kept,
    "held-forgotten": _held_forgotten,
    "stale-window": _stale_window,
}


@contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Run with this bug; with none if it is None."""
    if bug is None:
        yield
        return
    with BUGS[bug]():
        yield
