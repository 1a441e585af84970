"""Chat completion replies: the whole object, and the chunks of a stream.

The token loop formats nothing: what stays the same over a stream's chunks is encoded once per
request, and a chunk is that frame around one JSON string.
"""

from typing import Any, Final

import msgspec

_encode = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": waiting\n\n"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a reply. `prompt_tokens` includes the cached ones."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def as_openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def completion(
    *, completion_id: str, created_s: int, model: str, text: str, finish_reason: str, usage: Usage
) -> bytes:
    """The body of a reply that is not streamed."""
    return _encode(
        {
            "id": completion_id,
            "object": "chat.completion",
            "created": created_s,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": finish_reason,
                }
            ],
            "usage": usage.as_openai(),
        }
    )


class ChunkEncoder:
    """Builds the SSE events of one stream."""

    def __init__(self, *, completion_id: str, created_s: int, model: str, is_usage_wanted: bool) -> None:
        self._base = {
            "id": completion_id,
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
        }
        self._is_usage_wanted = is_usage_wanted
        head = _encode(self._base)[:-1]
        # With the usage chunk asked for, the API carries `"usage": null` on every other chunk.
        tail = b',"usage":null}\n\n' if is_usage_wanted else b"}\n\n"
        self._text_head = b"data: " + head + b',"choices":[{"index":0,"delta":{"content":'
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]' + tail

    def first(self) -> bytes:
        """The chunk that names the role, before any text."""
        return self._choice({"role": "assistant", "content": "", "refusal": None}, None)

    def text(self, piece: str) -> bytes:
        return self._text_head + _encode(piece) + self._text_tail

    def finish(self, finish_reason: str) -> bytes:
        return self._choice({}, finish_reason)

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk: no choices, after the last of them. Only sent if it was asked for."""
        assert self._is_usage_wanted
        return event({**self._base, "choices": [], "usage": usage.as_openai()})

    def _choice(self, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        chunk = {
            **self._base,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
        }
        if self._is_usage_wanted:
            chunk["usage"] = None
        return event(chunk)


def event(content: Any) -> bytes:
    """One SSE data event."""
    return b"data: " + _encode(content) + b"\n\n"


def error_event(error: dict[str, Any]) -> bytes:
    """The last event of a stream that failed after it had begun. No `[DONE]` follows it."""
    return event({"error": error})
