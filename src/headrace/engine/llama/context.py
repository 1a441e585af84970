"""KV memory and the decode call of llama.cpp, with its return codes turned into faults."""

from typing import Any

import numpy as np

from headrace.engine.llama import definitions
from headrace.engine.llama.batch import Batch
from headrace.engine.llama.library import Library
from headrace.engine.llama.model import LlamaModel
from headrace.engine.llama.sampling import Logits
from headrace.engine.llama.settings import LlamaSettings
from headrace.errors import EngineFault, MemoryShortage, PlatformError

_KV_FULL = 1
_ABORTED = 2
_INVALID_BATCH = -1


class LlamaContext:
    """One context with `settings.sequences` slots over a loaded model."""

    def __init__(self, library: Library, model: LlamaModel, settings: LlamaSettings) -> None:
        self._api = library.api
        self._ffi = library.ffi
        self._log = library.log
        self._vocabulary_size = model.vocabulary.size
        library.log.clear()
        self._handle: Any = library.api.llama_init_from_model(model.handle, _parameters(library, settings))
        if self._handle == library.ffi.NULL:
            raise MemoryShortage(
                f"llama.cpp could not set up {settings.sequences} sequences of {settings.context_tokens} "
                f"tokens: {library.log.text() or 'no reason given'}. "
                "Lower max_batch_size (--batch-size), max_context_tokens (--context) or max_batch_tokens."
            )
        library.log.clear()
        self._memory = library.api.llama_get_memory(self._handle)
        self.kv_tokens: int = library.api.llama_n_ctx(self._handle)
        self._check_settings(settings)

    def decode(self, batch: Batch) -> None:
        """Compute a batch. Raises `EngineFault` with the reason when the library could not."""
        status: int = self._api.llama_decode(self._handle, batch.struct[0])
        if status == 0:
            return
        said = self._log.text()
        self._log.clear()
        raise EngineFault(f"llama_decode: {_reason(status)} (code {status}) {said}".rstrip())

    def logits(self, rows: int) -> Logits:
        """The logits of the last decode call, shape (rows, vocabulary): a view, valid until the next."""
        pointer = self._api.llama_get_logits(self._handle)
        if pointer == self._ffi.NULL:
            raise EngineFault("llama.cpp gave no logits")
        count = rows * self._vocabulary_size
        memory: Any = self._ffi.buffer(pointer, count * 4)
        flat: Logits = np.frombuffer(memory, dtype=np.float32, count=count)
        return flat.reshape(rows, self._vocabulary_size)

    def drop(self, slot: int) -> None:
        """Forget everything a slot holds. Removing a whole sequence cannot fail."""
        is_removed = self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)
        assert is_removed, f"slot {slot} was not removed"

    def cut(self, slot: int, length: int) -> None:
        """Forget what a slot holds beyond its first `length` tokens."""
        is_removed = self._api.llama_memory_seq_rm(self._memory, slot, length, -1)
        assert is_removed, f"the tail of slot {slot} was not removed"

    def share(self, source: int, target: int, length: int) -> None:
        """Let `target` hold the first tokens of `source`, in the same cells. With a unified KV only: where each
        sequence has its own, the library copies whole slots, and does so at the next decode call, when the
        source may have changed (`benchmarks/kv-choices.md`). There, `save` and `restore` copy at once.
        """
        self.drop(target)
        self._api.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def save(self, slot: int) -> bytes:
        """What a slot holds, as bytes: about the size of its KV memory in use."""
        size: int = self._api.llama_state_seq_get_size(self._handle, slot)
        buffer = self._ffi.new("uint8_t[]", size)
        written: int = self._api.llama_state_seq_get_data(self._handle, buffer, size, slot)
        if written != size:
            raise EngineFault(f"llama.cpp saved {written} of {size} bytes of slot {slot}")
        return bytes(self._ffi.buffer(buffer, size))

    def restore(self, slot: int, state: bytes) -> None:
        """Replace what a slot holds by what was saved."""
        self.drop(slot)
        source = self._ffi.from_buffer("uint8_t[]", state)
        read: int = self._api.llama_state_seq_set_data(self._handle, source, len(state), slot)
        if read != len(state):
            said = self._log.text()
            self._log.clear()
            self.drop(slot)
            raise EngineFault(
                f"llama.cpp does not take the saved state ({read} of {len(state)} bytes): {said}"
            )

    def length(self, slot: int) -> int:
        """How many tokens the library holds for a slot."""
        last: int = self._api.llama_memory_seq_pos_max(self._memory, slot)
        return last + 1

    def cells_used(self, lengths: list[int], *, cell_bytes: int) -> int:
        """How many cells of a pool hold something, from the size that the whole state would have as bytes.

        `lengths`: tokens of each slot; `cell_bytes`: keys and values of one cell. Each cell has them and 8 bytes, each
        slot that holds it 4 more; what else is in a state is less than a cell.
        """
        size: int = self._api.llama_state_get_size(self._handle)
        return int(size - 4 * sum(lengths)) // (cell_bytes + 8)

    def free(self) -> None:
        """Give the KV memory back; no call may follow."""
        self._api.llama_free(self._handle)
        self._handle = self._ffi.NULL

    def _check_settings(self, settings: LlamaSettings) -> None:
        """Read back what was asked for: the proof that the parameters arrived in the right fields."""
        api, handle = self._api, self._handle
        found = {
            "sequences": api.llama_n_seq_max(handle),
            "batch tokens": api.llama_n_batch(handle),
            "threads": api.llama_n_threads(handle),
        }
        wanted = {
            "sequences": settings.sequences,
            "batch tokens": settings.batch_capacity,
            "threads": settings.thread_count,
        }
        slot_tokens = min(settings.context_tokens, settings.pool_tokens or settings.context_tokens)
        if found != wanted or api.llama_n_ctx_seq(handle) < slot_tokens:
            self.free()
            raise PlatformError(f"llama.cpp set up {found}, not {wanted}: its parameters differ from ours.")


def _parameters(library: Library, settings: LlamaSettings) -> Any:
    parameters = library.api.llama_context_default_params()
    parameters.n_ctx = settings.pool_tokens or settings.sequences * settings.context_tokens
    parameters.n_batch = settings.batch_capacity
    parameters.n_ubatch = settings.batch_capacity
    parameters.n_seq_max = settings.sequences
    # One row of logits per sequence; the default would reserve one per token of a batch.
    parameters.n_outputs_max = settings.sequences
    parameters.n_threads = settings.thread_count
    parameters.n_threads_batch = settings.thread_count
    parameters.flash_attn_type = (
        definitions.FLASH_ATTENTION_ON if settings.flash_attention else definitions.FLASH_ATTENTION_OFF
    )
    parameters.kv_unified = settings.kv_layout == "unified"
    parameters.offload_kqv = False
    parameters.op_offload = False
    return parameters


def _reason(status: int) -> str:
    if status == _KV_FULL:
        return "the KV cache is full"
    if status == _ABORTED:
        return "computing was aborted"
    if status == _INVALID_BATCH:
        return "the batch is invalid (token, sequence or position)"
    return "computing failed"
