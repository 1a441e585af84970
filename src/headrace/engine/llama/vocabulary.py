"""Text to tokens and back, through llama.cpp's tokenizers."""

from collections.abc import Sequence
from typing import Any

from headrace.engine.llama import definitions
from headrace.engine.llama.library import Library

_PIECE_BYTES = 256


class LlamaVocabulary:
    """The `Vocabulary` of a loaded model. All calls are safe from any thread.

    What is asked for every generated token (`token_bytes`, `is_end`) is looked up in tables made at
    load time: 60 ms for 49 152 tokens.
    """

    def __init__(self, library: Library, model: Any) -> None:
        self._ffi = library.ffi
        self._api = library.api
        self._vocab = library.api.llama_model_get_vocab(model)
        self._library = library
        self.size: int = self._api.llama_vocab_n_tokens(self._vocab)
        self._bos: int = self._api.llama_vocab_bos(self._vocab)
        self._eos: int = self._api.llama_vocab_eos(self._vocab)
        self._is_bos_wanted: bool = self._api.llama_vocab_get_add_bos(self._vocab) and self._bos >= 0
        self._chat_template = library.text(self._api.llama_model_chat_template(model, self._ffi.NULL))
        self._pieces = self._read_pieces()
        self._ends = frozenset(
            token for token in range(self.size) if self._api.llama_vocab_is_eog(self._vocab, token)
        )
        self._special_texts = self._read_special_texts()
        spellings = (len(text.encode()) for text in self._special_texts)
        self._token_bytes_max = max(*map(len, self._pieces), *spellings, 1)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template in the model file; None when it has none."""
        return self._chat_template

    @property
    def special_texts(self) -> Sequence[str]:
        """Spellings of control and user-defined tokens, longest first.

        Left out are user-defined tokens of white space only (some vocabularies have them for runs of
        blanks): they are ordinary text.
        """
        return self._special_texts

    @property
    def token_bytes_max(self) -> int:
        """Bytes of the longest token, control tokens included."""
        return self._token_bytes_max

    @property
    def bos_text(self) -> str:
        """The spelling of the beginning-of-sequence token; empty when there is none."""
        return self._spelling(self._bos)

    @property
    def eos_text(self) -> str:
        """The spelling of the end-of-sequence token; empty when there is none."""
        return self._spelling(self._eos)

    def tokenize(self, text: str, *, is_special_parsed: bool, is_start: bool) -> list[int]:
        """Tokens of `text`; see `Vocabulary.tokenize`.

        Lone surrogates, which have no UTF-8 form, become question marks.
        """
        raw = text.encode("utf-8", "replace")
        tokens = self._tokenize_bytes(raw, is_special_parsed) if raw else []
        # The library's own add_special would also append an end token where a model asks for one.
        if is_start and self._is_bos_wanted and tokens[:1] != [self._bos]:
            tokens.insert(0, self._bos)
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; empty for control tokens."""
        return self._pieces[token]

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self._ends

    def _tokenize_bytes(self, raw: bytes, is_special_parsed: bool) -> list[int]:
        # A tokenizer may put a blank in front, hence the small reserve; a token is at least one byte.
        capacity = len(raw) + 8
        while True:
            tokens = self._ffi.new("int32_t[]", capacity)
            count: int = self._api.llama_tokenize(
                self._vocab, raw, len(raw), tokens, capacity, False, is_special_parsed
            )
            if count >= 0:
                return self._library.unpack(tokens, count)
            assert -count > capacity, f"the tokenizer failed with {count}"
            capacity = -count

    def _read_pieces(self) -> list[bytes]:
        buffer = self._ffi.new("char[]", _PIECE_BYTES)
        return [self._read_piece(token, buffer, _PIECE_BYTES) for token in range(self.size)]

    def _read_piece(self, token: int, buffer: Any, capacity: int) -> bytes:
        length: int = self._api.llama_token_to_piece(self._vocab, token, buffer, capacity, 0, False)
        if length >= 0:
            return bytes(self._ffi.buffer(buffer, length))
        return self._read_piece(token, self._ffi.new("char[]", -length), -length)

    def _read_special_texts(self) -> tuple[str, ...]:
        kinds = definitions.TOKEN_CONTROL | definitions.TOKEN_USER_DEFINED
        texts = {
            self._spelling(token)
            for token in range(self.size)
            if self._api.llama_vocab_get_attr(self._vocab, token) & kinds
        }
        return tuple(sorted((text for text in texts if text.strip()), key=lambda text: (-len(text), text)))

    def _spelling(self, token: int) -> str:
        if token < 0:
            return ""
        return self._library.text(self._api.llama_vocab_get_text(self._vocab, token)) or ""
