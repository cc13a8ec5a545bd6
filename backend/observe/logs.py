"""Log lines of nodes and mounts, with their process and request, as text or as JSON.

A request id is made where a request enters the cluster and is sent with its messages, so that one `grep`
finds the lines of every process for it. The number of lines that strangers on the network, or programs on
a mount, can cause is limited, and no line can be made to look like two.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import Any, Final, Literal

from ..model.values import ConfigError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

LOG_LIMIT_BYTES = 16 << 20
# The most lines of one place in the code in this time; further lines are only counted.
REPEATS_MAX = 10
REPEAT_WINDOW_S = 10.0
LIMITED_LOGGERS = (
    "irdmafs.backend.transport",
    "irdmafs.backend.kv.faults",
    "irdmafs.coherence.publishing",
    "irdmafs.posix.xattrs",
)

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")

_request: ContextVar[str] = ContextVar("request", default="")
_process_part = os.urandom(4).hex()
_numbers = itertools.count(1)
os.register_at_fork(after_in_child=lambda: globals().update(_process_part=os.urandom(4).hex()))


class _Identity:
    """The identity of this process; not a context variable, which threads would not see."""

    component = ""
    member = ""


def identify(component: str, member: str = "") -> None:
    """Set the process that all lines name from now on: "node" or "mount", and its id."""
    _Identity.component = component
    _Identity.member = member


# Returns the id of the current request; "" outside of one.
current_request: Final = _request.get


@contextlib.contextmanager
def log_failure(report: Callable[..., None], text: str, *args: object) -> Iterator[None]:
    """Go on after an OSError of the block: `report` it, a method of a logger, as `text: error`. The line
    counts as one of the block's place in the code."""
    try:
        yield
    except OSError as error:
        report(f"{text}: %s", *args, error, stacklevel=3)


@contextlib.contextmanager
def request(request_id: str = "") -> Iterator[str]:
    """Work on a request: one that was received with an id, or a new one. Yields the id."""
    token = _request.set(request_id or f"{_process_part}-{next(_numbers):x}")
    try:
        yield _request.get()
    finally:
        _request.reset(token)


class RepeatLimit(logging.Filter):
    """Lets REPEATS_MAX lines of each place in the code that works on what others send through per
    REPEAT_WINDOW_S. The next line that passes carries the number of those that did not, as
    `record.dropped`."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # (file, line) -> end of the window, lines passed in it, lines dropped. Bounded by the code.
        self._places: dict[tuple[str, int], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(LIMITED_LOGGERS):
            return True
        place = record.pathname, record.lineno
        now = time.monotonic()
        with self._lock:
            end, passed, dropped = self._places.get(place, (0.0, 0, 0))
            if now >= end:
                end, passed = now + REPEAT_WINDOW_S, 0
            if passed >= REPEATS_MAX:
                self._places[place] = end, passed, dropped + 1
                return False
            self._places[place] = end, passed + 1, 0
        record.dropped = dropped
        return True


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(process)d %(levelname)s %(name)s%(where)s: %(message)s%(more)s"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _CONTROL.sub(_escaped, record.message)
        names = (_Identity.component, _Identity.member, _request.get())
        where = f" [{' '.join(filter(None, names))}]" if any(names) else ""
        record.where = _CONTROL.sub(_escaped, where)
        dropped = getattr(record, "dropped", 0)
        record.more = f" ({dropped} more like this)" if dropped else ""
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        # An error's text may have lines: none of them looks like one of the log.
        return "\n".join("  " + _CONTROL.sub(_escaped, line) for line in lines)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            "component": _Identity.component,
            "member": _Identity.member,
            "request": _request.get(),
            "dropped": getattr(record, "dropped", 0),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in fields.items() if value})


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"


def set_up_logging(
    component: str,
    format: LogFormat = "text",
    level: str = "info",
    file: str | None = None,
    *,
    limit_bytes: int = LOG_LIMIT_BYTES,
) -> None:
    """Log to `file` (rotated once at `limit_bytes`), or to stderr. Raises ConfigError."""
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler()
    else:
        try:
            handler = RotatingFileHandler(file, maxBytes=limit_bytes, backupCount=1)
        except OSError as error:
            raise ConfigError(f"cannot log to {file}: {error.strerror}") from error
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    handler.addFilter(RepeatLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # A full disk must not turn every log line into a traceback on top.
    logging.raiseExceptions = False
    identify(component)
