"""The embedded engine's slots, one level below `LlamaEngine`: logits, copies, cuts and saved states.

Only for measurements. Calls that headrace does not declare yet are declared here.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI

from headrace.engine.builtin import builtin_model_path
from headrace.engine.llama import LlamaEngine, LlamaSettings, prepare_model
from headrace.engine.llama.engine import group_spans
from headrace.engine.llama.preflight import check_this_machine
from headrace.engine.protocol import Span

_EXTRA = """
bool llama_memory_seq_rm(void *memory, int32_t sequence, int32_t from, int32_t to);
void llama_memory_seq_cp(void *memory, int32_t source, int32_t target, int32_t from, int32_t to);
int32_t llama_memory_seq_pos_min(void *memory, int32_t sequence);
int32_t llama_memory_seq_pos_max(void *memory, int32_t sequence);
size_t llama_state_seq_get_size(void *context, int32_t sequence);
size_t llama_state_seq_get_data(void *context, uint8_t *target, size_t size, int32_t sequence);
size_t llama_state_seq_set_data(void *context, const uint8_t *source, size_t size, int32_t sequence);
size_t llama_state_seq_get_size_ext(void *context, int32_t sequence, uint32_t flags);
size_t llama_state_seq_get_data_ext(void *context, uint8_t *target, size_t size, int32_t sequence, uint32_t flags);
size_t llama_state_seq_set_data_ext(void *context, const uint8_t *source, size_t size, int32_t sequence, uint32_t flags);
"""


class Slots:
    """One context; `lengths` is what each slot holds."""

    def __init__(
        self,
        *,
        sequences: int = 32,
        context: int = 2048,
        layout: str = "per_sequence",
        flash: bool = True,
        threads: int = 1,
        cache: Path = Path(".cache/kv"),
    ) -> None:
        prepared = prepare_model(builtin_model_path(), cache)
        self.engine = LlamaEngine.load(
            LlamaSettings(
                model_path=prepared.path,
                sequences=sequences,
                context_tokens=context,
                batch_tokens=2048,
                threads=threads,
                kv_layout=layout,  # type: ignore[arg-type]
                flash_attention=flash,
            )
        )
        self.is_unified = layout == "unified"
        self._single = 4 if threads == 1 else 1
        self._context: Any = self.engine._context
        self._batch: Any = self.engine._batch
        self._ffi = FFI()
        self._ffi.cdef(_EXTRA)
        self.api: Any = self._ffi.dlopen(str(check_this_machine()))
        other = self.engine._library.ffi
        self.context = self._ffi.cast("void *", int(other.cast("uintptr_t", self._context._handle)))
        self.memory = self._ffi.cast("void *", int(other.cast("uintptr_t", self._context._memory)))
        self.lengths = [0] * sequences

    def forward(self, slot_tokens: Sequence[tuple[int, list[int], bool]]) -> dict[int, np.ndarray]:
        """Compute (slot, tokens, is_sampled) the way the production engine groups them; logits by slot."""
        spans = [Span(slot, self.lengths[slot], tokens, wanted) for slot, tokens, wanted in slot_tokens]
        found: dict[int, np.ndarray] = {}
        for group in group_spans(spans, self._single, is_kv_unified=self.is_unified):
            members = [spans[index] for index in group]
            wanted = self._batch.fill(members)
            self._context.decode(self._batch)
            if wanted:
                rows = self._context.logits(wanted)
                sampled = [span.slot for span in members if span.is_sampled]
                found |= {slot: rows[index].copy() for index, slot in enumerate(sampled)}
        for span in spans:
            self.lengths[span.slot] += len(span.tokens)
        return found

    def drop(self, slot: int) -> None:
        self.cut(slot, 0)

    def cut(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens."""
        assert self.api.llama_memory_seq_rm(self.memory, slot, length or -1, -1)
        self.lengths[slot] = length
        assert self.api.llama_memory_seq_pos_max(self.memory, slot) == length - 1

    def copy(self, source: int, target: int, length: int = -1) -> None:
        """Per sequence: the whole slot (the library asserts on ranges). Unified: the first `length`."""
        self.api.llama_memory_seq_cp(self.memory, source, target, -1, length if self.is_unified else -1)
        self.lengths[target] = self.lengths[source] if length < 0 or not self.is_unified else length

    def save_size(self, slot: int) -> int:
        return int(self.api.llama_state_seq_get_size(self.context, slot))

    def save(self, slot: int, into: Any = None) -> np.ndarray:
        size = self.save_size(slot)
        target = np.empty(size, np.uint8) if into is None else into
        wrote = self.api.llama_state_seq_get_data(
            self.context, self._ffi.cast("uint8_t *", target.ctypes.data), size, slot
        )
        assert wrote == size, (wrote, size)
        return target[:size]

    def restore(self, slot: int, state: np.ndarray, length: int) -> None:
        read = self.api.llama_state_seq_set_data(
            self.context, self._ffi.cast("uint8_t *", state.ctypes.data), state.nbytes, slot
        )
        assert read == state.nbytes, (read, state.nbytes)
        self.lengths[slot] = length


def digest(row: np.ndarray) -> str:
    return hashlib.sha1(row.tobytes()).hexdigest()[:16]


def english(slots: Slots) -> list[int]:
    """Many tokens of ordinary text: the project's own documentation and source."""
    files = [Path("ARCHITECTURE.md"), *sorted(Path("docs").rglob("*.md")), *sorted(Path("src").rglob("*.py"))]
    text = "\n".join(path.read_text() for path in files)
    return slots.engine.vocabulary.tokenize(text[:400_000], is_special_parsed=False, is_start=False)
