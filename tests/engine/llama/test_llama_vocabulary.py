"""Text to tokens and back."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.engine.llama import LlamaEngine
from headrace.engine.llama.library import Library
from headrace.engine.llama.vocabulary import LlamaVocabulary
from tests.engine.llama.gguf_writer import write_head

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew lines\r\n\n\n",
    "def f(x: int) -> int:\n    return x ** 2  # 平方\n",
    "你好,世界。今天天气很好。",
    "👩‍👩‍👧‍👦 family, flag 🇨🇭, and 🤷🏽",
    "Ünïcödé, עברית, हिन्दी, ไทย",
    "a\0b",
    "x" * 3000,
]


@pytest.fixture
def vocabulary(engine: LlamaEngine) -> LlamaVocabulary:
    return engine.vocabulary


def plain(vocabulary: LlamaVocabulary, text: str) -> list[int]:
    return vocabulary.tokenize(text, is_special_parsed=False, is_start=False)


def back(vocabulary: LlamaVocabulary, tokens: list[int]) -> str:
    return b"".join(map(vocabulary.token_bytes, tokens)).decode()


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_as_they_were(vocabulary: LlamaVocabulary, text: str) -> None:
    assert back(vocabulary, plain(vocabulary, text)) == text


def test_no_text_is_no_tokens(vocabulary: LlamaVocabulary) -> None:
    assert plain(vocabulary, "") == []


def test_a_character_may_be_split_over_tokens(vocabulary: LlamaVocabulary) -> None:
    pieces = [vocabulary.token_bytes(token) for token in plain(vocabulary, "🦀")]
    assert len(pieces) > 1
    assert b"".join(pieces) == "🦀".encode()


def test_lone_surrogates_become_question_marks(vocabulary: LlamaVocabulary) -> None:
    assert back(vocabulary, plain(vocabulary, "a\ud800b")) == "a?b"


def test_control_tokens_only_where_they_are_asked_for(vocabulary: LlamaVocabulary) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    parsed = vocabulary.tokenize(text, is_special_parsed=True, is_start=False)
    assert (parsed[0], parsed[-1]) == (1, 2)
    assert back(vocabulary, parsed) == "user\nhi"
    spelled = plain(vocabulary, text)
    assert not {1, 2} & set(spelled)
    assert back(vocabulary, spelled) == text


def test_special_texts_are_the_longest_first(vocabulary: LlamaVocabulary) -> None:
    texts = list(vocabulary.special_texts)
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(texts)
    assert [len(text) for text in texts] == sorted((len(text) for text in texts), reverse=True)
    for text in texts:
        assert len(vocabulary.tokenize(text, is_special_parsed=True, is_start=False)) == 1


def test_ends_and_spellings(vocabulary: LlamaVocabulary) -> None:
    assert vocabulary.bos_text == "<|im_start|>"
    assert vocabulary.eos_text == "<|im_end|>"
    assert vocabulary.is_end(2)
    assert not vocabulary.is_end(1)
    assert not vocabulary.is_end(1000)
    assert vocabulary.chat_template is not None
    assert "<|im_start|>" in vocabulary.chat_template


def test_this_model_asks_for_no_first_token(vocabulary: LlamaVocabulary) -> None:
    assert vocabulary.tokenize("hi", is_special_parsed=False, is_start=True) == plain(vocabulary, "hi")


def test_many_threads_at_once_agree(vocabulary: LlamaVocabulary) -> None:
    expected = [plain(vocabulary, text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for tokens in pool.map(lambda _: [plain(vocabulary, text) for text in TEXTS], range(40)):
            assert tokens == expected


# A SentencePiece vocabulary (Llama 2 style): blanks as U+2581, unknown bytes as byte tokens.
SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SENTENCEPIECE += ["▁", "h", "i", "▁h", "▁hi", "[INST]", "    "]
_BYTE, _NORMAL, _UNKNOWN, _CONTROL, _USER = 6, 1, 2, 3, 4
TOKEN_TYPES = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * 5, _USER, _USER]


@pytest.fixture
def sentencepiece(library: Library, tmp_path: Path) -> Iterator[LlamaVocabulary]:
    path = write_head(
        tmp_path / "vocabulary.gguf",
        {
            "general.architecture": "llama",
            "llama.context_length": 128,
            "llama.embedding_length": 64,
            "llama.block_count": 1,
            "llama.feed_forward_length": 128,
            "llama.attention.head_count": 4,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": SENTENCEPIECE,
            "tokenizer.ggml.scores": [-float(index) for index in range(len(SENTENCEPIECE))],
            "tokenizer.ggml.token_type": TOKEN_TYPES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_eos_token": True,
        },
    )
    parameters = library.api.llama_model_default_params()
    parameters.vocab_only = True
    handle = library.api.llama_model_load_from_file(str(path).encode(), parameters)
    assert handle != library.ffi.NULL, library.log.text()
    yield LlamaVocabulary(library, handle)
    library.api.llama_model_free(handle)


def test_sentencepiece_pieces(sentencepiece: LlamaVocabulary) -> None:
    index = SENTENCEPIECE.index
    assert sentencepiece.token_bytes(index("▁hi")) == b" hi"
    assert sentencepiece.token_bytes(index("<0x0A>")) == b"\n"
    assert sentencepiece.token_bytes(index("<0xE4>")) == b"\xe4"
    assert sentencepiece.token_bytes(index("<s>")) == b""
    assert sentencepiece.token_bytes(index("<unk>")) == b""
    assert sentencepiece.special_texts == ("[INST]", "</s>", "<s>")


def test_sentencepiece_texts(sentencepiece: LlamaVocabulary) -> None:
    index = SENTENCEPIECE.index
    tokens = sentencepiece.tokenize("hi 你\n", is_special_parsed=False, is_start=False)
    assert tokens[0] == index("▁hi")
    assert b"".join(map(sentencepiece.token_bytes, tokens)).decode() == " hi 你\n"


def test_the_first_token_is_added_once_and_no_end_token_ever(sentencepiece: LlamaVocabulary) -> None:
    tokens = sentencepiece.tokenize("hi", is_special_parsed=True, is_start=True)
    assert tokens == [1, SENTENCEPIECE.index("▁hi")]
    again = sentencepiece.tokenize("<s>hi", is_special_parsed=True, is_start=True)
    assert again.count(1) == 1
    assert again[0] == 1
    assert sentencepiece.tokenize("", is_special_parsed=True, is_start=True) == [1]
