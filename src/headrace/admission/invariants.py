"""What is true of the state machine between any two calls. Checked in tests and in the simulation."""

from collections import Counter

from headrace.admission.controller import AdmissionController
from headrace.admission.entry import Phase
from headrace.limits.account import Account

_OPEN = frozenset({Phase.WAITING, Phase.DROPPED, Phase.GRANTED})


def check(controller: AdmissionController, now_us: int) -> None:
    """Raises `AssertionError` that says which invariant does not hold."""
    entries = list(controller.entries.values())
    assert all(entry.phase in _OPEN for entry in entries), "an ended operation is open"
    assert all(entry.phase is Phase.EXPIRED for entry in controller.expired.values())
    granted = [entry for entry in entries if entry.phase is Phase.GRANTED]
    held: Counter[Account] = Counter()
    running: Counter[Account] = Counter()
    streams: Counter[Account] = Counter()
    memory: Counter[Account] = Counter()
    for entry in entries:
        assert entry.held >= 0
        for account in entry.accounts:
            held[account] += entry.held
    for entry in entries:
        assert entry.memory == entry.needed(), (
            f"{entry.request_id} has {entry.memory}, needs {entry.needed()}"
        )
    for entry in granted:
        for account in entry.accounts:
            running[account] += 1
            streams[account] += entry.is_stream
            memory[account] += entry.memory
    for account in {*controller.accounts.all(), *held}:
        name = f"{account.level} {account.account_id!r}"
        assert account.window.held == held[account], (
            f"{name} holds {account.window.held}, not {held[account]}"
        )
        assert account.running == running[account], f"{name} runs {account.running}, not {running[account]}"
        assert account.streams == streams[account], (
            f"{name} streams {account.streams}, not {streams[account]}"
        )
        assert account.memory == memory[account], (
            f"{name} holds {account.memory} bytes of memory, not {memory[account]}"
        )
        assert account.memory >= 0
        assert account.memory_max is not None or not account.throttled_until_us, f"{name} has no memory limit"
        assert account.window.used(now_us) >= 0
    for model_id, queue in controller.queues.items():
        waiting = [e for e in entries if e.model_id == model_id and e.phase is Phase.WAITING]
        assert queue.num_waiting == len(waiting), f"{model_id}: {queue.num_waiting} wait, not {len(waiting)}"
        assert queue.waiting_tokens == sum(entry.held for entry in waiting)
        for replica_id, capacity, taken in queue.places():
            owned = sum(entry.replica_id == replica_id for entry in granted)
            assert taken == owned, f"{replica_id}: {taken} of {capacity} taken, {owned} owned"
