"""An OpenAI-compatible server that misbehaves on request: the prompt names the script."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def chunk(text: str | None = None, *, finish: str | None = None, usage: Any = None) -> dict[str, Any]:
    if usage is not None:
        return {"id": "u", "object": "chat.completion.chunk", "choices": [], "usage": usage}
    delta = {} if text is None else {"content": text}
    return {
        "id": "u",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }


USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 3,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4},
}
WHOLE = {
    "id": "u",
    "object": "chat.completion",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "one two three"}, "finish_reason": "stop"}
    ],
    "usage": USAGE,
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._whole(200, {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((dict(self.headers), body))
        script = body["messages"][-1]["content"]
        if script.startswith("busy ") and self.server.is_busy(script):
            self._whole(429, {"error": {"message": "too many", "type": "x", "code": "y"}}, retry_after="0.05")
        elif script.startswith("status "):
            self._whole(
                int(script.split()[1]), {"error": {"message": "upstream says no", "type": "x", "code": "y"}}
            )
        elif script == "error body":
            self._whole(200, {"error": {"message": "boom"}})
        elif script == "no json":
            self._whole(200, None, raw=b"<html>")
        elif body.get("stream"):
            self._stream(script)
        else:
            self._whole(200, WHOLE)

    def _whole(
        self, status: int, content: Any, *, raw: bytes | None = None, retry_after: str | None = None
    ) -> None:
        data = raw if raw is not None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if retry_after is not None:
            self.send_header("retry-after", retry_after)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, script: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for word in ("one", " two", " three"):
            self._event(chunk(word))
        if script == "cut":
            self.close_connection = True
            self.connection.close()
            return
        if script == "stall":
            self.server.released.wait(20)
            self.close_connection = True
            return
        if script == "error event":
            self._event({"error": {"message": "boom"}})
        if script == "malformed usage":
            self._raw(b'data: {"choices":[],"usage":{"prompt_tokens":"x"\n\n')
        self._event(chunk(finish="stop"))
        if script != "no end mark":
            self._event(chunk(usage=USAGE))
            self._raw(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, content: Any) -> None:
        self._raw(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _raw(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.released = threading.Event()
        self._times: dict[str, int] = {}

    def is_busy(self, script: str) -> bool:
        """ "busy 3 …" is refused three times, then served."""
        self._times[script] = self._times.get(script, 0) + 1
        return self._times[script] <= int(script.split()[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A relay that goes away is what the tests are about."""


@contextmanager
def scripted_upstream() -> Iterator[_Server]:
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
