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

    def __init__(self, vocabulary: Vocabulary, *, template: str | None = None) -> None:
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
        self._specials = [text for text in vocabulary.special_texts if text]
        nonce = secrets.token_hex(8)
        self._mark = f"\x02{nonce}:{{}}\x03"
        self._marks = re.compile(f"\x02{nonce}:([0-9]+)\x03")
        self.token_bytes_max = vocabulary.token_bytes_max
        """No token stands for more bytes of text than this, so bytes / this is a lower bound of a count."""
        self._special = re.compile("|".join(map(re.escape, self._specials))) if self._specials else None

    def build(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's tokens. Raises `PromptError` if the template refuses the messages."""
        special = self._special
        if special is None or not any(special.search(message.content) for message in messages):
            text = self._render([{"role": one.role, "content": one.content} for one in messages])
            return self._vocabulary.tokenize(text, is_special_parsed=True, is_start=True)
        return self._build_marked(special, messages)

    def _build_marked(self, special: re.Pattern[str], messages: Sequence[Message]) -> list[int]:
        spellings: list[str] = []

        def mark(match: re.Match[str]) -> str:
            spellings.append(match.group())
            return self._mark.format(len(spellings) - 1)

        text = self._render(
            [{"role": one.role, "content": special.sub(mark, one.content)} for one in messages]
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

    def _render(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self._vocabulary.bos_text,
                eos_token=self._vocabulary.eos_text,
                tools=None,
            )
        except Exception as error:  # noqa: BLE001 - a template is a foreign program and may raise anything
            raise PromptError(f"The model's chat template refuses these messages: {error}") from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
