"""The settings of the embedded engine."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from headrace.config.settings import EngineLibrary
from headrace.errors import ConfigError

SEQUENCES_MAX = 256
BATCH_TOKENS_MAX = 8192


class LlamaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to load a model and how much it may hold. Lengths in tokens."""

    model_path: Path
    library: EngineLibrary = "wheel"
    sequences: int = 32
    """Slots: how many sequences run side by side."""
    context_tokens: int = 2048
    """Most tokens of one sequence, prompt and output together."""
    batch_tokens: int = 512
    """Most tokens of one forward call."""
    threads: int | None = None
    """Threads that compute. None: one less than the cores this process may use, at least one."""
    kv_layout: Literal["per_sequence", "unified"] = "per_sequence"
    """`per_sequence` gives each slot its own memory: faster, and a sequence's logits do not depend on
    the others. `unified` lets sequences share a common prefix."""
    kv_tokens: int | None = None
    """Most tokens that all slots together are to hold. None: `sequences` times `context_tokens`. In the unified layout only
    so much memory is reserved, rounded up to a multiple of 256 tokens; in the other one each slot has its own anyway."""
    flash_attention: bool = True
    weights_sha256: str | None = None
    """Of the model file, where it is known."""

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        for name, value, least, most in (
            ("sequences", self.sequences, 1, SEQUENCES_MAX),
            ("context_tokens", self.context_tokens, 1, 1 << 24),
            ("batch_tokens", self.batch_tokens, 1, BATCH_TOKENS_MAX),
            ("threads", self.thread_count, 1, 1024),
            ("kv_tokens", self.kv_tokens_max, 1, self.sequences * self.context_tokens),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} must be between {least} and {most}, not {value}.")
        if self.batch_tokens < self.sequences:
            raise ConfigError(
                f"batch_tokens ({self.batch_tokens}) must be at least sequences ({self.sequences}): "
                "otherwise not every sequence could decode in one call."
            )

    @property
    def batch_capacity(self) -> int:
        """`batch_tokens`, but no more than all slots together hold: llama.cpp cuts it to that."""
        return min(self.batch_tokens, self.pool_tokens or self.sequences * self.context_tokens)

    @property
    def kv_tokens_max(self) -> int:
        """`kv_tokens`, or its default."""
        return self.kv_tokens or self.sequences * self.context_tokens

    @property
    def pool_tokens(self) -> int | None:
        """Cells of the pool that all slots take from; None where each has its own."""
        return self.kv_tokens_max if self.kv_layout == "unified" else None

    @property
    def thread_count(self) -> int:
        """`threads`, or its default for this machine."""
        if self.threads is not None:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) - 1)
