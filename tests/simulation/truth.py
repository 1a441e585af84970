"""What really happened, seen from outside the code under test.

Two sources: the engine (which token went to which attempt, and when) and the core's border (`accept`
returned or refused, the journal was told that an operation ended). From these an independent model of the
limits is kept; it never looks at the limiter's own counters.
"""

from collections import deque
from collections.abc import Callable, Iterable

from headrace.config.limits import Limits
from headrace.engine.stub import StubVocabulary
from headrace.errors import Refusal
from headrace.ledger.records import OperationRecord, Reservation
from headrace.request.sampling import Sampling
from headrace.worker.sequence import Sequence

MINUTE_US = 60_000_000
GRACE_US = 60_000_000
"""A limit that was lowered may be exceeded for so long by what had started before."""
REQUEST_SECONDS_MAX = 60

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
        self, reservation: Reservation, accounts: tuple[AccountName, ...], life: int, held: int
    ) -> None:
        self.request_id = reservation.request_id
        self.is_stream = reservation.mode == "stream"
        self.reserved = reservation.reserved_tokens
        self.held = held
        """What the operation can still come to, its prompt counted."""
        self.accounts = accounts
        self.life = life
        self.num_settled = 0


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

    def set_limits(self, limits: Limits, now_us: int) -> None:
        self.history.append((now_us, self.limits))
        self.limits = limits

    def used(self, now_us: int) -> int:
        while self.settled and self.settled[0][0] <= now_us - MINUTE_US:
            self.settled.popleft()
        return sum(tokens for _, tokens in self.settled)

    def held(self) -> int:
        return sum(one.held for one in self.open.values())

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

    def __init__(self, violated: Callable[[str], None], now_us: Callable[[], int]) -> None:
        self.violated = violated
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

    def accepted(self, reservation: Reservation, life: int, *, held: int) -> None:
        now_us = self._now_us()
        names = accounts_of(reservation)
        operation = Operation(reservation, names, life, held)
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
        if operation.num_settled > 1:
            self.violated(f"{record.request_id} was settled twice")
        if used > operation.held:
            self.violated(f"{record.request_id} held {operation.held} tokens and used {used}")
        now_us = self._now_us()
        for name in operation.accounts:
            account = self.account(*name)
            account.open.pop(record.request_id, None)
            if record.outcome == "expired":  # a worker that cannot be heard may go on with it for a while
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
        for account in self.accounts.values():
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
        now_us = self._now_us()
        for name in operation.accounts:
            account = self.account(*name)
            account.on_workers[operation.request_id] = operation
            running = len(account.on_workers)
            streams = sum(one.is_stream for one in account.on_workers.values())
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
