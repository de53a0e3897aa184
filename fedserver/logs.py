"""The server's log: one line for each thing that happened, with time, level, round and device; as text or as JSON."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Literal, TextIO

import msgspec

from attune.common.durable import forget_output

Form = Literal["text", "json"]
LOGGER = "fedserver"
CLOSED = "fedserver: nobody reads this output any more; the server goes on without its log"


class LogContext(logging.Filter):
    """Filter that adds to each record the open round, and the device that it is about (`extra={"device": name}`), if any."""

    def __init__(self) -> None:
        super().__init__()
        self.round_of: Callable[[], int | None] = lambda: None

    def filter(self, record: logging.LogRecord) -> bool:
        record.round = self.round_of()
        record.device = getattr(record, "device", None)
        return True


class Text(logging.Formatter):
    """`2026-11-22T11:02:33+00:00 INFO round=3 device=ada ada connected (40 samples)`; a traceback goes on the lines below."""

    def format(self, record: logging.LogRecord) -> str:
        facts = [(key, getattr(record, key, None)) for key in ("round", "device")]
        where = "".join(f"{key}={value} " for key, value in facts if value is not None)
        line = f"{_time(record, 'seconds')} {record.levelname} {where}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Json(logging.Formatter):
    """One JSON object a line: time, level, message, round, device, and the traceback of an unexpected error."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record, "milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "round": getattr(record, "round", None),
            "device": getattr(record, "device", None),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _time(record: logging.LogRecord, timespec: str) -> str:
    return datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec=timespec)


class OutputHandler(logging.StreamHandler[TextIO]):
    """Handler that writes lines to stdout. A closed pipe, as after `fedserver | head`, is named once and ends nothing."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            forget_output(CLOSED)
        else:
            super().handleError(record)


def begin(form: Form, verbosity: int) -> None:
    """Log to stdout from now on.

    Args:
        form: text or json.
        verbosity: Below 0: warnings and errors; 0: information too; above 0: also what helps to find faults.
    """
    handler = OutputHandler(sys.stdout)
    handler.setFormatter(Json() if form == "json" else Text())
    handler.addFilter(LogContext())
    logging.basicConfig(level=logging.WARNING if verbosity < 0 else logging.INFO, handlers=[handler], force=True)
    logging.getLogger(LOGGER).setLevel(logging.WARNING if verbosity < 0 else logging.DEBUG if verbosity > 0 else logging.INFO)


def follow(round_of: Callable[[], int | None]) -> None:
    """Name the open round in each line from now on. No-op where another program has set the log up."""
    for handler in logging.getLogger().handlers:
        for context in handler.filters:
            if isinstance(context, LogContext):
                context.round_of = round_of


def speaker(form: Form, verbosity: int, say: Callable[[str], None]) -> Callable[[str], None]:
    """Return the function that says a start's lines: plainly, through the log where that is for machines, or not at all."""
    if verbosity < 0:
        return lambda text: None

    def safely(text: str) -> None:
        try:
            say(text)
        except BrokenPipeError:
            forget_output(CLOSED)

    return logging.getLogger(LOGGER).info if form == "json" else safely
