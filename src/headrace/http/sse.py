"""Server-Sent Events as raw bytes, for relays: where one ends and the next begins, nothing more.

Events are returned as they came, blank line included, so that they can be passed on without being
built again. Source: WHATWG HTML, 9.2.6 "Interpreting an event stream".
"""

from headrace import bounds
from headrace.errors import ProtocolError


class SseSplitter:
    """Incremental: `feed` bytes as they come, get whole events; `rest` is the beginning of the next.

    Lines end with LF or CR LF, also mixed. A lone CR, which the standard allows and no model server
    sends, is not taken for a line end. Comments (`: ping`) come out as events of their own.
    """

    __slots__ = ("_event_bytes_max", "_parts", "_size")

    def __init__(self, event_bytes_max: int = bounds.SSE_EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def rest(self) -> bytes:
        """Bytes of an event whose end has not come. Empty at the end of a stream that is whole."""
        return b"".join(self._parts)

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by `data`, in order. Raises ProtocolError for one over the bound."""
        if self._parts:
            # Only the seam and the new bytes can hold the end: a long event costs no second look.
            seam = b"".join(self._parts[-3:])[-3:] + data
            if not _end_of_event(seam, 0):
                return self._keep(data)
            data = self.rest + data
            self._parts.clear()
            self._size = 0
        elif (
            data.endswith(b"\n\n")
            and data.find(b"\n\n") == len(data) - 2
            and b"\r" not in data
            and len(data) <= self._event_bytes_max
        ):
            return [data]
        events = self._split(data)
        if any(len(event) > self._event_bytes_max for event in events):
            raise self._too_large()
        return events

    def _keep(self, data: bytes) -> list[bytes]:
        if data:
            self._parts.append(data)
            self._size += len(data)
            if self._size > self._event_bytes_max:
                raise self._too_large()
        return []

    def _too_large(self) -> ProtocolError:
        return ProtocolError(f"a server-sent event is over {self._event_bytes_max} bytes")

    def _split(self, data: bytes) -> list[bytes]:
        events: list[bytes] = []
        if b"\r" not in data:
            *complete, rest = data.split(b"\n\n")
            self._keep(rest)
            return [event + b"\n\n" for event in complete]
        start = 0
        while (end := _end_of_event(data, start)) > 0:
            events.append(data[start:end])
            start = end
        self._keep(data[start:])
        return events


def _end_of_event(data: bytes, start: int) -> int:
    """The offset after the first blank line at or after `start`, 0 if there is none yet."""
    at = start
    while True:
        newline = data.find(b"\n", at)
        if newline < 0:
            return 0
        if data.startswith(b"\n", newline + 1):
            return newline + 2
        if data.startswith(b"\r\n", newline + 1):
            return newline + 3
        at = newline + 1


def data_of(event: bytes) -> bytes | None:
    """The payload of an event: its `data:` lines joined with LF, None where it has none (a comment)."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]  # one line, LF endings: what model servers send
    lines: list[bytes] = []
    for raw_line in event.split(b"\n"):
        line = raw_line.removesuffix(b"\r")
        if line == b"data":
            lines.append(b"")
        elif line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
    return b"\n".join(lines) if lines else None
