"""AU-6, GO-8: keys never reach a log."""

import io
import json
import logging
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from headrace.identity import DEFAULT_SCOPES, SigningKey, issue, redact, redact_line

KEY = issue(
    SigningKey.generate(),
    tenant="demo",
    jti="key_1",
    scopes=DEFAULT_SCOPES,
    issued_us=0,
    expires_us=9_000_000_000_000_000,
)
SECRET = KEY.removeprefix("hr_live_")


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        f"Authorization: Bearer {KEY}",
        f'{{"key":"{KEY}"}}',
        f"curl -H 'x: {KEY}' http://localhost",
        KEY.replace("hr_live_", "hr_admin_"),
        KEY.replace("hr_live_", "HR_LIVE_"),
        SECRET,
        f"https://host/?key={KEY}&b=1",
        f"{KEY},{KEY}",
    ],
)
def test_keys_are_taken_out(text: str) -> None:
    shown = redact(text)
    assert "[redacted]" in shown
    for part in SECRET.split("."):
        assert part not in shown


@given(st.integers(8, len(SECRET)), st.text(st.characters(codec="ascii"), max_size=20))
def test_cut_off_keys_are_taken_out_too(length: int, around: str) -> None:
    shown = redact(f"{around} hr_live_{SECRET[:length]} {around}")
    assert SECRET[:length] not in shown


def test_other_text_stays_as_it_is() -> None:
    text = "hr_live keys of tenant demo: key_0123456789abcdef01234567, eyJ, snake_case.and.dots"
    assert redact(text) == text


@pytest.mark.parametrize("renderer", [structlog.processors.JSONRenderer(), structlog.dev.ConsoleRenderer()])
def test_the_processor_reaches_nested_values_objects_and_exceptions(renderer: Any) -> None:
    event = {
        "event": f"used {KEY}",
        "headers": {"authorization": f"Bearer {KEY}", KEY: [KEY, (KEY,), {KEY}]},
        "raw": KEY.encode(),
        "error": ValueError(KEY),
        "count": 3,
    }
    line = redact_line(None, "info", renderer(None, "info", event))
    assert SECRET not in line
    assert not any(part in line for part in SECRET.split("."))
    assert "count" in line


def test_a_structlog_pipeline_with_an_exception_shows_no_key() -> None:
    output = io.StringIO()
    log = structlog.wrap_logger(
        structlog.PrintLogger(output),
        processors=[
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
            redact_line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    try:
        raise ValueError(f"bad key {KEY}")
    except ValueError:
        log.exception("failed", key=KEY)
    line = json.loads(output.getvalue())
    assert line["event"] == "failed"
    assert SECRET not in output.getvalue()
