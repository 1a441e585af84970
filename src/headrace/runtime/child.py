"""A child process that gets its orders as a JSON line and answers with one.

Both child roles (worker, admin) work this way: orders on standard input, whose end tells the child
that its parent is gone; one line on standard output when it is ready or has failed; logs on standard
error, passed through.
"""

import asyncio
import contextlib
import os
import signal
import sys

ANSWER_BYTES_MAX = 1024 * 1024


class ChildDied(Exception):
    """The child ended without an answer."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with status {status} before it was ready")
        self.status = status


class Child:
    """A running child. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, role: str, orders: bytes, *, environment: dict[str, str] | None = None) -> "Child":
        """Start `python -m headrace.runtime.roles ROLE` in a session of its own.

        A session of its own keeps a terminal's Ctrl-C away from it: the parent decides when it stops.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace.runtime.roles",
            role,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=ANSWER_BYTES_MAX,
            env={**os.environ, **(environment or {})},
        )
        child = cls(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(orders + b"\n")
            await process.stdin.drain()
        return child

    async def answer(self) -> bytes:
        """The child's line. Raises `ChildDied`."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ChildDied(await self._process.wait())
        return line

    async def wait(self) -> int:
        """The exit status; negative for a signal."""
        return await self._process.wait()

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def stop(self, timeout_s: float) -> int:
        """Ask it to stop; kill it if it has not within `timeout_s`."""
        self.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    async def end(self) -> int:
        """Make sure that it is gone."""
        self.kill()
        return await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
