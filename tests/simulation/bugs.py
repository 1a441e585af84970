"""Bugs to plant, one at a time, so that the simulation can show that it would find them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from headrace.admission.applicant import Applicant
from headrace.admission.controller import AdmissionController, Admitted, LimitReached
from headrace.admission.entry import Entry
from headrace.core.core import Core
from headrace.core.embedded import EmbeddedAnswer
from headrace.core.watch import Watch
from headrace.ledger.closing import Counts
from headrace.ledger.records import OperationRecord
from headrace.limits import book, memory_book
from headrace.limits.book import Account
from headrace.limits.window import TokenWindow
from headrace.scheduling.expectation import Expectations
from headrace.store.journal import Journal
from headrace.worker.link import Attempt as WorkerAttempt
from headrace.worker.link import WorkerLink
from headrace.worker.messages import Piece
from headrace.worker.progress import ProgressFile


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
    accept = AdmissionController.accept

    def charge(self: AdmissionController, applicant: Applicant, now_us: int) -> Admitted:
        try:
            return accept(self, applicant, now_us)
        except LimitReached:
            for account in applicant.accounts:
                if account.limits.rps is not None:
                    account.rate.take(account.limits.rps, now_us)
            raise

    return mock.patch.object(AdmissionController, "accept", charge)


def _missed_expiry() -> Any:
    """Nobody looks whether a lease has run out."""
    return mock.patch.object(Watch, "_check_leases", lambda self, now_us: None)


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
        def decide_without(accounts: Iterable[Account], *arguments: Any, **named: Any) -> Any:
            accounts = list(accounts)
            held = [account.window.held for account in accounts]
            for account in accounts:
                account.window.held = 0
            try:
                return decide(accounts, *arguments, **named)
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


def _concurrency_ignored() -> Any:
    """Waiting requests start whatever the limits on running ones say."""
    return mock.patch.object(book, "may_start", lambda accounts, **named: True)


def _memory_ignored() -> Any:
    """Waiting requests start whether there is memory for them or not."""
    return mock.patch.object(book, "has_room", lambda account, memory, *, is_begun: True)


def _memory_kept() -> Any:
    """An operation whose lease runs out goes on holding its memory."""
    expire = AdmissionController.expire

    def keep(self: AdmissionController, entry: Entry, now_us: int) -> None:
        expire(self, entry, now_us)
        for account in entry.accounts:
            account.memory += entry.memory

    return mock.patch.object(AdmissionController, "expire", keep)


def _brief_answers_predicted() -> Any:
    """Memory is taken for the last answer's length, however long those before it were."""
    return mock.patch.object(
        Expectations,
        "longest_output",
        lambda self, tenant: self._answers[tenant].recent[-1] if tenant in self._answers else None,
    )


def _throttle_forgotten() -> Any:
    """Who was refused memory is refused again instead of waiting."""
    return mock.patch.object(memory_book, "is_throttled", lambda accounts, now_us: False)


def _throttle_without_end() -> Any:
    """Who was refused memory once waits for it for ever after, and is not refused."""

    def is_throttled(accounts: Iterable[Account], now_us: int) -> bool:
        return any(account.throttled_until_us for account in accounts)

    return mock.patch.object(memory_book, "is_throttled", is_throttled)


def _blind_recovery() -> Any:
    """A start closes what was open without looking at what the workers noted."""
    recover = Core.recover
    return mock.patch.object(Core, "recover", lambda self, records: recover(self, ()))


def _early_acknowledgement() -> Any:
    """A worker is told to forget a record before the ledger has it."""
    counts = EmbeddedAnswer.counts

    async def counts_and_forget(self: EmbeddedAnswer) -> Counts:
        found = await counts(self)
        self.acknowledge()
        return found

    return mock.patch.object(EmbeddedAnswer, "counts", counts_and_forget)


def _reply_before_record() -> Any:
    """The ledger says that a record is durable before it is."""
    settle = Journal.settle

    def settle_at_once(self: Journal, record: OperationRecord) -> asyncio.Future[None]:
        settle(self, record)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    return mock.patch.object(Journal, "settle", settle_at_once)


def _lost_piece() -> Any:
    """Now and then a piece of text is not passed on."""
    push = WorkerAttempt.push

    def push_most(self: WorkerAttempt, event: Any) -> None:
        if not (isinstance(event, Piece) and event.completion_tokens == 7):
            push(self, event)

    return mock.patch.object(WorkerAttempt, "push", push_most)


def _late_progress() -> Any:
    """The progress file is a token behind what has been told."""
    advanced = ProgressFile.advanced

    def behind(self: ProgressFile, counts: list[tuple[str, int, int]], *, wall_us: int) -> None:
        late = [(attempt_id, computed, max(0, drawn - 1)) for attempt_id, computed, drawn in counts]
        advanced(self, late, wall_us=wall_us)

    return mock.patch.object(ProgressFile, "advanced", behind)


BUGS: dict[str, Callable[[], Any]] = {
    "released-twice": _released_twice,
    "missed-expiry": _missed_expiry,
    "refusal-charged": _refusal_charged,
    "lost-cancel": _lost_cancel,
    "hold-kept": _hold_kept,
    "held-forgotten": _held_forgotten,
    "stale-window": _stale_window,
    "concurrency-ignored": _concurrency_ignored,
    "memory-ignored": _memory_ignored,
    "memory-kept": _memory_kept,
    "brief-answers-predicted": _brief_answers_predicted,
    "throttle-forgotten": _throttle_forgotten,
    "throttle-without-end": _throttle_without_end,
    "blind-recovery": _blind_recovery,
    "early-acknowledgement": _early_acknowledgement,
    "reply-before-record": _reply_before_record,
    "lost-piece": _lost_piece,
    "late-progress": _late_progress,
}


@contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Run with this bug; with none if it is None."""
    if bug is None:
        yield
        return
    with BUGS[bug]():
        yield
