"""Structured logs: one line per event, with the role, the pod and the request id.

`main` calls `configure` once, first. Code then logs with
`structlog.get_logger("tandem.<module>").info("what happened", key=value)`; the server's interceptor binds
the request id to the context. Output of libraries that use `logging` has the same form.
"""

from __future__ import annotations

import logging
import re
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from tandem_service.settings import CommonSettings

#: Control characters of terminals, which a log line may quote from a caller; traceback lines end in \n.
_CONTROLS = r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b"
#: The renderer's own colors.
_COLOR = r"(?!\[[0-9;]*m)"


class _Line(str):
    """A line that structlog has rendered; rendering in the formatter would copy each record twice."""


class _Formatter(structlog.stdlib.ProcessorFormatter):
    """Renders the records of libraries."""

    def format(self, record: logging.LogRecord) -> str:
        return record.msg if isinstance(record.msg, _Line) else super().format(record)


def configure(settings: CommonSettings, role: str) -> None:
    """Sends structlog and `logging` to stderr in `settings.log_format`, from `settings.log_level` up."""

    def add_origin(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {"role": role, "pod": settings.pod_id, **event}

    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    as_json = settings.log_format == "json"
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        # A console shows one process, or `tandem up` puts its name before each line.
        *([add_origin] if as_json else []),
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
    ]
    render: Processor = structlog.processors.JSONRenderer() if as_json else _console(sys.stderr.isatty())
    if as_json:
        shared.append(structlog.processors.format_exc_info)

    def render_line(logger: WrappedLogger, method: str, event: EventDict) -> str:
        return _Line(render(logger, method, event))

    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, render_line],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Formatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    # No line shows the calling function, thread or process, and finding them takes a third of a line's time.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    # At debug level gRPC logs a line per call, and asyncio one per selector.
    for noisy in ("grpc._cython.cygrpc", "asyncio"):
        logging.getLogger(noisy).setLevel(max(level, logging.INFO))
    # Its start and end are in the server's own log lines.
    # Its warnings are about requests that are no HTTP, which anyone may send.
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.ERROR))


def _console(colors: bool) -> Processor:
    """Renders lines for a terminal, with control characters escaped."""
    # Not structlog's default, which shows local variables: users' prompts, and takes seconds.
    render = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
    controls = re.compile(_CONTROLS + (_COLOR if colors else ""))

    def render_escaped(logger: WrappedLogger, method: str, event: EventDict) -> str:
        return controls.sub(lambda found: repr(found[0])[1:-1], render(logger, method, event))

    return render_escaped
