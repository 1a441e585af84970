"""Engine, engine loop and progress file of a worker, with an eye on them and with ways to die."""

import os
from collections.abc import Callable
from typing import Any

from headrace.engine.protocol import Forward, Span
from headrace.engine.stub import StubEngine
from headrace.request.sampling import Sampling
from headrace.worker.loop import EngineLoop
from headrace.worker.progress import ProgressFile, _pack
from headrace.worker.sequence import Sequence
from tests.simulation.truth import Attempt, Truth


class Died(BaseException):
    """The process dies here, in the middle of a call."""


class ObservedEngine(StubEngine):
    """The stub engine; every token it draws is written down."""

    calls_left: int | None = None
    """After so many calls the process dies in one."""

    def observe(self, truth: Truth) -> None:
        self._truth = truth
        self._attempts: dict[int, Attempt] = {}

    def is_unsure(self) -> None:
        """The process died while it noted what this engine computed last."""
        for attempt in self._attempts.values():
            attempt.is_unsure = True

    def open(self, slot: int, sampling: Sampling, *, held: int = 0, drawn: int = 0) -> None:
        super().open(slot, sampling, held=held, drawn=drawn)
        self._attempts[slot] = attempt = self._truth.attempt_of(sampling)
        if drawn != len(attempt.tokens):
            self._truth.violated(
                f"{attempt.attempt_id} goes on after {drawn} of {len(attempt.tokens)} tokens"
            )
        attempt.computed = max(attempt.computed, min(held, len(attempt.prompt)))

    def forward(self, spans: Any) -> Forward:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left <= 0:
                raise Died
        done = super().forward(spans)
        span: Span
        for span, token in zip(spans, done.tokens, strict=True):
            attempt = self._attempts[span.slot]
            attempt.before = (attempt.computed, len(attempt.tokens))
            held = self._slots[span.slot].tokens
            if held != (attempt.prompt + attempt.tokens)[: len(held)]:
                self._truth.violated(f"{attempt.attempt_id} is computed on tokens that are not its own")
            # What is computed again after a preemption counts once.
            attempt.computed = max(attempt.computed, min(len(held), len(attempt.prompt)))
            if token >= 0:
                attempt.tokens.append(token)
            self._truth.on_token(attempt)
        return done


class DyingProgressFile(ProgressFile):
    """The progress file; the process may die in the middle of a write of the engine thread."""

    writes_left: int | None = None
    written_part = 0.0

    def acknowledged(self, attempt_ids: list[str]) -> None:
        writes_left, self.writes_left = self.writes_left, None
        super().acknowledged(attempt_ids)
        self.writes_left = writes_left

    def _append(self, entries: Any) -> None:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left <= 0:
                data = b"".join(map(_pack, entries))
                os.write(self._file, data[: int(len(data) * self.written_part)])
                raise Died
        super()._append(entries)


class ObservedLoop(EngineLoop):
    """The engine loop; `on_work` is called when somebody gives it something to do."""

    on_work: Callable[[], None]
    truth: Truth
    here: dict[str, None]
    """Attempts that have not ended."""

    def submit(self, sequence: Sequence) -> None:
        self.here[sequence.attempt_id] = None
        self.truth.submitted(sequence, stop=sequence.text._stops)
        super().submit(sequence)
        self.on_work()

    def abort(self, attempt_id: str) -> None:
        super().abort(attempt_id)
        self.on_work()

    def resume(self, attempt_id: str) -> None:
        super().resume(attempt_id)
        self.on_work()

    def drain(self) -> None:
        super().drain()
        self.on_work()

    def stop(self) -> None:
        super().stop()
        self.on_work()
