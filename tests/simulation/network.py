"""The network between gateway and workers: byte streams in memory, with latency, late frames and cuts.

A connection is a pair of transports. Bytes arrive in order. One `write` of our protocol is one frame, so
frames can be named: a late one holds up those behind it, a doubled one arrives twice, a dropped one never.
What a dead process had written still arrives, then comes the end; a cut loses what is under way.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tests.simulation.virtual_loop import Process, VirtualLoop, _current

LATENCY_SECONDS = (0.00002, 0.0003)
LATE_SECONDS_MAX = 2.5


class Faults:
    """Chances for each frame, between 0 and 1. Changed by the schedule while the world runs."""

    def __init__(self) -> None:
        self.late = 0.0
        self.cut = 0.0
        self.doubled = 0.0
        self.dropped = 0.0


class VirtualNetwork:
    """All listeners and connections."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, note: Callable[..., None]) -> None:
        self.loop = loop
        self.rng = rng
        self.note = note
        self.faults = Faults()
        self._listeners: dict[str, _Listener] = {}
        self._transports: dict[VirtualTransport, None] = {}
        self._num_connections = 0
        loop.create_unix_server = self._listen  # type: ignore[method-assign, assignment]
        loop.create_unix_connection = self._connect  # type: ignore[method-assign, assignment]

    def lose(self, process: Process) -> None:
        """A process died: nobody listens for it, and its peers find the ends of their connections."""
        for path in [path for path, one in self._listeners.items() if one.process is process]:
            del self._listeners[path]
        for transport in list(self._transports):
            if transport.process is process:
                transport.vanish()

    def cut_one(self) -> None:
        """Cut a connection, if there is one."""
        if self._transports:
            self.rng.choice(list(self._transports)).cut()

    def stall_one(self, seconds: float) -> None:
        """Hold up everything on one connection, both ways; it arrives afterwards, if anybody still listens."""
        if self._transports:
            transport = self.rng.choice(list(self._transports))
            for side in (transport, transport.peer):
                side.stalled_until_s = self.loop.time() + seconds

    async def _listen(self, factory: Callable[[], Any], path: str) -> "_Listener":
        process = _current.get()
        assert process is not None
        listener = self._listeners[path] = _Listener(self, path, factory, process)
        return listener

    async def _connect(self, factory: Callable[[], Any], path: str) -> tuple[Any, Any]:
        process = _current.get()
        assert process is not None
        await asyncio.sleep(self.rng.uniform(*LATENCY_SECONDS))
        listener = self._listeners.get(path)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens on {path}")
        self._num_connections += 1
        name = f"link {self._num_connections}"
        here = VirtualTransport(self, process, f"{name} core")
        there = VirtualTransport(self, listener.process, f"{name} worker")
        here.peer, there.peer = there, here
        self._transports[here] = self._transports[there] = None
        here.protocol = factory()
        self.loop.call_soon(there.begin, listener.factory, context=listener.process.context)
        here.protocol.connection_made(here)
        return here, here.protocol

    def forget(self, transport: "VirtualTransport") -> None:
        self._transports.pop(transport, None)


class _Listener:
    def __init__(
        self, network: VirtualNetwork, path: str, factory: Callable[[], Any], process: Process
    ) -> None:
        self._network = network
        self._path = path
        self.factory = factory
        self.process = process

    def close(self) -> None:
        self._network._listeners.pop(self._path, None)


class VirtualTransport(asyncio.Transport):
    """One end of a connection."""

    peer: "VirtualTransport"
    protocol: Any = None

    def __init__(self, network: VirtualNetwork, process: Process, name: str) -> None:
        super().__init__()
        self._network = network
        self._loop = network.loop
        self.process = process
        self.name = name
        self.stalled_until_s = 0.0
        self._last_arrival_s = 0.0
        self._is_closing = False
        self._is_lost = False
        self._sent = 0

    def begin(self, factory: Callable[[], Any]) -> None:
        self.protocol = factory()
        self.protocol.connection_made(self)

    # --- the process's side ---------------------------------------------------------------------

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if self._is_closing or not self.process.is_alive:
            return
        network, faults = self._network, self._network.faults
        self._sent += 1
        chance = network.rng.random()
        if chance < faults.cut:
            self.cut()
            return
        chance = network.rng.random()
        if chance < faults.dropped:
            network.note("dropped", self.name, self._sent)
            return
        delay_s = network.rng.uniform(*LATENCY_SECONDS)
        if network.rng.random() < faults.late:
            delay_s = network.rng.uniform(0.01, LATE_SECONDS_MAX)
            network.note("late", self.name, self._sent)
        self._deliver(delay_s, self.peer.receive, data, self._sent)
        if network.rng.random() < faults.doubled:
            network.note("doubled", self.name, self._sent)
            self._deliver(0.0, self.peer.receive, data, self._sent)

    def close(self) -> None:
        """What was written arrives before the end does."""
        if self._is_closing:
            return
        self._is_closing = True
        self._deliver(0.0, self.peer.end)
        self._loop.call_soon(self.end, context=self.process.context)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    # --- the network's side ---------------------------------------------------------------------

    def receive(self, data: bytes, number: int) -> None:
        if not self._is_closing:
            self._network.note("frame", self.peer.name, number)
            self.protocol.data_received(data)

    def end(self) -> None:
        """The other side has closed, or this one has: no more bytes."""
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._network.forget(self)
        if self.protocol is not None:
            self.protocol.connection_lost(None)

    def vanish(self) -> None:
        """The process is dead; the kernel closes its end."""
        if not self._is_closing:
            self._is_closing = True
            self._deliver(0.0, self.peer.end)
        self._network.forget(self)

    def cut(self) -> None:
        """Both sides find the connection broken, each in its time; what is under way is lost."""
        self._network.note("cut", self.name, self._sent)
        for side in (self, self.peer):
            side._is_closing = True
            delay_s = self._network.rng.uniform(0.0, 0.05)
            self._loop.call_later(delay_s, side.end, context=side.process.context)

    def _deliver(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        arrival_s = max(self._loop.time() + delay_s, self.stalled_until_s, self._last_arrival_s + 1e-6)
        self._last_arrival_s = arrival_s
        self._loop.call_at(arrival_s, callback, *args, context=self.peer.process.context)
