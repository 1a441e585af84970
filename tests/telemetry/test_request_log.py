"""The line for each request: one JSON object, in the form of all other lines, without a key."""

import asyncio
import json
from typing import Any

import pytest

from headrace.telemetry.request_log import RequestLog


class FixedClock:
    def wall_us(self) -> int:
        return 1_795_980_312_491_965

    def monotonic_us(self) -> int:
        return 0


def log(**changes: Any) -> RequestLog:
    return RequestLog(FixedClock(), **{"level": "info", "fmt": "json", "process": "gateway", **changes})


async def test_lines_of_one_turn_leave_together_and_hold_what_all_lines_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = log()
    writer.write({"status": 200, "model": "m\n水"})
    writer.write({"status": 401, "route": "/v1/hr_live_eyJhbGciOiJFZERTQSJ9.eyJpc3MiOiJ4In0.abc"})
    assert capsys.readouterr().err == ""
    await asyncio.sleep(0)
    first, second = capsys.readouterr().err.splitlines()
    assert json.loads(first) == {
        "status": 200,
        "model": "m\n水",
        "event": "request",
        "process": "gateway",
        "level": "info",
        "timestamp": "2026-11-29T19:25:12.491965Z",
    }
    assert json.loads(second)["route"] == "/v1/hr_live_[redacted]"


async def test_nothing_is_written_above_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    log(level="warning").write({"status": 200})
    await asyncio.sleep(0)
    assert capsys.readouterr().err == ""
