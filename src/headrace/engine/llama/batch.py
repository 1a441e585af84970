"""The tokens of one forward call, in the form `llama_decode` takes them."""

from collections.abc import Sequence
from typing import Any

from cffi import FFI

from headrace.engine.protocol import Span


class Batch:
    """A `llama_batch` over arrays allocated once. `struct` is what the library gets."""

    def __init__(self, ffi: FFI, capacity: int) -> None:
        self.capacity = capacity
        self._tokens = ffi.new("int32_t[]", capacity)
        self._positions = ffi.new("int32_t[]", capacity)
        self._slots = ffi.new("int32_t[]", capacity)
        self._outputs = ffi.new("int8_t[]", capacity)
        # Every token belongs to exactly one sequence, so these two never change.
        self._slot_counts = ffi.new("int32_t[]", [1] * capacity)
        self._slot_pointers = ffi.new("int32_t *[]", [self._slots + index for index in range(capacity)])
        arrays: dict[str, Any] = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._slot_counts,
            "seq_id": self._slot_pointers,
            "logits": self._outputs,
        }
        self.struct: Any = ffi.new("struct llama_batch *", arrays)

    def fill(self, spans: Sequence[Span], *, padding: int = 0) -> int:
        """Take over the spans in their order; how many of them ask for logits. `padding`: so many more rows behind the
        last one, of whatever token.

        Lists are put together in Python and copied by one slice assignment per array: setting
        elements one by one costs several times more.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        outputs: list[int] = []
        num_sampled = 0
        for span in spans:
            count = len(span.tokens)
            tokens += span.tokens
            if count == 1:
                positions.append(span.start)
                slots.append(span.slot)
                outputs.append(span.is_sampled)
            else:
                positions += range(span.start, span.start + count)
                slots += [span.slot] * count
                outputs += [0] * (count - 1)
                outputs.append(span.is_sampled)
            num_sampled += span.is_sampled
        if padding:
            end = positions[-1] + 1
            tokens += tokens[-1:] * padding
            positions += range(end, end + padding)
            slots += slots[-1:] * padding
            outputs += [0] * padding
        total = len(tokens)
        assert total <= self.capacity, f"{total} tokens in a batch of {self.capacity}"
        self._tokens[0:total] = tokens
        self._positions[0:total] = positions
        self._slots[0:total] = slots
        self._outputs[0:total] = outputs
        self.struct.n_tokens = total
        return num_sampled
