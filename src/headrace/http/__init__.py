"""HTTP/1.1 data plane on asyncio and httptools: server, client for model servers, SSE framing.

It knows nothing of language models. Imports go down only: this package needs `bounds`, `clock` and
`errors` of headrace and nothing else.
"""

from headrace.http.client import HttpClient
from headrace.http.client_response import ClientResponse, Drain, Sink
from headrace.http.errors import (
    HandlerFault,
    RequestRefused,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimedOut,
    UpstreamUnreachable,
)
from headrace.http.limits import HttpLimits
from headrace.http.message import Headers, HttpRequest
from headrace.http.responder import Responder
from headrace.http.server import CheckHead, Handler, HttpServer, OnError, RefusalReply, RenderRefusal
from headrace.http.sse import SseSplitter, data_of

__all__ = [
    "CheckHead",
    "ClientResponse",
    "Drain",
    "Handler",
    "HandlerFault",
    "Headers",
    "HttpClient",
    "HttpLimits",
    "HttpRequest",
    "HttpServer",
    "OnError",
    "RefusalReply",
    "RenderRefusal",
    "RequestRefused",
    "Responder",
    "Sink",
    "SseSplitter",
    "UpstreamBroken",
    "UpstreamError",
    "UpstreamTimedOut",
    "UpstreamUnreachable",
    "data_of",
]
