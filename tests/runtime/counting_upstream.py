"""A foreign server that knows how many tokens it has sent, and goes wrong as the prompt says: "5 stall"."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT_TOKENS = 11


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "CountingUpstream"

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number, _, then = body["messages"][-1]["content"].partition(" ")
        with contextlib.suppress(OSError):
            (self._stream if body.get("stream") else self._whole)(int(number), then)

    def _whole(self, number: int, then: str) -> None:
        self.server.generated = number
        if then == "stall":
            self.close_connection = True
            self.server.released.wait(20)
            return
        message = {"role": "assistant", "content": " word" * number}
        content: dict[str, Any] = {
            "id": "u",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        if then == "error":
            content = {"error": {"message": "boom"}}
        elif then != "no usage":
            content["usage"] = self._usage(number)
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, number: int, then: str) -> None:
        self.server.generated = number
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(number):
            self._event({"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
        if then == "stall":
            self.close_connection = True
            self.server.released.wait(20)
            return
        if then == "error":
            self._event({"error": {"message": "boom, in nine words that nobody may ever count"}})
        else:
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            if then != "no usage":
                self._event({"choices": [], "usage": self._usage(number)})
            self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _usage(self, number: int) -> dict[str, int]:
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": number,
            "total_tokens": PROMPT_TOKENS + number,
        }

    def _event(self, content: Any) -> None:
        self._chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


class CountingUpstream(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.generated = 0
        """Tokens of the answer made last."""
        self.released = threading.Event()
        """Ends what stalls."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A relay that goes away is what the tests are about."""


@contextlib.contextmanager
def counting_upstream() -> Iterator[CountingUpstream]:
    server = CountingUpstream()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
