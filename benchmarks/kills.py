"""`kill -9`, sixty times in one run, on the real engine: python -m benchmarks.kills [--kills N] [--seed N].

Alternately the server process (gateway and core) and the worker process die while at least eight operations
are open. Each kill aims at a phase: `queued` (waits for a slot), `prefill` (granted, no token yet), `decode`
(the client has text and no end), `settling` (the engine is done and the record is not durable yet). Whether
it hit is judged afterwards from the clocks in the workers' progress files and the journal. Some servers are
killed once more while they start.

At the end ledger, workers' files and clients must agree on every operation (`benchmarks.kills_evidence`).
Exit status 1 if anything is wrong, or if the trial did not do what it says above. Evidence stays on disk
then. Takes about three minutes on two cores.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kills_evidence import (
    Kill,
    Ledger,
    Tail,
    attempts_in,
    copy_progress,
    phases_at,
    uncaught_errors,
    violations,
)
from benchmarks.kills_load import Chat, Server
from benchmarks.kills_report import line, missed_by, show
from headrace.worker.progress import read_records

SLOTS = 8
CONTEXT = 512
SECONDS_MAX = 30.0
CONFIG: dict[str, Any] = {
    "models": [
        {
            "id": "builtin",
            "path": "builtin",
            "engine": {"max_batch_size": SLOTS, "max_context_tokens": CONTEXT},
        }
    ],
    "headers_after_ms": 50,
}
LONG = "Write the numbers from {} to five hundred in words, one after the other."
STILLBORN_SHARE = 0.25
"""Of the servers that are started after a kill, so many are killed while they start."""
TRIGGERS = {
    "server": ("file", "end", "file", "file", "text", "file", "file", "end", "file", "text"),
    "worker": ("file", "file", "text", "file", "file", "file", "file", "text", "file"),
}
"""What the kills that aim at settling wait for, last one first, then always `file`."""
WEIGHTS = {"queued": 2, "prefill": 2, "decode": 2, "settling": 4}
"""How often each phase is aimed at. Settling lasts about a millisecond and is sometimes missed."""


class Trial:
    """One run."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.copies = scratch / "progress"
        self.server = Server(scratch / "data", CONFIG, scratch / "server.log")
        self.chats: list[Chat] = []
        self.kills: list[Kill] = []
        self.wrong: list[str] = []
        self.num_stillborn = 0
        self._threads: list[threading.Thread] = []
        self._round: list[Chat] = []
        self._lock = threading.Lock()
        self._struck_us = 0
        self._num_waiting = 0
        self._triggers = {victim: list(triggers) for victim, triggers in TRIGGERS.items()}

    def run(self, num_kills: int) -> None:
        self.server.start()
        for number, (victim, aimed) in enumerate(_plan(num_kills, self.random)):
            kill = Kill(number, victim, aimed)
            self.kills.append(kill)
            self._threads, self._round, self._struck_us = [], [], 0
            self.server.look_up_processes()
            getattr(self, f"_aim_{aimed}")(victim)
            self._kill(kill)
            self._check_idle(f"after kill {number}")
            print(line(kill, self._round), flush=True)
        self._check_all_slots()
        copy_progress(self.server.progress_files(), self.copies / "end")
        status = self.server.stop()
        if status:
            self.wrong.append(f"the last stop ended with status {status}")
        if list((self.server.data / "progress").iterdir()):
            self.wrong.append("progress files are left after an orderly stop")

    # --- the load before a kill ----------------------------------------------------------------------

    def _aim_queued(self, victim: str) -> None:
        self._steady(7)
        self._some(7)
        _until(lambda: self.server.metric("headrace_queue_length") >= 3)
        _until(lambda: self._num_started() >= SLOTS)
        time.sleep(self.random.uniform(0, 0.2))

    def _aim_prefill(self, victim: str) -> None:
        self._steady(4)
        _until(lambda: self._num_with_text() >= 2)
        for _ in range(4):
            # A beginning of its own for each, as long as the context allows.
            self._begin(f"{self.random.random()} " + "river " * 330 + "Tell me about it.", self._few())
        self._some(4)
        _until(self._is_prefilling)
        time.sleep(self.random.uniform(0, 0.1))
        _until(self._is_prefilling)

    def _aim_decode(self, victim: str) -> None:
        self._steady(6)
        self._some(6)
        _until(lambda: self._num_with_text() >= 3)
        time.sleep(self.random.uniform(0, 0.3))
        _until(lambda: self._num_with_text() >= 1)

    def _aim_settling(self, victim: str) -> None:
        """Equal chats that begin together end together. The kill comes right behind the first end: when it is
        in the worker's file, when a client has its last text, or when a client has its `[DONE]`."""
        self._steady(2)
        _until(lambda: self._num_with_text() >= 1)
        tail = Tail(self.server.progress_files()[-1])
        trigger = self._triggers[victim].pop() if self._triggers[victim] else "file"
        tokens = self.random.randint(6, 14)

        def on_event(chat: Chat) -> None:
            if chat.is_answered or (trigger == "text" and chat.chunks >= tokens):
                self._strike(victim)

        for number in range(6):
            chat = self._begin(LONG.format("one"), tokens, is_stream=number % 3 != 2)
            if trigger != "file":
                chat.on_event = on_event
        self._some(7)
        if trigger == "file":
            _until(tail.has_new_end, pause_s=0)
            # To the gateway and through its commit it takes the records less than a millisecond.
            _spin(self.random.choice((0, self.random.uniform(0, 0.0006))))
        else:
            _until(lambda: self._struck_us)

    def _steady(self, number: int) -> None:
        """Chats that run for longer than it takes to aim."""
        for one in range(number):
            self._begin(LONG.format(self.random.randint(2, 99)), 150, is_stream=one % 4 != 3)

    def _some(self, number: int) -> None:
        """Chats of any kind that wait behind the others."""
        for one in range(number):
            self._begin(LONG.format(self.random.randint(2, 99)), self._few(), is_stream=one % 2 == 0)

    def _few(self) -> int:
        return self.random.randint(4, 12)

    def _begin(self, content: str, max_tokens: int, *, is_stream: bool = True) -> Chat:
        chat = Chat(content, max_tokens, is_stream, is_usage_wanted=self.random.random() < 0.5)
        self.chats.append(chat)
        self._round.append(chat)
        self._threads.append(self.server.begin(chat))
        return chat

    # --- what is seen before a kill -------------------------------------------------------------------

    def _num_with_text(self) -> int:
        return sum(chat.chunks > 0 and not chat.is_over for chat in self._round)

    def _records(self) -> list[Any]:
        files = self.server.progress_files()
        return read_records(files[-1]) if files else []

    def _num_started(self) -> int:
        return sum(record.source == "progress_file" for record in self._records())

    def _is_prefilling(self) -> bool:
        return any(
            record.source == "progress_file" and not record.completion_tokens for record in self._records()
        )

    # --- the kill, and after it -------------------------------------------------------------------------

    def _strike(self, victim: str) -> int:
        """Kill, once a round; when that was."""
        with self._lock:
            if not self._struck_us:
                self._struck_us = self.server.strike(victim)
                self._num_waiting = sum(not chat.is_over for chat in self._round)
            return self._struck_us

    def _kill(self, kill: Kill) -> None:
        directory = self.copies / f"{kill.number:03}"
        kill.at_us = self._strike(kill.victim)
        kill.clients_waiting = self._num_waiting
        began = time.monotonic()
        self.server.wait_until_dead(kill.victim)
        if kill.victim == "server":
            copy_progress(self.server.progress_files(), directory)
            if self.random.random() < STILLBORN_SHARE:
                self.server.start_and_kill(self.random.uniform(0.1, 1.0))
                self.num_stillborn += 1
            kill.recovery_s = self.server.start()
        else:
            before = self.server.progress_files()
            copy_progress(before, directory)
            _until(lambda: set(self.server.progress_files()) - set(before), what="another worker process")
            kill.recovery_s = time.monotonic() - began
        for thread in self._threads:
            thread.join(SECONDS_MAX)
            if thread.is_alive():
                self.wrong.append(f"kill {kill.number}: a client waits for ever")

    def _check_idle(self, when: str) -> None:
        """Nothing is held and nothing runs; what was used in the last minute is what the ledger has."""

        def is_idle() -> bool:
            limits = self.server.limits()
            return not any(one["tokens_held"] or one["requests_running"] for one in limits)

        try:
            _until(is_idle, seconds=10)
        except AssertionError:
            self.wrong.append(f"{when}: /v1/limits still shows {self.server.limits()}")
        if self.server.metric("headrace_running") or self.server.metric("headrace_queue_length"):
            self.wrong.append(f"{when}: idle, and the metrics show requests")
        slack_us = 100_000
        ledger = Ledger(self.server.data)
        oldest_us = time.time_ns() // 1000 - 60_000_000
        used = next(one["tokens_used_60s"] for one in self.server.limits() if one["level"] == "tenant")
        newest_us = time.time_ns() // 1000 - 60_000_000
        at_least, at_most = _tokens(ledger, newest_us + slack_us), _tokens(ledger, oldest_us - slack_us)
        if not at_least <= used <= at_most:
            self.wrong.append(f"{when}: the limiter has {used} tokens, the ledger {at_least} to {at_most}")

    def _check_all_slots(self) -> None:
        """Two more chats than slots at the same time: all are answered, and every slot was in use."""
        self._threads, self._round = [], []
        for number in range(SLOTS + 2):
            self._begin(LONG.format(number), 40, is_stream=number % 2 == 0)
        try:
            _until(lambda: self.server.metric("headrace_running") == SLOTS, what="all slots in use")
        except AssertionError as error:
            self.wrong.append(str(error))
        for thread in self._threads:
            thread.join(SECONDS_MAX)
        answered = sum(chat.is_answered for chat in self._round)
        if answered != SLOTS + 2:
            self.wrong.append(f"after the last kill {answered} of {SLOTS + 2} chats were answered")
        self._check_idle("at the end")


def _plan(num_kills: int, chance: random.Random) -> list[tuple[str, str]]:
    """Victims by turns; for each the phases in shuffled rounds."""
    phases = [phase for phase, weight in WEIGHTS.items() for _ in range(weight)]
    decks: dict[str, list[str]] = {"server": [], "worker": []}
    plan = []
    for number in range(num_kills):
        victim = ("server", "worker")[number % 2]
        if not decks[victim]:
            decks[victim] = chance.sample(phases, len(phases))
        plan.append((victim, decks[victim].pop()))
    return plan


def _until(
    condition: Callable[[], Any], *, seconds: float = SECONDS_MAX, pause_s: float = 0.005, what: str = ""
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"never happened: {what or condition}")
        time.sleep(pause_s)


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _tokens(ledger: Ledger, since_us: int) -> int:
    return sum(
        row["prompt_tokens"] + row["completion_tokens"]
        for row in ledger.rows.values()
        if row["end_ts"] > since_us
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 of server and worker under load")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep data and copies even if all is well")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="headrace-kills-"))
    began = time.monotonic()
    trial = Trial(scratch, arguments.seed)
    try:
        trial.run(arguments.kills)
    finally:
        trial.server.stop()
    ledger, attempts = Ledger(trial.server.data), attempts_in(trial.copies)
    for kill in trial.kills:
        kill.phases = phases_at(kill, ledger, attempts)
    show(trial.kills)
    wrong = trial.wrong + violations(ledger, attempts, trial.chats, trial.kills)
    errors = uncaught_errors(trial.server.log)
    wrong += [f"server log: {error}" for error in errors]
    missed = missed_by(trial.kills)
    outcomes = Counter((row["outcome"], row["count_source"]) for row in ledger.rows.values())
    print(f"\n{len(ledger.rows)} operations, {len(attempts)} attempts noted by workers; rows:")
    print(json.dumps({f"{outcome} {source}": count for (outcome, source), count in sorted(outcomes.items())}))
    print(f"servers killed once more while they started: {trial.num_stillborn}")
    print(f"uncaught errors in the log: {dict(Counter(errors))}")
    print(f"seed {arguments.seed}, {time.monotonic() - began:.0f} s")
    for text in wrong:
        print(f"WRONG: {text}")
    for text in missed:
        print(f"MISSED: {text}")
    if wrong or missed or arguments.keep:
        print(f"evidence: {scratch}")
    else:
        shutil.rmtree(scratch)
    print("violations: " + (str(len(wrong)) if wrong else "none"))
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
