"""Logging to standard error: constant messages, followed by their fields."""

import logging
import sys

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class FieldFormatter(logging.Formatter):
    """Appends the fields of a record (`extra`) as `key=value`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - named by logging
        """Return the line of a record, without traceback."""
        fields = (
            f" {key}={value!r}" for key, value in vars(record).items() if key not in _STANDARD
        )
        return super().formatMessage(record) + "".join(fields)


def configure(line_format: str) -> None:
    """Log messages of level INFO and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter(line_format))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
