"""Log configuration of the server's processes: lines on stderr, by default warnings and errors only.

A line is text, or one JSON object with the same content: at (UTC), level, logger, message, and the fields of its event
(`extra={"fields": {...}}`). Prompts, images, answers and tokens are never logged.
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
from collections.abc import Mapping

LEVELS = ("error", "warning", "info", "debug")
LEVEL_VARIABLE, JSON_VARIABLE = "VLORA_LOG_LEVEL", "VLORA_LOG_JSON"

AUDIT_BYTES, _AUDIT_FILES = 16 * 2**20, 9  # of a file, and of files before it

_OTHERS = ("uvicorn", "asyncio", "python_multipart")
"""Libraries of which only errors are logged; their warnings are about invalid input from clients."""


def configure(environ: Mapping[str, str]) -> None:
    """Configure logging from the two variables. The engine process inherits them, so that its format is the same."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if environ.get(JSON_VARIABLE) else _TextLines())
    level = environ.get(LEVEL_VARIABLE, "warning")
    for package in ("vlora", "atmm"):
        _write(package, handler, level if level in LEVELS else "warning")
    for library in _OTHERS:
        _write(library, handler, "error")


def write_audit_log(file: str) -> None:
    """Write the audit log of administration as JSON lines to a file that rotates. Raises OSError."""
    handler = logging.handlers.RotatingFileHandler(file, maxBytes=AUDIT_BYTES, backupCount=_AUDIT_FILES)
    handler.setFormatter(_JsonLines())
    _write("vlora.audit", handler, "info")


def _write(name: str, handler: logging.Handler, level: str) -> None:
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{_at(record)} {record.levelname.lower()} {record.name}: {record.getMessage()}{fields}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": _at(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _at(record: logging.LogRecord) -> str:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "fields", {})
