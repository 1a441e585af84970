"""Deadlines of all open operations, watched by one timer instead of one timer for each request.

Operations get each deadline in the same order in which they take the step that starts it, so only the first
of each line has to be looked at.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from headrace import bounds
from headrace.admission.entry import Phase
from headrace.api import refusals
from headrace.config.settings import Settings

if TYPE_CHECKING:
    from headrace.core.core import Core
    from headrace.core.operation import Operation

TICK_SECONDS: Final = 0.1
"""How late a deadline may be noticed."""
LEASE_CHECK_TICKS: Final = 10


class Watch:
    """The waiting room's clock. Runs only while operations are open."""

    def __init__(self, core: "Core", settings: Settings) -> None:
        self._core = core
        self._queue_us = int(settings.queue.timeout_s * 1e6)
        self._queue_s = settings.queue.timeout_s
        self._request_us = int(settings.request_timeout_s * 1e6)
        self._request_s = settings.request_timeout_s
        self._ledger_us = int(bounds.LEDGER_SECONDS_MAX * 1e6)
        self._journalling: dict[str, Operation] = {}
        self._waiting: dict[str, Operation] = {}
        self._running: dict[str, Operation] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0

    def accepted(self, operation: "Operation") -> None:
        self._journalling[operation.request_id] = operation
        self._waiting[operation.request_id] = operation
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def journalled(self, operation: "Operation") -> None:
        self._journalling.pop(operation.request_id, None)

    def granted(self, operation: "Operation") -> None:
        self._waiting.pop(operation.request_id, None)
        self._running[operation.request_id] = operation

    def put_back(self, operation: "Operation") -> None:
        """It waits on; what it has waited already counts, so it belongs to the front."""
        self._running.pop(operation.request_id, None)
        self._waiting = {operation.request_id: operation, **self._waiting}

    def closing(self, operation: "Operation") -> None:
        """Nothing of the request may be interrupted any more."""
        self._journalling.pop(operation.request_id, None)
        self._waiting.pop(operation.request_id, None)
        self._running.pop(operation.request_id, None)

    ended = closing

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        now_us = self._core.clock.monotonic_us()
        for operation in _due(self._journalling, now_us - self._ledger_us):
            operation.interrupt(refusals.store_unavailable())
        for operation in _due(self._waiting, now_us - self._queue_us):
            facts = self._core.queues.facts_of(operation)
            operation.refuse(refusals.queue_timeout(limit_s=self._queue_s, queue=facts))
        for operation in _due(self._running, now_us - self._request_us, is_granted=True):
            operation.interrupt(refusals.deadline_passed(self._request_s))
        self._ticks += 1
        is_full_round = self._ticks % LEASE_CHECK_TICKS == 0
        if is_full_round:
            self._check_leases(now_us)
        self._core.note_progress(is_full_round=is_full_round)
        if any(True for _ in self._core.open_operations):
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _check_leases(self, now_us: int) -> None:
        controller = self._core.controller
        for operation in list(self._core.open_operations):
            if operation.entry.phase is not Phase.GRANTED:
                continue
            answer = operation.answer
            # Before it has an answer the request is with its task, which lives as long as we do.
            heard_us = now_us if answer is None else answer.heard_us
            controller.renew(operation.entry, now_us if heard_us is None else heard_us)
            if operation.entry.lease_until_us <= now_us:
                self._core.expire(operation)


def _due(line: "dict[str, Operation]", before_us: int, *, is_granted: bool = False) -> "list[Operation]":
    """Those at the front of the line that began at or before this time, taken out of it."""
    due: list[Operation] = []
    for operation in line.values():
        began_us = operation.granted_us if is_granted else operation.accepted_us
        if began_us > before_us:
            break
        due.append(operation)
    for operation in due:
        del line[operation.request_id]
    return due
