"""The admin process: started by the supervisor, tells its port, ends with its parent.

Settings come as one JSON line on standard input. When it listens, one JSON line `{"port": N}` goes to
standard output, or `{"error": TEXT}` when it cannot. When standard input ends, the parent is gone and so is this process.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec
import structlog
import uvicorn

from headrace import bounds
from headrace.admin.app import create_app
from headrace.clock import SystemClock
from headrace.core.client import CoreClient
from headrace.errors import SetupError
from headrace.identity import ADMIN_KEY, KeyVerifier, decode_public_key
from headrace.telemetry.logs import configure_logs

CONCURRENCY_MAX: Final = 64
DRAIN_SECONDS: Final = 3

_log = structlog.get_logger("headrace.admin")


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor tells the admin process."""

    host: str
    port: int
    """0 takes a free one."""
    core_socket: str
    ledger_path: str
    public_keys: dict[str, str]
    """Public signing keys in base64url by `kid`."""
    log_level: str = "info"
    log_format: str = "json"


def run_admin(settings: AdminSettings) -> int:
    """Serves until SIGTERM, SIGINT or the end of standard input; returns the exit status."""
    configure_logs(level=settings.log_level, fmt=settings.log_format, process="admin")
    logging.basicConfig(handlers=[_ToStructlog()], level=logging.WARNING, force=True)
    try:
        listener = _listen(settings.host, settings.port)
        public_keys = {kid: decode_public_key(text) for kid, text in settings.public_keys.items()}
    except SetupError as error:
        _say({"error": str(error)})
        return 2
    asyncio.run(_serve(settings, KeyVerifier(public_keys, ADMIN_KEY), listener))
    return 0


async def _serve(settings: AdminSettings, verifier: KeyVerifier, listener: socket.socket) -> None:
    core = CoreClient(Path(settings.core_socket))
    app = create_app(core=core, ledger=Path(settings.ledger_path), verifier=verifier, clock=SystemClock())
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONCURRENCY_MAX,
            h11_max_incomplete_event_size=bounds.HEADER_BYTES_MAX,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
    )
    loop = asyncio.get_running_loop()
    threading.Thread(target=_watch_parent, args=(loop, server), daemon=True).start()
    try:
        await server.serve(sockets=[listener])
    finally:
        await core.close()


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        port = sockets[0].getsockname()[1]
        _say({"port": port})
        _log.info("admin_listening", port=port)


class _ToStructlog(logging.Handler):
    """Sends what uvicorn and other libraries log through structlog, and so through redaction."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def _say(answer: dict[str, int | str]) -> None:
    """The one line that the supervisor waits for."""
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more; standard input says so as well
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=CONCURRENCY_MAX)
    except OSError as error:
        reason = (
            "is already in use by another program; stop that or choose another one (--admin-port)"
            if error.errno == errno.EADDRINUSE
            else f"cannot be listened on: {error.strerror}"
        )
        raise SetupError(f"port {port} on {host}, for the admin API, {reason}") from error


def _watch_parent(loop: asyncio.AbstractEventLoop, server: uvicorn.Server) -> None:
    """Runs in a thread of its own: standard input may be of a kind that no event loop can watch."""
    while os.read(sys.stdin.fileno(), 4096):
        pass

    def stop() -> None:
        server.should_exit = True

    with contextlib.suppress(RuntimeError):  # the loop has ended by itself meanwhile
        loop.call_soon_threadsafe(stop)


if __name__ == "__main__":
    sys.exit(run_admin(msgspec.json.decode(sys.stdin.buffer.readline(), type=AdminSettings)))
