"""The engine on llama.cpp: slots of one context, computed batch by batch."""

import hashlib
import time
from collections.abc import Sequence
from typing import Self

from headrace.engine.llama.batch import Batch
from headrace.engine.llama.builds import Build
from headrace.engine.llama.context import LlamaContext
from headrace.engine.llama.kernels import Kernels, kernels_of
from headrace.engine.llama.library import Library, open_library
from headrace.engine.llama.model import LlamaModel
from headrace.engine.llama.portions import PLAIN_ROWS, TILE_ROWS, Tiles, context_cost_of, tiles_of
from headrace.engine.llama.sampling import GREEDY_TEMPERATURE_MAX, Logits, greedy_tokens, sample_token
from headrace.engine.llama.settings import LlamaSettings
from headrace.engine.llama.vocabulary import LlamaVocabulary
from headrace.engine.protocol import EngineInfo, Forward, Sampling, Span
from headrace.errors import EngineFault

NOT_SAMPLED = -1


class LlamaEngine:
    """`headrace.engine.protocol.Engine` on the embedded library. Make one with `load`."""

    def __init__(
        self,
        library: Library,
        model: LlamaModel,
        context: LlamaContext,
        info: EngineInfo,
        *,
        is_kv_unified: bool,
        kernels: Kernels,
        tiles: Tiles | None,
    ) -> None:
        """`tiles`: how short portions are filled up; None: not at all."""
        self._library = library
        self._model = model
        self._context = context
        self._info = info
        self._batch = Batch(library.ffi, info.batch_tokens)
        self._samplings: list[Sampling | None] = [None] * info.sequences
        self._lengths = [0] * info.sequences
        self._single_rows_max = kernels.single_rows_max
        self._is_kv_unified = is_kv_unified
        self._tiles = tiles

    @classmethod
    def load(cls, settings: LlamaSettings) -> Self:
        """Load a model with these settings (0.3 s for the default model once its file is cached).

        Raises `PlatformError`, `ModelError`, `MemoryShortage` or `ConfigError`, each before it harms.
        """
        settings.check()
        library = open_library(settings.library)
        model = LlamaModel(library, settings)
        try:
            context = LlamaContext(library, model, settings)
        except BaseException:
            model.free()
            raise
        kernels = kernels_of(library.build, model.file_type, threads=settings.thread_count)
        return cls(
            library,
            model,
            context,
            _describe(library.build, model, context, kernels, settings),
            is_kv_unified=settings.kv_layout == "unified",
            kernels=kernels,
            tiles=_tiles(model, kernels, settings),
        )

    @property
    def info(self) -> EngineInfo:
        """What is loaded and how much it holds."""
        return self._info

    @property
    def vocabulary(self) -> LlamaVocabulary:
        """The model's vocabulary."""
        return self._model.vocabulary

    def open(self, slot: int, sampling: Sampling, *, held: int = 0, drawn: int = 0) -> None:
        """Prepare a slot for a sequence that begins with tokens the slot still holds.

        A random number depends on seed and position alone, so `drawn` does not matter here.
        """
        assert self._samplings[slot] is None, f"slot {slot} is open already"
        self._hold(slot, held)
        self._samplings[slot] = sampling

    def forward(self, spans: Sequence[Span]) -> Forward:
        """Compute the spans in one batch; see `Engine.forward`.

        Raises `EngineFault` when the library fails or computes logits that are not numbers.
        """
        self._check_spans(spans)
        tokens = [NOT_SAMPLED] * len(spans)
        compute_s = sample_s = 0.0
        for group in group_spans(spans, self._single_rows_max, is_kv_unified=self._is_kv_unified):
            begin = time.perf_counter()
            members = [spans[index] for index in group]
            padding = self._padding(members[0]) if len(members) == 1 else 0
            num_sampled = self._batch.fill(members, padding=padding)
            self._context.decode(self._batch)
            if padding:
                self._context.cut(members[0].slot, members[0].start + len(members[0].tokens))
            computed = time.perf_counter()
            compute_s += computed - begin
            if num_sampled:
                drawn = self._draw(members, self._context.logits(num_sampled))
                for index, token in zip(group, drawn, strict=True):
                    tokens[index] = token
                sample_s += time.perf_counter() - computed
        for span in spans:
            self._lengths[span.slot] += len(span.tokens)
        return Forward(tokens=tokens, compute_s=compute_s, sample_s=sample_s)

    def close(self, slot: int, *, keep: int = 0) -> None:
        """End the slot's sequence, keeping its first tokens in KV memory."""
        self._samplings[slot] = None
        self._hold(slot, keep)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a slot that is not open the first tokens of another one."""
        assert self._samplings[target] is None and source != target
        if self._is_kv_unified:
            self._context.share(source, target, length)
            self._lengths[target] = length
        else:
            self.restore(target, self._context.save(source), length)

    def save(self, slot: int) -> bytes:
        """All that a slot holds."""
        return self._context.save(slot)

    def restore(self, slot: int, state: bytes, length: int) -> None:
        """Give a slot that is not open what was saved. Raises `EngineFault`."""
        assert self._samplings[slot] is None
        self._lengths[slot] = 0
        self._context.restore(slot, state)
        held = self._context.length(slot)
        if held < length:
            self._context.drop(slot)
            raise EngineFault(f"the saved state holds {held} tokens, not {length}")
        self._lengths[slot] = held
        self._hold(slot, length)

    def held(self, slot: int) -> int:
        """Tokens of a slot, asked of the library."""
        return self._context.length(slot)

    def cells_used(self) -> int:
        """Cells in use, asked of the library."""
        lengths = [self._context.length(slot) for slot in range(self._info.sequences)]
        if not self._is_kv_unified:
            return sum(lengths)
        return self._context.cells_used(lengths, cell_bytes=self._info.kv_bytes_per_token)

    def shutdown(self) -> None:
        """Release weights and KV. No call may follow."""
        self._context.free()
        self._model.free()

    def _hold(self, slot: int, length: int) -> None:
        """Keep a slot's first tokens and drop the rest."""
        held = self._lengths[slot]
        assert length <= held, f"slot {slot} holds {held} tokens, not {length}"
        if length == 0:
            # Always: after a fault the library may hold tokens that nobody counted.
            self._context.drop(slot)
        elif length < held:
            self._context.cut(slot, length)
        self._lengths[slot] = length

    def _check_spans(self, spans: Sequence[Span]) -> None:
        """Misuse is a bug of the caller; a batch too large would even abort the process."""
        assert spans, "nothing to compute"
        assert sum(len(span.tokens) for span in spans) <= self._info.batch_tokens, "batch too large"
        assert len({span.slot for span in spans}) == len(spans), "a slot appears twice"
        for span in spans:
            assert self._samplings[span.slot] is not None, f"slot {span.slot} is not open"
            assert span.tokens, f"slot {span.slot}: empty span"
            length = self._lengths[span.slot]
            assert span.start == length, (
                f"slot {span.slot} holds {length} tokens, span starts at {span.start}"
            )
            end = length + len(span.tokens)
            assert end <= self._info.context_tokens, f"slot {span.slot}: {end} tokens exceed the context"

    def _padding(self, span: Span) -> int:
        """Rows to add to the only span of a call, as far as its slot and the batch have room."""
        if self._tiles is None:
            return 0
        rows = len(span.tokens)
        padding = self._tiles.padding(rows, start=span.start)
        has_room = (
            span.start + rows + padding <= self._info.context_tokens
            and rows + padding <= self._info.batch_tokens
        )
        return padding if has_room else 0

    def _draw(self, spans: Sequence[Span], rows: Logits) -> list[int]:
        """The token that follows each span, `NOT_SAMPLED` where none was asked for."""
        tokens = [NOT_SAMPLED] * len(spans)
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
        if greedy_rows:
            # Picking rows copies them; when all rows are greedy, none is copied.
            picked = rows if len(greedy_rows) == len(rows) else rows[greedy_rows]
            for index, token in zip(greedy_spans, greedy_tokens(picked), strict=True):
                tokens[index] = token
        return tokens


def group_spans(
    spans: Sequence[Span], single_rows_max: int, *, is_kv_unified: bool = False
) -> list[list[int]]:
    """How the spans are divided into decode calls, as lists of their indexes.

    Every span longer than one token gets a call of its own. In one call the library would compute the
    first token of a prompt chunk with the decode steps and the rest apart, so that a prompt's last bits
    would depend on what else happened to run; apart they do not, and it costs nothing (31 steps + 64
    tokens, per-sequence KV: 293 ms in one call, 289 in two).

    Single tokens (decode steps) go by slot. With a KV of its own for each sequence the library computes
    only runs of consecutive slots together, in the order of the batch: 15 of 16 slots out of order took
    151 ms a step, in order 89. So a run is a call; up to `single_rows_max` of them get a call each, see
    `Kernels`.
    """
    rows = sorted(
        (index for index, span in enumerate(spans) if len(span.tokens) == 1),
        key=lambda index: spans[index].slot,
    )
    runs: list[list[int]] = []
    for index in rows:
        if runs and (is_kv_unified or spans[index].slot == spans[runs[-1][-1]].slot + 1):
            runs[-1].append(index)
        else:
            runs.append([index])
    groups: list[list[int]] = []
    for run in runs:
        groups += [[index] for index in run] if len(run) <= single_rows_max else [run]
    groups += [[index] for index, span in enumerate(spans) if len(span.tokens) > 1]
    return groups


def _tiles(model: LlamaModel, kernels: Kernels, settings: LlamaSettings) -> Tiles | None:
    """Of a pool no cell is taken that nobody has counted, so nothing is filled up there."""
    if kernels.tiles is None or not settings.flash_attention or settings.kv_layout == "unified":
        return None
    return tiles_of(model.shape, kernels.tiles, parameters=model.parameters)


def _describe(
    build: Build, model: LlamaModel, context: LlamaContext, kernels: Kernels, settings: LlamaSettings
) -> EngineInfo:
    return EngineInfo(
        backend=build.name,
        model=model.name,
        architecture=model.architecture,
        quantization=model.quantization,
        parameters=model.parameters,
        context_tokens=settings.context_tokens,
        sequences=settings.sequences,
        batch_tokens=settings.batch_capacity,
        portion_grain=TILE_ROWS if settings.flash_attention and kernels.tiles else PLAIN_ROWS,
        context_cost=context_cost_of(
            model.shape,
            kernels.attention_speed if settings.flash_attention else kernels.plain_speed,
            parameters=model.parameters,
        ),
        # The library rounds a pool up: what is there may be used.
        kv_tokens=settings.kv_tokens_max if settings.pool_tokens is None else context.kv_tokens,
        is_kv_unified=settings.pool_tokens is not None,
        vocabulary=model.vocabulary.size,
        weights_bytes=model.weights_bytes,
        kv_bytes=context.kv_tokens * model.shape.kv_bytes_per_token,
        kv_bytes_per_token=model.shape.kv_bytes_per_token,
        threads=settings.thread_count,
        state_key=_state_key(build, model, settings),
    )


def _state_key(build: Build, model: LlamaModel, settings: LlamaSettings) -> str:
    """The weights' identity with everything that shapes what they compute and how it lies in memory."""
    identity = settings.weights_sha256
    if identity is None:  # too large to hash at every start: the file as the system knows it
        status = settings.model_path.stat()
        identity = f"{settings.model_path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    flash = "flash" if settings.flash_attention else "plain"
    text = f"{build.name}|{build.sha256}|{identity}|{model.shape.kv_bytes_per_token}|{settings.kv_layout}|{flash}"
    return hashlib.sha256(text.encode()).hexdigest()
