"""One attempt inside the engine loop: its tokens, its text and its counts."""

from headrace.caching.slots import KEPT_IN_FULL, CacheOrder, Wanted
from headrace.engine.protocol import EngineInfo
from headrace.request.sampling import Sampling
from headrace.worker.messages import AttemptRecord, FinishReason
from headrace.worker.text import TextAssembler


class Sequence:
    """An attempt from its arrival in the loop to its record. Belongs to the engine thread."""

    __slots__ = (
        "_kv_token_us",
        "_last_change_us",
        "_left_us",
        "_suspended_us",
        "arrived_us",
        "attempt_id",
        "batch_wait_ms",
        "cacheable",
        "cached",
        "computed",
        "connection_id",
        "first_token_ts",
        "first_token_us",
        "generated",
        "held",
        "max_tokens",
        "opened_us",
        "order",
        "peak",
        "preemptions",
        "prompt",
        "recomputed",
        "sampling",
        "slot",
        "start",
        "started_ts",
        "tenant_id",
        "text",
        "tokens",
    )

    def __init__(
        self,
        *,
        attempt_id: str,
        tenant_id: str,
        connection_id: int,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        stop: list[str],
        arrived_us: int,
        order: CacheOrder = KEPT_IN_FULL,
        cacheable: int = 0,
        batch_wait_ms: float | None = None,
    ) -> None:
        assert prompt and max_tokens >= 1
        self.attempt_id = attempt_id
        self.tenant_id = tenant_id
        self.connection_id = connection_id
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.text = TextAssembler(stop)
        self.arrived_us = arrived_us
        self.slot = -1
        self.order = order
        self.cacheable = cacheable
        """So many of the prompt's first tokens the client has marked as worth keeping."""
        self.batch_wait_ms = batch_wait_ms
        """How long it waits for company; None leaves it to the loop."""
        self.cached = 0
        """So many of them were there before this attempt."""
        self.computed = 0
        """Prompt tokens that have been in the KV cache, those that were there before included."""
        self.held = 0
        """KV cells in use now. The newest token is not in the cache before the next step computes it."""
        self.peak = 0
        """Most of them so far."""
        self.start = prompt
        """What is read in before the next token can be drawn: the prompt; after a preemption, what came after it too."""
        self.generated = 0
        self.tokens: list[int] = []
        """What was generated."""
        self.preemptions = 0
        self.recomputed = 0
        """Tokens computed again after preemptions."""
        self.opened_us = 0
        """When it first got a slot."""
        self.started_ts = 0
        self.first_token_us = 0
        self.first_token_ts = 0
        self._kv_token_us = 0
        self._last_change_us = 0
        self._left_us = 0
        self._suspended_us = [0, 0]
        """Without a slot after a preemption, before and after the first token."""

    @property
    def has_run(self) -> bool:
        """Whether it has ever had a slot."""
        return self.started_ts > 0

    @property
    def is_prefilling(self) -> bool:
        return self.held < len(self.start)

    @property
    def next_token(self) -> int:
        """The generated token that a decode step has to compute next."""
        return self.tokens[self.held - len(self.prompt)]

    @property
    def is_next_new(self) -> bool:
        """Whether what follows that token is still to be drawn. False while generated tokens are replayed."""
        return self.held == len(self.prompt) + self.generated - 1

    @property
    def wanted(self) -> Wanted:
        """What it asks of the slots."""
        return Wanted(
            tenant=self.tenant_id,
            prompt=self.start,
            cacheable=self.cacheable,
            order=self.order,
            is_answered=self.generated > 0,
        )

    @property
    def kept_tokens(self) -> list[int]:
        """What of the answer has been computed behind `start`: the newest token never is."""
        begin = len(self.start) - len(self.prompt)
        return self.tokens[begin : max(begin, self.held - len(self.prompt))]

    def opened(self, slot: int, *, held: int, now_us: int, wall_us: int) -> None:
        """It has a slot, and `held` tokens are in it already."""
        if self.has_run:
            self._suspended_us[self.generated > 0] += now_us - self._left_us
        else:
            self.cached = self.computed = self.peak = held
            self.opened_us, self.started_ts = now_us, wall_us
        self.slot = slot
        self.held = held
        self._last_change_us = now_us

    def grew(self, tokens: int, *, now_us: int) -> None:
        """So many more tokens have been computed: account the memory held until now, and the work."""
        self._account(now_us)
        self.recomputed += max(0, min(self.held + tokens, self.peak) - self.held)
        self.held += tokens
        self.peak = max(self.peak, self.held)
        self.computed = max(self.computed, min(self.held, len(self.prompt)))

    def preempted(self, *, now_us: int, is_replayed: bool) -> None:
        """Its slot is another's now. `is_replayed`: what it has generated will be computed token by token again."""
        self._account(now_us)
        self._left_us = now_us
        self.preemptions += 1
        self.held = 0
        self.start = self.prompt if is_replayed else self.prompt + self.tokens[:-1]

    def _account(self, now_us: int) -> None:
        self._kv_token_us += self.held * (now_us - self._last_change_us)
        self._last_change_us = now_us

    def drew(self, token: int, *, now_us: int, wall_us: int) -> None:
        """Take in a generated token."""
        self.generated += 1
        self.tokens.append(token)
        if self.generated == 1:
            self.first_token_us = now_us
            self.first_token_ts = wall_us

    def record(
        self,
        reason: FinishReason,
        *,
        info: EngineInfo,
        now_us: int,
        wall_us: int,
        error: str | None = None,
    ) -> AttemptRecord:
        """The final count. Call once, when the sequence has left the engine."""
        has_run = self.has_run
        if has_run:
            self._account(now_us)
            if self.slot < 0:
                self._suspended_us[self.generated > 0] += now_us - self._left_us
        prefill_end_us = (self.first_token_us or now_us) - self._suspended_us[0]
        return AttemptRecord(
            attempt_id=self.attempt_id,
            tenant_id=self.tenant_id,
            prompt_tokens=len(self.prompt),
            prompt_tokens_computed=self.computed,
            prompt_tokens_cached=self.cached,
            completion_tokens=self.generated,
            finish_reason=reason,
            error=error,
            kv_bytes_peak=self.peak * info.kv_bytes_per_token,
            kv_byte_seconds=self._kv_token_us * info.kv_bytes_per_token // 1_000_000,
            queued_us=(self.opened_us if has_run else now_us) - self.arrived_us,
            prefill_us=prefill_end_us - self.opened_us if has_run else 0,
            decode_us=now_us - self.first_token_us - self._suspended_us[1] if self.first_token_us else 0,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
            started_ts=self.started_ts or None,
            first_token_ts=self.first_token_ts or None,
            ended_ts=wall_us,
        )
