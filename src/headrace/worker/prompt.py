"""From messages to prompt tokens: the model's chat template, then its tokenizer.

Spellings of control tokens inside a message (`<|im_end|>` typed by a user) must stay text: otherwise
a client could end its turn and speak as the system. Templates produce one string in which the two
cannot be told apart, so such spellings are replaced by unique marks before rendering and tokenized
as plain text afterwards. Messages without any, nearly all, take the direct way.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.engine.protocol import Vocabulary
from headrace.errors import HeadraceError, ModelError
from headrace.request.messages import Message


class PromptError(HeadraceError):
    """These messages cannot be made into a prompt for this model; the text says why."""


class PromptBuilder:
    """Builds prompts for one model. Callable from any thread."""

    def __init__(
        self, vocabulary: Vocabulary, *, template: str | None = None, is_whitespace_normalized: bool = False
    ) -> None:
        """`template` replaces the one in the model file. Raises `ModelError` without a usable one."""
        source = template or vocabulary.chat_template
        if source is None:
            raise ModelError(
                "the model file has no chat template, so it cannot serve chats; "
                "give one with --chat-template FILE (Jinja)"
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from None
        self._vocabulary = vocabulary
        self._is_whitespace_normalized = is_whitespace_normalized
        self._specials = [text for text in vocabulary.special_texts if text]
        nonce = secrets.token_hex(8)
        self._mark = f"\x02{nonce}:{{}}\x03"
        self._marks = re.compile(f"\x02{nonce}:([0-9]+)\x03")
        self.token_bytes_max = vocabulary.token_bytes_max
        """No token stands for more bytes of text than this, so bytes / this is a lower bound of a count."""
        self._special = re.compile("|".join(map(re.escape, self._specials))) if self._specials else None

    def cacheable(self, messages: Sequence[Message], tokens: Sequence[int]) -> int:
        """How many of the prompt's first tokens lie before the last mark of a cacheable prefix; 0 without one.

        Found by building the prompt that ends at the mark: what both have in common is the prefix.
        """
        marked = [number for number, message in enumerate(messages, 1) if message.is_cache_end]
        if not marked:
            return 0
        try:
            head = self._build(messages[: marked[-1]], is_answer_wanted=False)
        except PromptError:
            return 0  # a template that takes the whole may refuse a part: then nothing is kept
        same = zip(head, tokens, strict=False)
        return next((at for at, (one, other) in enumerate(same) if one != other), min(len(head), len(tokens)))

    def build(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's tokens. Raises `PromptError` if the template refuses the messages."""
        return self._build(messages, is_answer_wanted=True)

    def _build(self, messages: Sequence[Message], *, is_answer_wanted: bool) -> list[int]:
        if self._is_whitespace_normalized:
            messages = [Message(one.role, normalized(one.content), one.is_cache_end) for one in messages]
        special = self._special
        if special is None or not any(special.search(message.content) for message in messages):
            text = self._render(
                [{"role": one.role, "content": one.content} for one in messages],
                is_answer_wanted=is_answer_wanted,
            )
            return self._vocabulary.tokenize(text, is_special_parsed=True, is_start=True)
        return self._build_marked(special, messages, is_answer_wanted=is_answer_wanted)

    def _build_marked(
        self, special: re.Pattern[str], messages: Sequence[Message], *, is_answer_wanted: bool
    ) -> list[int]:
        spellings: list[str] = []

        def mark(match: re.Match[str]) -> str:
            spellings.append(match.group())
            return self._mark.format(len(spellings) - 1)

        text = self._render(
            [{"role": one.role, "content": special.sub(mark, one.content)} for one in messages],
            is_answer_wanted=is_answer_wanted,
        )
        tokens: list[int] = []
        for position, part in enumerate(self._marks.split(text)):
            is_spelling = position % 2 == 1
            plain = spellings[int(part)] if is_spelling else part
            if plain:
                tokens += self._vocabulary.tokenize(
                    plain, is_special_parsed=not is_spelling, is_start=not tokens
                )
        return tokens

    def _render(self, messages: list[dict[str, Any]], *, is_answer_wanted: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=is_answer_wanted,
                bos_token=self._vocabulary.bos_text,
                eos_token=self._vocabulary.eos_text,
                tools=None,
            )
        except Exception as error:  # noqa: BLE001 - a template is a foreign program and may raise anything
            raise PromptError(f"The model's chat template refuses these messages: {error}") from None


_BLANKS = re.compile(r"[ \t\r\f\v]+")
_LINE_ENDS = re.compile(r" ?\n ?")
_EMPTY_LINES = re.compile(r"\n{3,}")


def normalized(text: str) -> str:
    """One blank for several, none at the ends of lines and of the text, at most one empty line in a row."""
    return _EMPTY_LINES.sub("\n\n", _LINE_ENDS.sub("\n", _BLANKS.sub(" ", text))).strip()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
