"""What other threads tell the engine loop, until it looks."""

import threading
from collections import deque

from headrace.request.controls import Controls
from headrace.worker.messages import Abort, Drain, EndSession, Preempt, Resume
from headrace.worker.sequence import Sequence

Command = Sequence | Abort | Preempt | Resume | EndSession | Controls | Drain


class Inbox:
    """Commands in the order of their arrival. Everything but `_next_command` and `_wait` may be called from any thread."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._is_stopping = False

    def submit(self, sequence: Sequence) -> None:
        """Run this attempt as soon as a slot is free, in order of arrival."""
        self._put(sequence)

    def abort(self, attempt_id: str) -> None:
        """End this attempt at the next step. Without effect if it is not here (any more)."""
        self._put(Abort(attempt_id))

    def preempt(self, attempt_id: str) -> None:
        """Take this attempt out of the engine at the next step, to be resumed or aborted later. Without effect if it is
        not here.
        """
        self._put(Preempt(attempt_id))

    def resume(self, attempt_id: str) -> None:
        """Go on with a preempted attempt, before all that wait. Without effect on any other."""
        self._put(Resume(attempt_id))

    def end_session(self, session: str) -> None:
        """Forget what is kept of a conversation."""
        self._put(EndSession(session))

    def adjust(self, controls: Controls) -> None:
        """Work by these from the next step on."""
        self._put(controls)

    def drain(self) -> None:
        """Nobody comes any more: who waits for company starts."""
        self._put(Drain())

    def stop(self) -> None:
        """End after the step at hand; what still runs is aborted."""
        self._is_stopping = True
        self._wake.set()

    # --- the engine thread ------------------------------------------------------------------------

    def _next_command(self) -> Command | None:
        return self._commands.popleft() if self._commands else None

    def _wait(self, seconds: float | None) -> None:
        """Until somebody says something, at most so long; None: for ever."""
        self._wake.wait(seconds)
        self._wake.clear()

    def _put(self, command: Command) -> None:
        self._commands.append(command)
        self._wake.set()
