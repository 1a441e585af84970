"""Keeps the admin process running. It may die at any time; traffic does not notice."""

import asyncio

import msgspec
import structlog

from headrace.errors import SetupError
from headrace.runtime.child import Child, ChildDied

RESTART_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)

_log = structlog.get_logger()


class Answer(msgspec.Struct, frozen=True):
    """What the admin process says: where it listens, or why it does not."""

    port: int = 0
    error: str | None = None


_answer = msgspec.json.Decoder(Answer).decode


class AdminProcess:
    """The supervised admin process. After the first start it keeps the port it was given."""

    def __init__(self, orders: dict[str, object]) -> None:
        self._orders = orders
        self._child: Child | None = None
        self._is_stopping = False
        self.started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its port, once it listens for the first time; fails if it cannot."""

    async def run(self) -> None:
        failures = 0
        while not self._is_stopping:
            child = self._child = await Child.start("admin", msgspec.json.encode(self._orders))
            try:
                answer = _answer(await child.answer())
                if answer.error is not None:
                    raise SetupError(answer.error)
                port = answer.port
                self._orders["port"] = port
                failures = 0
                if not self.started.done():
                    self.started.set_result(port)
                await child.wait()
            except (ChildDied, SetupError, msgspec.DecodeError) as error:
                if self._is_stopping:
                    return
                if not self.started.done():
                    self.started.set_exception(SetupError(str(error)))
                    return
                _log.error("admin_failed", error=str(error))
            if self._is_stopping:
                return
            pause_s = RESTART_SECONDS[min(failures, len(RESTART_SECONDS) - 1)]
            failures += 1
            _log.warning("admin_restarts", pid=child.pid, pause_s=pause_s)
            await asyncio.sleep(pause_s)

    async def stop(self, timeout_s: float) -> None:
        self._is_stopping = True
        if self._child is not None:
            await self._child.stop(timeout_s)
