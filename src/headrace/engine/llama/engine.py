"""The engine on llama.cpp: slots of one context, computed batch by batch."""

import time
from collections.abc import Sequence
from typing import Self

import numpy as np

from headrace.engine.llama import definitions
from headrace.engine.llama.batch import Batch
from headrace.engine.llama.context import LlamaContext
from headrace.engine.llama.library import Library, open_library
from headrace.engine.llama.model import LlamaModel
from headrace.engine.llama.sampling import GREEDY_TEMPERATURE_MAX, Logits, greedy_tokens, sample_token
from headrace.engine.llama.settings import LlamaSettings
from headrace.engine.llama.vocabulary import LlamaVocabulary
from headrace.engine.protocol import EngineInfo, Forward, Sampling, Span

NOT_SAMPLED = -1


class LlamaEngine:
    """`headrace.engine.protocol.Engine` on the embedded library. Make one with `load`."""

    def __init__(self, library: Library, model: LlamaModel, context: LlamaContext, info: EngineInfo) -> None:
        self._library = library
        self._model = model
        self._context = context
        self._info = info
        self._batch = Batch(library.ffi, info.batch_tokens)
        self._samplings: list[Sampling | None] = [None] * info.sequences
        self._lengths = [0] * info.sequences

    @classmethod
    def load(cls, settings: LlamaSettings) -> Self:
        """Load a model with these settings (0.3 s for the default model once its file is cached).

        Raises `PlatformError`, `ModelError`, `MemoryShortage` or `ConfigError`, each before it harms.
        """
        settings.check()
        library = open_library()
        model = LlamaModel(library, settings)
        try:
            context = LlamaContext(library, model, settings)
        except BaseException:
            model.free()
            raise
        return cls(library, model, context, _describe(model, context, settings))

    @property
    def info(self) -> EngineInfo:
        """What is loaded and how much it holds."""
        return self._info

    @property
    def vocabulary(self) -> LlamaVocabulary:
        """The model's vocabulary."""
        return self._model.vocabulary

    def open(self, slot: int, sampling: Sampling) -> None:
        """Prepare an empty slot for a new sequence."""
        assert self._samplings[slot] is None, f"slot {slot} is open already"
        self._samplings[slot] = sampling
        self._lengths[slot] = 0

    def forward(self, spans: Sequence[Span]) -> Forward:
        """Compute the spans in one batch; see `Engine.forward`.

        Raises `EngineFault` when the library fails or computes logits that are not numbers.
        """
        self._check_spans(spans)
        begin = time.perf_counter()
        num_sampled = self._batch.fill(spans)
        self._context.decode(self._batch)
        for span in spans:
            self._lengths[span.slot] += len(span.tokens)
        computed = time.perf_counter()
        tokens = [NOT_SAMPLED] * len(spans)
        if num_sampled:
            self._draw(spans, self._context.logits(num_sampled), tokens)
        end = time.perf_counter()
        return Forward(tokens=tokens, compute_s=computed - begin, sample_s=end - computed)

    def close(self, slot: int) -> None:
        """Drop the slot's KV and sampling; nothing happens when it is not open."""
        if self._samplings[slot] is None:
            return
        self._context.drop(slot)
        self._samplings[slot] = None
        self._lengths[slot] = 0

    def shutdown(self) -> None:
        """Release weights and KV. No call may follow."""
        self._context.free()
        self._model.free()

    def _check_spans(self, spans: Sequence[Span]) -> None:
        """Misuse is a bug of the caller; a batch too large would even abort the process."""
        assert spans, "nothing to compute"
        assert sum(len(span.tokens) for span in spans) <= self._info.batch_tokens, "batch too large"
        assert len({span.slot for span in spans}) == len(spans), "a slot appears twice"
        for span in spans:
            assert self._samplings[span.slot] is not None, f"slot {span.slot} is not open"
            assert span.tokens, f"slot {span.slot}: empty span"
            length = self._lengths[span.slot]
            assert span.start == length, f"slot {span.slot} holds {length} tokens, span starts at {span.start}"
            end = length + len(span.tokens)
            assert end <= self._info.context_tokens, f"slot {span.slot}: {end} tokens exceed the context"

    def _draw(self, spans: Sequence[Span], rows: Logits, tokens: list[int]) -> None:
        """Put the token that follows each sampled span into `tokens`, one row of logits after the other."""
        greedy_spans: list[int] = []
        greedy_rows: list[int] = []
        row = 0
        for index, span in enumerate(spans):
            if not span.is_sampled:
                continue
            sampling = self._samplings[span.slot]
            assert sampling is not None
            if sampling.temperature <= GREEDY_TEMPERATURE_MAX:
                greedy_spans.append(index)
                greedy_rows.append(row)
            else:
                tokens[index] = sample_token(rows[row], sampling, span.start + len(span.tokens))
            row += 1
        if not greedy_rows:
            return
        # Picking rows copies them; when all rows are greedy, none is copied.
        picked = rows if len(greedy_rows) == len(rows) else rows[np.array(greedy_rows)]
        for index, token in zip(greedy_spans, greedy_tokens(picked), strict=True):
            tokens[index] = token


def _describe(model: LlamaModel, context: LlamaContext, settings: LlamaSettings) -> EngineInfo:
    return EngineInfo(
        backend=definitions.BACKEND_NAME,
        model=model.name,
        architecture=model.architecture,
        quantization=model.quantization,
        parameters=model.parameters,
        context_tokens=settings.context_tokens,
        sequences=settings.sequences,
        batch_tokens=settings.batch_tokens,
        vocabulary=model.vocabulary.size,
        weights_bytes=model.weights_bytes,
        kv_bytes=context.kv_tokens * model.shape.kv_bytes_per_token,
        kv_bytes_per_token=model.shape.kv_bytes_per_token,
        threads=settings.thread_count,
    )
