"""The one line for each request.

The same form as every other log line, but not through structlog: a fifth of the gateway's time went into
its pipeline. Lines of one turn of the event loop leave in one write.
"""

import asyncio
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from headrace.clock import Clock
from headrace.identity.redaction import redact

_encode = msgspec.json.Encoder().encode


class RequestLog:
    """Writes request lines as `configure_logs` set up the others. Belongs to one event loop."""

    def __init__(self, clock: Clock, *, level: str, fmt: str, process: str) -> None:
        self._clock = clock
        self._is_on = level in ("debug", "info")
        self._is_json = fmt == "json"
        self._process = process
        self._second = -1
        self._prefix = ""
        self._pending: list[str] = []

    def write(self, fields: dict[str, Any]) -> None:
        """One line. `fields` are the log's from here on: it adds its own to them."""
        if not self._is_on:
            return
        if not self._is_json:
            structlog.get_logger().info("request", **fields)
            return
        fields["event"] = "request"
        fields["process"] = self._process
        fields["level"] = "info"
        fields["timestamp"] = self._timestamp()
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(redact(_encode(fields).decode()))

    def _flush(self) -> None:
        lines, self._pending = self._pending, []
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()

    def _timestamp(self) -> str:
        second, microseconds = divmod(self._clock.wall_us(), 1_000_000)
        if second != self._second:
            self._second = second
            self._prefix = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._prefix}.{microseconds:06d}Z"
