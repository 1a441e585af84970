"""A deterministic engine that computes nothing: tokens, times and failures follow from a seed.

For simulation and load tests. The same seed, prompt and settings give the same answer, whatever else
runs. Time passes through the `sleep` it is given, so a simulation can let none pass.
"""

import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence

from headrace.config.settings import EngineSettings, StubTiming
from headrace.engine.protocol import EngineInfo, Forward, Span
from headrace.errors import EngineFault
from headrace.request.sampling import Sampling

_BYTES = 256
_END = _BYTES
_FIRST_WORD = _BYTES + 1
_WORDS = (
    " water", " river", " gate", " meter", " flow", " stone", " mill", " wheel", " bridge", " lock",
    " spring", " channel", " lake", " rain", " 水", " 🌊",
)  # fmt: skip
_KV_BYTES_PER_TOKEN = 1024


class StubVocabulary:
    """Bytes, one end token and a few words."""

    chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    special_texts: Sequence[str] = ()
    bos_text = ""
    eos_text = ""
    token_bytes_max = max(len(word.encode()) for word in _WORDS)

    def tokenize(self, text: str, *, is_special_parsed: bool, is_start: bool) -> list[int]:
        """About four characters a token, as real tokenizers have it; the text cannot be restored."""
        data = text.encode()
        return [zlib.crc32(data[at : at + 4]) % _BYTES for at in range(0, len(data), 4)]

    def token_bytes(self, token: int) -> bytes:
        if token < _BYTES:
            return bytes([token])
        return b"" if token == _END else _WORDS[token - _FIRST_WORD].encode()

    def is_end(self, token: int) -> bool:
        return token == _END


class _Slot:
    __slots__ = ("generated", "seed", "states", "tokens")

    def __init__(self) -> None:
        self.seed = -1
        """Of the sequence that runs here; negative while none does."""
        self.tokens: list[int] = []
        self.states: list[int] = []
        """After each token, a number that stands for it and all before it."""
        self.generated = 0

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        del self.states[length:]

    def take(self, tokens: Iterable[int]) -> None:
        state = self.states[-1] if self.states else 0
        for token in tokens:
            state = (state * 1_000_003 + token + 1) & 0xFFFF_FFFF
            self.tokens.append(token)
            self.states.append(state)


class StubEngine:
    """The stub. `sleep` takes seconds and is called once for each forward call."""

    def __init__(self, settings: EngineSettings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._timing = settings.stub or StubTiming()
        self._sleep = sleep
        self._calls = 0
        self._slots = [_Slot() for _ in range(settings.max_batch_size)]
        self.vocabulary = StubVocabulary()
        self.info = EngineInfo(
            backend="stub (computes nothing)",
            model="stub",
            architecture="stub",
            quantization="none",
            parameters=0,
            context_tokens=settings.max_context_tokens,
            sequences=settings.max_batch_size,
            batch_tokens=settings.max_batch_tokens,
            vocabulary=_FIRST_WORD + len(_WORDS),
            weights_bytes=0,
            kv_bytes=settings.max_batch_size * settings.max_context_tokens * _KV_BYTES_PER_TOKEN,
            kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
            threads=0,
            state_key="stub",
        )

    def open(self, slot: int, sampling: Sampling, *, held: int = 0, drawn: int = 0) -> None:
        one = self._slots[slot]
        assert one.seed < 0, "the slot is open already"
        assert held <= len(one.tokens), "the slot does not hold so many tokens"
        one.cut(held)
        one.seed = zlib.crc32(f"{self._timing.seed}:{sampling.seed}".encode())
        one.generated = drawn

    def forward(self, spans: Sequence[Span]) -> Forward:
        assert spans and sum(len(span.tokens) for span in spans) <= self.info.batch_tokens
        assert len({span.slot for span in spans}) == len(spans)
        timing = self._timing
        self._calls += 1
        if timing.fault_every_steps and self._calls % timing.fault_every_steps == 0:
            raise EngineFault(f"the stub fails every {timing.fault_every_steps} calls, as it was told to")
        prefill = sum(len(span.tokens) for span in spans if len(span.tokens) > 1)
        decode = sum(1 for span in spans if len(span.tokens) == 1)
        cost_us = prefill * timing.prefill_us_per_token
        if decode:
            cost_us += timing.decode_us_per_step + decode * timing.decode_us_per_sequence
        self._sleep(cost_us / 1e6)
        return Forward([self._advance(span) for span in spans], cost_us / 1e6, 0.0)

    def close(self, slot: int, *, keep: int = 0) -> None:
        one = self._slots[slot]
        assert keep <= len(one.tokens)
        one.cut(keep)
        one.seed = -1

    def copy(self, source: int, target: int, length: int) -> None:
        assert self._slots[target].seed < 0 and length <= len(self._slots[source].tokens)
        self._slots[target].cut(0)
        self._slots[target].take(self._slots[source].tokens[:length])

    def save(self, slot: int) -> bytes:
        return array("q", self._slots[slot].tokens).tobytes()

    def restore(self, slot: int, state: bytes, length: int) -> None:
        tokens = array("q")
        try:
            tokens.frombytes(state)
        except ValueError:
            raise EngineFault("the saved state is not one of the stub") from None
        if len(tokens) < length:
            raise EngineFault(f"the saved state holds {len(tokens)} tokens, not {length}")
        assert self._slots[slot].seed < 0
        self._slots[slot].cut(0)
        self._slots[slot].take(tokens[:length])

    def shutdown(self) -> None:
        self._slots.clear()

    def _advance(self, span: Span) -> int:
        slot = self._slots[span.slot]
        assert slot.seed >= 0, "the slot is not open"
        assert span.start == len(slot.tokens), "a span continues where its slot ends"
        slot.take(span.tokens)
        assert len(slot.tokens) <= self.info.context_tokens
        if not span.is_sampled:
            return -1
        slot.generated += 1
        if slot.generated >= self._timing.output_tokens:
            return _END
        # The answer depends on the tokens held and the seed only, not on how they came here: a wrong one shows.
        drawn = zlib.crc32(slot.states[-1].to_bytes(4, "big"), slot.seed)
        return _FIRST_WORD + drawn % len(_WORDS)
