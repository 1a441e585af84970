"""What a start does about an earlier life that ended without closing its operations."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import structlog

from headrace.core.core import Core
from headrace.worker.progress import is_released, read_records

ORPHAN_SECONDS_MAX = 15.0
"""How long a start waits for a worker of an earlier life to end."""

_log = structlog.get_logger()


async def recover(core: Core, files: Sequence[Path]) -> None:
    """Close what is open in the ledger from the progress files of the earlier life's workers; remove them."""
    # A worker that was orphaned ends its attempts first; its file says what it really generated.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ORPHAN_SECONDS_MAX):
            while not all(map(is_released, files)):  # noqa: ASYNC110 - another process lets go
                await asyncio.sleep(0.02)
    for file in files:
        if not is_released(file):
            _log.error("orphaned_worker_still_runs", progress=file.name)
    await core.recover(record for file in files for record in read_records(file))
    for file in files:
        file.unlink()
