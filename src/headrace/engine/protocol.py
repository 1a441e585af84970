"""The seam between headrace and whatever computes tokens.

An engine owns weights and KV memory. It computes what it is told to, when it is told to: which
sequences run, in which order and in which portions is decided by the worker's loop, never here.

Two implementations: `headrace.engine.llama` (llama.cpp's C API) and `headrace.engine.stub`
(deterministic, for simulation and load tests).

Threads: `tokenize` and the vocabulary calls may come from any thread. `open`, `forward` and `close`
come from one thread only, the engine thread.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace import bounds
from headrace.request.sampling import Sampling as Sampling


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded engine is and can hold. Sizes in bytes, lengths in tokens."""

    backend: str
    """Name and version of the library that computes, e.g. `llama.cpp 11549 (xllamacpp 2026.10.11549)`."""
    model: str
    """The model's own name, from its file."""
    architecture: str
    quantization: str
    parameters: int
    context_tokens: int
    """Most tokens one sequence may hold, prompt and output together."""
    sequences: int
    """How many sequences run side by side (slots 0 to sequences - 1)."""
    batch_tokens: int
    """Most tokens of one `forward` call."""
    portion_grain: int = bounds.CHUNK_GRAIN
    """Prompts are computed by multiples of so many tokens: fewer would take about as long."""
    context_cost: float = 0.0
    """What each token before a prompt token adds to the time that it takes, as a part of the time it takes behind none."""
    kv_tokens: int
    """Most tokens that all slots together may hold. Less than `sequences` times `context_tokens`: memory can run short."""
    is_kv_unified: bool
    """Whether all slots take their cells from one pool and share copied beginnings; else each has its own."""
    vocabulary: int
    weights_bytes: int
    kv_bytes: int
    """KV memory reserved for all sequences together."""
    kv_bytes_per_token: int
    threads: int
    state_key: str
    """Engines with the same key can restore each other's saved states."""

    @property
    def request_tokens_max(self) -> int:
        """Most tokens, prompt and output together, with which a sequence can come to its end."""
        return min(self.context_tokens, self.kv_tokens)


class Span(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence to compute in a `forward` call."""

    slot: int
    start: int
    """Position of the first token: the number of tokens this slot already holds."""
    tokens: list[int]
    is_sampled: bool
    """Draw the token that follows the span. False while more of the prompt is to come."""


class Forward(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one `forward` call. Times in seconds."""

    tokens: list[int]
    """One entry per span: the token drawn, or -1 where none was asked for."""
    compute_s: float
    sample_s: float


class Vocabulary(Protocol):
    """Text to tokens and back. Callable from any thread."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja template in the model file; None when it has none."""
        ...

    @property
    def special_texts(self) -> Sequence[str]:
        """The spellings of all control tokens, longest first (`<|im_start|>` and the like)."""
        ...

    @property
    def token_bytes_max(self) -> int:
        """Bytes of the longest token, control tokens included."""
        ...

    @property
    def bos_text(self) -> str: ...

    @property
    def eos_text(self) -> str: ...

    def tokenize(self, text: str, *, is_special_parsed: bool, is_start: bool) -> list[int]:
        """Tokens of `text`.

        With `is_special_parsed`, spellings of control tokens become these tokens; without, they are
        plain text. With `is_start`, the model's beginning-of-sequence token is put in front if the
        model asks for one and the text does not begin with it.
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; may be a part of a UTF-8 character. Empty for control tokens."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""
        ...


class Engine(Protocol):
    """Weights, KV memory and the forward pass."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def open(self, slot: int, sampling: Sampling, *, held: int = 0, drawn: int = 0) -> None:
        """Prepare a slot for a sequence that begins with the first `held` tokens the slot still holds.

        What it holds beyond them is dropped. `drawn`: tokens of its answer that were drawn before it was preempted.
        """
        ...

    def forward(self, spans: Sequence[Span]) -> Forward:
        """Compute the spans in one batch, at most `info.batch_tokens` tokens, each slot at most once.

        Blocks, without holding the interpreter lock while it computes.

        Raises `EngineFault` when the library reports a failure; the slots' KV is then undefined and
        they have to be closed.
        """
        ...

    def close(self, slot: int, *, keep: int = 0) -> None:
        """End the slot's sequence; its first `keep` tokens stay in KV memory for another one, the rest is dropped.

        Closing a slot that is not open drops what it holds.
        """
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a slot that is not open the first `length` tokens of another one, which may be running."""
        ...

    def save(self, slot: int) -> bytes:
        """All that a slot holds, to be restored into any slot of an engine with the same weights and layout."""
        ...

    def restore(self, slot: int, state: bytes, length: int) -> None:
        """Give a slot that is not open what was saved; it holds `length` tokens then.

        Raises `EngineFault` if the state is not one of this engine; the slot is empty then.
        """
        ...

    def held(self, slot: int) -> int:
        """Tokens that a slot holds, by the engine's own books."""
        ...

    def cells_used(self) -> int:
        """KV cells in use, by the engine's own books: one that several slots share counts once. Slow: for debug builds."""
        ...

    def shutdown(self) -> None:
        """Release weights and KV. No call may follow."""
        ...
