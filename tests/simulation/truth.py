"""What really happened, seen from outside the code under test.

Two sources: the engine (which token went to which attempt, and when) and the core's border (`accept`
returned or refused, the journal was told that an operation ended). From these an independent model of the
limits is kept; it never looks at the limiter's own counters.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from headrace.config.limits import Limits
from headrace.config.settings import ModelSettings, Settings
from headrace.engine.stub import StubVocabulary
from headrace.errors import Refusal
from headrace.ledger.records import OperationRecord, Reservation
from headrace.request.sampling import Sampling
from headrace.worker.sequence import Sequence

MINUTE_US = 60_000_000
GRACE_US = 60_000_000
"""A limit that was lowered may be exceeded for so long by what had started before."""
REQUEST_SECONDS_MAX = 60
ANSWERS = 20
"""So many of a tenant's last ones say how long the next may become."""
KILOBYTE = 1024
"""What a token takes in the stub."""

AccountName = tuple[str, str]
_vocabulary = StubVocabulary()


class Attempt:
    """What an engine did for an attempt."""

    def __init__(self, attempt_id: str, *, stop: tuple[str, ...]) -> None:
        self.attempt_id = attempt_id
        self.computed = 0
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.before = (0, 0)
        """Prompt tokens computed and tokens drawn before the last call of the engine."""
        self.is_unsure = False
        """Its worker died while it noted that call: it may count or not."""
        self._stop = stop

    @property
    def counts(self) -> set[tuple[int, int]]:
        """(prompt tokens computed, tokens drawn): what may be charged. One, unless it is unsure."""
        now = (self.computed, len(self.tokens))
        return {now, self.before} if self.is_unsure else {now}

    def text(self, num_tokens: int | None = None) -> str:
        """All that a client may have been shown, of so many tokens."""
        text = b"".join(map(_vocabulary.token_bytes, self.tokens[:num_tokens])).decode()
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else text


class Operation:
    """An accepted request."""

    def __init__(
        self,
        reservation: Reservation,
        accounts: tuple[AccountName, ...],
        life: int,
        held: int,
        size: "MemorySize",
    ) -> None:
        self.request_id = reservation.request_id
        self.size = size
        self.is_stream = reservation.mode == "stream"
        self.reserved = reservation.reserved_tokens
        self.held = held
        """What the operation can still come to, its prompt counted."""
        self.accounts = accounts
        self.life = life
        self.num_settled = 0
        self.is_expired = False
        """Its lease ran out: a worker that cannot be heard may go on with it, or even begin it, for a while."""


@dataclass
class MemorySize:
    """What an operation needs of a worker's memory, as far as it can be known from outside."""

    base: int
    """Bytes for itself, and for each token."""
    per_token: int
    prompt_tokens: int
    """Counted, not a bound."""
    output_tokens: int
    """The longest of its tenant's last answers of the model, or the longest it may have."""
    is_rule_known: bool
    """Otherwise it came before a worker had said what a token takes, and was reckoned with much more."""

    def at_least(self, held: int) -> int:
        return self.base + self.per_token * min(self.prompt_tokens + self.output_tokens, held)

    def at_most(self, reserved: int) -> int:
        return self.base + self.per_token * reserved


class Account:
    """The independent model of one account."""

    def __init__(self, name: AccountName) -> None:
        self.name = name
        self.limits = Limits()
        self.history: deque[tuple[int, Limits]] = deque()
        self.settled: deque[tuple[int, int]] = deque()
        self.open: dict[str, Operation] = {}
        self.tat_us = 0
        self.on_workers: dict[str, Operation] = {}
        self.throttled_until_us = 0
        """It was refused memory before, and its limit has been there ever since."""
        self.may_wait_until_us = 0
        """The same, whatever has become of the limit."""

    def set_limits(self, limits: Limits, now_us: int) -> None:
        self.history.append((now_us, self.limits))
        self.limits = limits
        if limits.gpu_memory_gb is None:
            self.throttled_until_us = 0

    def used(self, now_us: int) -> int:
        while self.settled and self.settled[0][0] <= now_us - MINUTE_US:
            self.settled.popleft()
        return sum(tokens for _, tokens in self.settled)

    def held(self) -> int:
        return sum(one.held for one in self.open.values())

    def memory_at_least(self) -> int:
        """Bytes that what is on workers needs."""
        return sum(one.size.at_least(one.held) for one in self.on_workers.values())

    def memory_at_most(self) -> int | None:
        """Bytes that all that is open could hold; None where that cannot be said."""
        if not all(one.size.is_rule_known for one in self.open.values()):
            return None
        return sum(one.size.at_most(one.reserved) for one in self.open.values())

    def most(self, dimension: str, now_us: int) -> float | None:
        """The largest limit that was in force lately; None for none."""
        values = [getattr(self.limits, dimension)]
        values += [
            getattr(limits, dimension) for until_us, limits in self.history if until_us > now_us - GRACE_US
        ]
        return None if None in values else max(values)

    def rate_wait_us(self, now_us: int) -> int:
        rps = self.limits.rps
        if rps is None:
            return 0
        interval_us = -int(-1_000_000 // rps)
        return max(0, self.tat_us - now_us - (max(1, int(rps)) - 1) * interval_us)


class Truth:
    """The record of a world."""

    def __init__(
        self, violated: Callable[[str], None], now_us: Callable[[], int], settings: Settings
    ) -> None:
        self.violated = violated
        self._throttle_us = int(settings.memory_throttle_s * 1e6)
        self._rules = {model.id: _rule(model) for model in settings.models}
        self._answers: dict[tuple[str, str], list[int]] = {}
        """The last ones of each tenant and model."""
        self._now_us = now_us
        self.attempts: dict[str, Attempt] = {}
        self.operations: dict[str, Operation] = {}
        self.refused: dict[str, str] = {}
        self.accounts: dict[AccountName, Account] = {}
        self.crashed_lives: set[int] = set()
        self.on_token: Callable[[Attempt], None] = lambda attempt: None
        self._by_seed: dict[int, Attempt] = {}

    def account(self, level: str, account_id: str) -> Account:
        name = (level, account_id)
        found = self.accounts.get(name)
        if found is None:
            found = self.accounts[name] = Account(name)
        return found

    # --- the core's border ------------------------------------------------------------------------

    def accepted(
        self, reservation: Reservation, life: int, *, held: int, prompt: int, maximum: int, is_ready: bool
    ) -> None:
        """`is_ready`: every model has had a worker in this life."""
        now_us = self._now_us()
        names = accounts_of(reservation)
        answers = self._answers.get((reservation.tenant_id, reservation.model))
        size = MemorySize(
            *self._rules[reservation.model],
            prompt_tokens=prompt,
            output_tokens=min(maximum, max(answers)) if answers else maximum,
            is_rule_known=is_ready,
        )
        operation = Operation(reservation, names, life, held, size)
        self._check_memory_at_entry(operation, now_us)
        if reservation.request_id in self.operations:
            self.violated(f"{reservation.request_id} was accepted twice")
        self.operations[operation.request_id] = operation
        for name in names:
            account = self.account(*name)
            account.open[operation.request_id] = operation
            self._check_tokens(account, now_us)
            wait_us = account.rate_wait_us(now_us)
            if wait_us:
                self.violated(f"{name} let a request pass {wait_us} µs before its rate allows")
            if account.limits.rps is not None:
                interval_us = -int(-1_000_000 // account.limits.rps)
                account.tat_us = max(account.tat_us, now_us) + interval_us

    def turned_away(self, reservation: Reservation, refusal: Refusal) -> None:
        """A refusal by a limit has to be justified by what was accepted and settled."""
        self.refused[reservation.request_id] = refusal.code
        limit_type, level = refusal.details.get("limit_type"), refusal.details.get("level")
        now_us = self._now_us()
        for name in accounts_of(reservation):
            if name[0] != level:
                continue
            account = self.account(*name)
            if limit_type == "rps" and not account.rate_wait_us(now_us):
                self.violated(f"{name} refused a request that its rate allows: refusals are counted")
            if limit_type == "memory":
                self._check_refused_memory(reservation, account, refusal.details, now_us)
            if limit_type == "tpm":
                assert account.limits.tpm is not None
                reserved = sum(one.reserved for one in account.open.values())
                total = account.used(now_us) + reserved + refusal.details["requested"]
                if total <= account.limits.tpm:
                    self.violated(
                        f"{name} refused {refusal.details['requested']} tokens although only {total} of "
                        f"{account.limits.tpm} are settled, held or asked for"
                    )

    def settled(self, record: OperationRecord) -> None:
        """The journal was told how an operation ended."""
        operation = self.operations.get(record.request_id)
        used = record.charged_prompt_tokens + record.charged_completion_tokens
        if operation is None:
            if used or record.attempt_ids:
                self.violated(f"{record.request_id} was never accepted and is charged {used} tokens")
            return
        operation.num_settled += 1
        operation.is_expired = record.outcome == "expired"
        if operation.num_settled > 1:
            self.violated(f"{record.request_id} was settled twice")
        if used > operation.held:
            self.violated(f"{record.request_id} held {operation.held} tokens and used {used}")
        now_us = self._now_us()
        self._remember_answer(record)
        for name in operation.accounts:
            account = self.account(*name)
            account.open.pop(record.request_id, None)
            if operation.is_expired:
                account.on_workers.pop(record.request_id, None)
            if used:
                account.settled.append((now_us, used))

    def settled_late(self, record: OperationRecord) -> None:
        """What an expired operation used became known."""
        operation = self.operations[record.request_id]
        used = record.charged_prompt_tokens + record.charged_completion_tokens
        for name in operation.accounts:
            if used:
                self.account(*name).settled.append((self._now_us(), used))

    def core_died(self, durable: Iterable[OperationRecord], monotonic_us: Callable[[int], int]) -> None:
        """What was held in memory is gone; what was settled is what the ledger has."""
        for operation in self.operations.values():
            operation.num_settled = 0
        self._answers.clear()
        for account in self.accounts.values():
            account.throttled_until_us = account.may_wait_until_us = 0
            account.open.clear()
            account.settled.clear()
            account.tat_us = 0
        for record in durable:
            if record.request_id in self.operations:
                self.operations[record.request_id].num_settled = 1
            used = record.charged_prompt_tokens + record.charged_completion_tokens
            for name in accounts_of(record):
                if used:
                    self.account(*name).settled.append((monotonic_us(record.end_ts), used))

    def _remember_answer(self, record: OperationRecord) -> None:
        """As LI-6 says: a sliding window of the tenant's recent outputs."""
        tokens = record.completion_tokens
        if not tokens or record.outcome == "recovered":
            return
        answers = self._answers.setdefault((record.tenant_id, record.model), [])
        if record.outcome == "completed" or (answers and tokens > max(answers)):
            answers.append(tokens)
            del answers[:-ANSWERS]
        if not answers:
            del self._answers[record.tenant_id, record.model]

    def _check_memory_at_entry(self, operation: Operation, now_us: int) -> None:
        """Who is not throttled is not let in beside what leaves it no room."""
        accounts = [self.account(*name) for name in operation.accounts]
        if any(account.may_wait_until_us > now_us for account in accounts):
            return
        own = operation.size.at_least(operation.held)
        for account in accounts:
            most = account.most("gpu_memory_gb", now_us)
            if most is not None and account.memory_at_least() + own > most * 2**30:
                self.violated(f"{account.name}: {own} bytes were let in, {most} GB of memory are not there")

    def _check_memory_on_workers(self, account: Account, now_us: int) -> None:
        most, needed = account.most("gpu_memory_gb", now_us), account.memory_at_least()
        if most is not None and needed > most * 2**30:
            self.violated(f"{account.name}: {needed} bytes on workers, memory is limited to {most} GB")

    def _check_refused_memory(
        self, reservation: Reservation, account: Account, said: dict[str, Any], now_us: int
    ) -> None:
        """Refused for good if it is too large alone; else only who is not throttled, for want of room."""
        is_final = said["reset_time"] is None
        if is_final:
            if said["requested"] <= said["limit"]:
                self.violated(f"{account.name} refused {said['requested']} GB of {said['limit']} for good")
            return
        names = accounts_of(reservation)
        if any(self.account(*name).throttled_until_us > now_us for name in names):
            self.violated(f"{account.name} refused memory to {reservation.request_id}, which was throttled")
        if account.name[0] not in ("cluster", "model"):
            account.throttled_until_us = account.may_wait_until_us = now_us + self._throttle_us
        held = account.memory_at_most()
        if held is not None and held + said["requested"] * 2**30 + KILOBYTE <= said["limit"] * 2**30:
            self.violated(
                f"{account.name} refused {said['requested']} GB beside {held} bytes, there was room"
            )

    def _check_tokens(self, account: Account, now_us: int) -> None:
        tpm = account.limits.tpm
        if tpm is None:
            return
        used, held = account.used(now_us), account.held()
        if used + held > tpm:
            self.violated(f"{account.name}: {used} settled and {held} held tokens exceed {tpm} per minute")

    # --- the engines' side ------------------------------------------------------------------------

    def submitted(self, sequence: Sequence, *, stop: tuple[str, ...]) -> None:
        """A worker took an attempt: its prompt is counted from here on."""
        if sequence.attempt_id in self.attempts:
            self.violated(f"{sequence.attempt_id} was submitted to an engine twice")
        attempt = self.attempts[sequence.attempt_id] = Attempt(sequence.attempt_id, stop=stop)
        attempt.prompt = sequence.prompt
        self._by_seed[sequence.sampling.seed or 0] = attempt
        operation = self.operation_of(sequence.attempt_id)
        if operation is None:
            self.violated(f"{sequence.attempt_id} runs and was never accepted")
            return
        operation.held = min(operation.held, len(sequence.prompt) + sequence.max_tokens)
        if operation.is_expired:  # the order to begin was held up on its way
            return
        now_us = self._now_us()
        for name in operation.accounts:
            account = self.account(*name)
            account.on_workers[operation.request_id] = operation
            running = len(account.on_workers)
            streams = sum(one.is_stream for one in account.on_workers.values())
            self._check_memory_on_workers(account, now_us)
            for dimension, number in (("concurrency", running), ("streams", streams)):
                most = account.most(dimension, now_us)
                if most is not None and number > most:
                    self.violated(f"{name}: {number} on workers, {dimension} is limited to {most}")

    def finished(self, attempt_id: str) -> None:
        """The attempt has left its worker."""
        operation = self.operation_of(attempt_id)
        if operation is not None:
            for name in operation.accounts:
                self.account(*name).on_workers.pop(operation.request_id, None)

    def attempt_of_request(self, request_id: str) -> Attempt | None:
        """The one attempt of a request that reached an engine; those sent back before do not count."""
        found = [one for one in self.attempts.values() if one.attempt_id.rpartition(".")[0] == request_id]
        if len(found) > 1:
            self.violated(f"{request_id} reached engines {len(found)} times")
        return found[0] if found else None

    def operation_of(self, attempt_id: str) -> Operation | None:
        return self.operations.get(attempt_id.rpartition(".")[0])

    def attempt_of(self, sampling: Sampling) -> Attempt:
        return self._by_seed[sampling.seed or 0]


def _rule(model: ModelSettings) -> tuple[int, int]:
    """Bytes for a request, and for each of its tokens."""
    if model.memory is None:
        return 0, KILOBYTE
    return int(model.memory.base_mb * 2**20), int(model.memory.mb_per_token * 2**20)


def accounts_of(one: Reservation | OperationRecord) -> tuple[AccountName, ...]:
    tenant = one.tenant_id
    names = [
        ("cluster", ""),
        ("model", one.model),
        ("tenant", tenant),
        ("tenant_model", f"{tenant}/{one.model}"),
        ("key", one.api_key_id),
    ]
    if one.department is not None:
        names.append(("department", f"{tenant}/{one.department}"))
    if one.user_id is not None:
        names.append(("user", f"{tenant}/{one.user_id}"))
    return tuple(names)
