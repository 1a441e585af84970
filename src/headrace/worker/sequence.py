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
        "last_token",
        "max_tokens",
        "opened_us",
        "order",
        "prompt",
        "sampling",
        "slot",
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
        """Prompt tokens that are in the KV cache, those that were there before included."""
        self.generated = 0
        self.tokens: list[int] = []
        """What was generated."""
        self.last_token = -1
        self.opened_us = 0
        self.started_ts = 0
        self.first_token_us = 0
        self.first_token_ts = 0
        self._kv_token_us = 0
        self._last_change_us = 0

    @property
    def is_prefilling(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def kv_tokens(self) -> int:
        """KV cells in use. The newest token is not in the cache before the next step computes it."""
        return self.computed + max(0, self.generated - 1)

    @property
    def wanted(self) -> Wanted:
        """What it asks of the slots."""
        return Wanted(tenant=self.tenant_id, prompt=self.prompt, cacheable=self.cacheable, order=self.order)

    def opened(self, slot: int, *, cached: int, now_us: int, wall_us: int) -> None:
        self.slot = slot
        self.cached = self.computed = cached
        self.opened_us = self._last_change_us = now_us
        self.started_ts = wall_us

    def grew(self, *, now_us: int) -> None:
        """Account the memory held since the last change. Call before the cell count changes."""
        self._kv_token_us += self.kv_tokens * (now_us - self._last_change_us)
        self._last_change_us = now_us

    def drew(self, token: int, *, now_us: int, wall_us: int) -> None:
        """Take in a generated token."""
        self.generated += 1
        self.last_token = token
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
        has_run = self.slot >= 0
        if has_run:
            self.grew(now_us=now_us)
        prefill_end_us = self.first_token_us or now_us
        return AttemptRecord(
            attempt_id=self.attempt_id,
            tenant_id=self.tenant_id,
            prompt_tokens=len(self.prompt),
            prompt_tokens_computed=self.computed,
            prompt_tokens_cached=self.cached,
            completion_tokens=self.generated,
            finish_reason=reason,
            error=error,
            kv_bytes_peak=self.kv_tokens * info.kv_bytes_per_token,
            kv_byte_seconds=self._kv_token_us * info.kv_bytes_per_token // 1_000_000,
            queued_us=(self.opened_us if has_run else now_us) - self.arrived_us,
            prefill_us=prefill_end_us - self.opened_us if has_run else 0,
            decode_us=now_us - self.first_token_us if self.first_token_us else 0,
            started_ts=self.started_ts or None,
            first_token_ts=self.first_token_ts or None,
            ended_ts=wall_us,
        )
