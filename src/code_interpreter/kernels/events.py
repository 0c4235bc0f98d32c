"""What a run of code produces, in order: `Accepted`, then any of the others, then `Ended`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Accepted:
    """The kernel has begun with the code."""

    execution_count: int


@dataclass(frozen=True)
class Output:
    """Text that the code printed."""

    stream: str
    """`stdout` or `stderr`."""
    text: str


@dataclass(frozen=True)
class Result:
    """A value in one or more MIME types: the last expression, or something displayed."""

    data: Mapping[str, Any]
    is_main: bool
    """Whether it is the value of the last expression."""


@dataclass(frozen=True)
class Failure:
    """The code raised an exception, or could not be run to its end."""

    name: str
    value: str
    traceback: str = ""


@dataclass(frozen=True)
class Ended:
    """The run has ended, with or without a failure."""


Event = Accepted | Output | Result | Failure | Ended


class KernelError(Exception):
    """A kernel could not be started."""


class KernelDiedError(Exception):
    """The process of a kernel ended during a run. The message says why."""


class UnknownLanguageError(KernelError):
    """There is no kernel for the language."""


class UnknownContextError(Exception):
    """There is no such context."""
