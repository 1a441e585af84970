"""From tokens to the text a client may see: whole characters only, and nothing past a stop string."""

import codecs
from collections.abc import Sequence

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextAssembler:
    """The text of one attempt, built token by token.

    A token may be part of a UTF-8 character, and a stop string may begin in one token and end in
    another. Text is released as soon as neither can change it any more: bytes wait until their
    character is whole, and a tail that could be the beginning of a stop string waits until it is
    clear that it is not.
    """

    __slots__ = ("_decoder", "_held", "_stops", "has_stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = _utf8_decoder(errors="replace")
        self._stops = tuple(stops)
        self._held = ""
        self.has_stopped = False
        """A stop string was found; its text and what follows are dropped."""

    def feed(self, data: bytes) -> str:
        """The text that a token's bytes make certain; often all of it, sometimes none."""
        text = self._decoder.decode(data)
        if not self._stops:
            return text
        return self._release(self._held + text)

    def end(self) -> str:
        """What was held back, once no token follows. A character that never became whole is dropped."""
        if self.has_stopped:
            return ""
        text, self._held = self._held, ""
        return text

    def _release(self, text: str) -> str:
        first = min((position for stop in self._stops if (position := text.find(stop)) >= 0), default=-1)
        if first >= 0:
            self.has_stopped = True
            self._held = ""
            return text[:first]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
