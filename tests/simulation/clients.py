"""Clients and their connections to the gateway.

The reply goes through the real `headrace.http.Responder`; only the connection under it is simulated: the
seam is `headrace.http.connection.ServerConnection`, whose rules (buffer marks, one cancellation for a
client that leaves) are kept here in the small.
"""

import asyncio
import contextvars
import json
import random
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.app import Gateway
from headrace.http import HttpRequest, Responder
from headrace.http.responder import wait_for
from tests.simulation.virtual_loop import Process, VirtualLoop

serving: contextvars.ContextVar["Client | None"] = contextvars.ContextVar("serving", default=None)
"""Whose request a handler's task serves."""

BUFFER_HIGH = 2048
BUFFER_LOW = 512
READ_BYTES = 512
NETWORK_SECONDS = 0.0005


@dataclass
class Plan:
    """What a client is going to do."""

    number: int
    at_s: float
    tenant: int
    key: int
    model: str
    is_stream: bool
    prompt_bytes: int
    max_tokens: int | None
    stop: str | None = None
    leaves_after_s: float | None = None
    leaves_after_bytes: int | None = None
    bytes_per_s: int | None = None
    """How fast it reads; None: at once."""
    fault: str | None = None
    """`key`, `json` or `model`: a request that must be refused."""
    is_usage_wanted: bool = False
    user: str | None = None


@dataclass
class Reply:
    """What arrived, taken apart."""

    status: int
    headers: dict[str, str]
    text: str
    error: dict[str, Any] | None
    usage: dict[str, Any] | None
    finish_reason: str | None


@dataclass(eq=False)
class Client:
    """One request and what became of it."""

    plan: Plan
    received: bytearray = field(default_factory=bytearray)
    sent_s: float | None = None
    left_s: float | None = None
    """When it went away, if it did."""
    is_complete: bool = False
    """The whole reply has arrived."""
    is_ended: bool = False
    """Nothing more will come."""
    connection: "ClientConnection | None" = None

    @property
    def request_id(self) -> str | None:
        head = bytes(self.received[:400])
        _, found, rest = head.partition(b"x-request-id: ")
        return rest.split(b"\r\n", 1)[0].decode() if found else None

    def body(self) -> bytes:
        plan = self.plan
        if plan.fault == "json":
            return b'{"model": '
        content = f"gate and meter {plan.number} ".ljust(plan.prompt_bytes, "x")[: plan.prompt_bytes]
        body: dict[str, Any] = {
            "model": "unheard-of" if plan.fault == "model" else plan.model,
            "messages": [{"role": "user", "content": content}],
            "stream": plan.is_stream,
        }
        if plan.max_tokens is not None:
            body["max_tokens"] = plan.max_tokens
        if plan.user is not None:
            body["user"] = plan.user
        if plan.stop is not None:
            body["stop"] = plan.stop
        if plan.is_usage_wanted and plan.is_stream:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body).encode()

    def is_whole(self) -> bool:
        """Whether what has arrived is a whole reply."""
        head, found, body = bytes(self.received).partition(b"\r\n\r\n")
        if not found:
            return False
        if b"transfer-encoding: chunked" in head:
            return body.endswith(b"0\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
        return len(body) >= length

    def reply(self) -> Reply | None:
        """None before a whole head has arrived. A reply cut short gives what there is of it."""
        head, found, body = bytes(self.received).partition(b"\r\n\r\n")
        if not found:
            return None
        lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        status = int(lines[0].split(" ")[1])
        reply = Reply(status, headers, "", None, None, None)
        if "transfer-encoding" in headers:
            _read_events(_dechunk(body), reply)
        elif self.is_whole():
            content = json.loads(body)
            reply.error = content.get("error")
            reply.usage = content.get("usage")
            if "choices" in content:
                reply.text = content["choices"][0]["message"]["content"]
                reply.finish_reason = content["choices"][0]["finish_reason"]
        return reply


class ClientConnection:
    """The server's end of a client's connection, as far as a `Responder` sees it, and the wire behind it."""

    date_line = b""
    is_last_reply = False

    def __init__(self, client: Client, loop: VirtualLoop, process: Process, world: Any) -> None:
        self.client = client
        self.is_gone = False
        self._loop = loop
        self._process = process
        self._world = world
        self._buffer = bytearray()
        self._is_paused = False
        self._waiters: list[asyncio.Future[None]] = []
        self._pump: asyncio.TimerHandle | None = None
        self._is_read = False
        self.task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._is_cancelled = False
        self._responder: Responder | None = None

    # --- the server's side ----------------------------------------------------------------------

    def serve(self, gateway: Gateway, request: HttpRequest) -> None:
        self._responder = Responder(self, request)  # type: ignore[arg-type]
        self.task = self._process.spawn(self._run(gateway, request, self._responder))

    async def _run(self, gateway: Gateway, request: HttpRequest, responder: Responder) -> None:
        self._has_begun = True
        serving.set(self.client)
        try:
            if self.is_gone:
                return
            await gateway.handle(request, responder)
            if not responder.is_closed:
                self._world.violated("the gateway's handler ended without a complete reply")
        except asyncio.CancelledError:
            if not self._is_cancelled:
                self._world.violated("the gateway's handler was cancelled from inside")
        finally:
            self.task = None
            if not self.is_gone and not responder.is_complete:
                self.abort()

    @property
    def is_behind(self) -> bool:
        return self._is_paused

    def write(self, data: bytes) -> bool:
        if self.is_gone or not self._process.is_alive:
            return False
        self._buffer += data
        if len(self._buffer) >= BUFFER_HIGH:
            self._is_paused = True
        self._read_on()
        return not self._is_paused

    write_now = write_reply = write

    async def drain(self) -> None:
        if self.is_gone:
            await asyncio.sleep(0)
        elif self._is_paused:
            await wait_for(self._waiters)

    def abort(self) -> None:
        self._lost()
        self._loop.call_later(NETWORK_SECONDS, self._ended, context=self._loop.world.context)

    def cancel(self) -> None:
        """The server stops and does not wait any longer."""
        self._cancel_handler()

    def _cancel_handler(self) -> None:
        if self.task is not None and self._has_begun and not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()

    def _lost(self) -> None:
        self.is_gone = True
        self._buffer.clear()
        if self._responder is not None and not self._responder.is_complete:
            self._cancel_handler()
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- the client's side ----------------------------------------------------------------------

    def leave(self) -> None:
        """The client closes its connection; the server hears of it a moment later."""
        if self.client.is_ended:
            return
        self.client.left_s = self._loop.time()
        self._ended()
        self._loop.call_later(NETWORK_SECONDS, self._lost, context=self._process.context.copy())

    def server_died(self) -> None:
        """What was written still arrives; then the connection is reset."""
        self.is_gone = True
        self._loop.call_later(NETWORK_SECONDS, self._take_rest, context=self._loop.world.context)

    def _take_rest(self) -> None:
        if not self.client.is_ended:
            self._take(bytes(self._buffer))
            self._ended()

    def _read_on(self) -> None:
        if self._pump is None and self._buffer:
            rate = self.client.plan.bytes_per_s
            pause_s = NETWORK_SECONDS if rate is None else READ_BYTES / rate
            self._pump = self._loop.call_later(pause_s, self._read, context=self._loop.world.context)

    def _read(self) -> None:
        self._pump = None
        if self.client.is_ended or self.is_gone:
            return
        size = len(self._buffer) if self.client.plan.bytes_per_s is None else READ_BYTES
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._take(data)
        if self._is_paused and len(self._buffer) <= BUFFER_LOW:
            self._is_paused = False
            self._loop.call_soon(self._wake, context=self._process.context.copy())
        self._read_on()

    def _take(self, data: bytes) -> None:
        client = self.client
        if client.is_ended:
            return
        client.received += data
        limit = client.plan.leaves_after_bytes
        if client.is_whole():
            client.is_complete = True
            self._world.answered(client)
            self._ended()
        elif limit is not None and len(client.received) >= limit:
            self.leave()

    def _ended(self) -> None:
        if not self.client.is_ended:
            self.client.is_ended = True
            self._world.client_ended(self.client)


def make_plans(rng: random.Random, *, models: list[str], tenants: int, num: int, over_s: float) -> list[Plan]:
    """The clients of a world, in the order of their arrival."""
    plans = []
    bursts = [rng.uniform(0, over_s) for _ in range(3)]
    for number in range(num):
        at_s = rng.choice(bursts) + rng.random() * 0.3 if rng.random() < 0.4 else rng.uniform(0, over_s)
        is_long = rng.random() < 0.15
        max_tokens = rng.choice((1, 3, 8, 16)) if rng.random() < 0.7 else None
        plan = Plan(
            number=number,
            at_s=at_s,
            tenant=rng.randrange(tenants),
            key=rng.randrange(2),
            model=rng.choice(models),
            is_stream=rng.random() < 0.6,
            prompt_bytes=rng.choice((20, 40, 80, 200, 300))
            if rng.random() < 0.95
            else rng.choice((500, 3000)),
            max_tokens=rng.randrange(60, 120) if is_long else max_tokens,
            is_usage_wanted=rng.random() < 0.3,
            user=rng.choice((None, None, "ann", "bob")),
        )
        if rng.random() < 0.1:
            plan.stop = rng.choice((" mill", " rain water", "🌊"))
        if rng.random() < (0.5 if is_long else 0.15):
            plan.leaves_after_s = rng.choice((0.0, 0.001, 0.05, 0.5, 2.0, 5.0)) * rng.uniform(0.5, 1.5)
        elif rng.random() < 0.1:
            plan.leaves_after_bytes = rng.randrange(1, 6000)
        if rng.random() < 0.1:
            plan.bytes_per_s = rng.choice((400, 1500, 5000))
        if rng.random() < 0.06:
            plan.fault = rng.choice(("key", "json", "model"))
        plans.append(plan)
    return sorted(plans, key=lambda plan: plan.at_s)


def _dechunk(body: bytes) -> bytes:
    data = b""
    while body:
        line, found, rest = body.partition(b"\r\n")
        if not found:
            break
        size = int(line, 16)
        data += rest[:size]
        body = rest[size + 2 :]
        if not size:
            break
    return data


def _read_events(data: bytes, reply: Reply) -> None:
    for event in data.split(b"\n\n")[:-1]:
        if not event.startswith(b"data: ") or event == b"data: [DONE]":
            continue
        content = json.loads(event[6:])
        if "error" in content:
            reply.error = content["error"]
            continue
        if content.get("usage"):
            reply.usage = content["usage"]
        for choice in content["choices"]:
            reply.text += choice["delta"].get("content") or ""
            reply.finish_reason = choice["finish_reason"] or reply.finish_reason
