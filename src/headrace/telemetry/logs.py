"""Structured logs on standard error: one JSON object a line, or readable lines on a terminal.

Keys are redacted in every line, whoever wrote it.
"""

import logging
import sys

import structlog

from headrace.identity.redaction import redact_line


def configure_logs(*, level: str, fmt: str, process: str) -> None:
    """Set up structlog for this process. Call once, before anything is logged."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if fmt == "console"
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
            redact_line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
