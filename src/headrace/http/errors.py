"""Errors of the HTTP layer, as branches of the one tree in `headrace.errors`.

HeadraceError
├── RequestRefused        a request was refused below the handler; carries status, code and text
│   └── HeadRefused           the owner's `check_head` refused it; carries the reply itself
├── HandlerFault          a handler ended without a reply: our bug, answered like any other error
└── UpstreamError         a model server could not be used
    ├── UpstreamUnreachable   no connection (refused, no such host, TLS failed)
    ├── UpstreamTimedOut      no connection, no reply head or no next byte within the time allowed
    └── UpstreamBroken        the connection ended early, or what came is not HTTP or too large
"""

from headrace.errors import HeadraceError


class RequestRefused(HeadraceError):
    """A request that never reaches a handler. `code` is the machine-readable error code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class HeadRefused(RequestRefused):
    """The server's owner refused a request by its headers. `headers` is a ready block of header lines."""

    def __init__(self, status: int, headers: bytes, body: bytes) -> None:
        super().__init__(status, "head_refused", "refused by its headers")
        self.headers = headers
        self.body = body


class HandlerFault(HeadraceError):
    """A handler finished without a complete reply, or was cancelled from inside."""


class UpstreamError(HeadraceError):
    """A model server could not be used. The text names its address."""


class UpstreamUnreachable(UpstreamError):
    """No connection could be made: nothing of the request was sent."""


class UpstreamTimedOut(UpstreamError):
    """Connecting, the head of the reply, or the next bytes took longer than allowed."""


class UpstreamBroken(UpstreamError):
    """The connection ended before the reply did, or the reply breaks the protocol or a bound."""
