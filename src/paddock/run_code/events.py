"""The events of a code run, and how a line of the stream becomes one.

Each line is one JSON object with a `type`. It comes from a program in the sandbox, so nothing about
it is trusted: a line of an unknown type is skipped, one that is malformed is an error.
"""

import base64
import binascii
import json

import msgspec
from msgspec import Raw, Struct

from paddock.kit.errors import PaddockError

MAX_LENIENT_BYTES = 32 << 20
_ABSENT = Raw()


class BadStreamError(PaddockError):
    """The sandbox sent something that is not a stream of events."""


class RunStarted(Struct, frozen=True, tag_field="type", tag="number_of_executions"):
    """The kernel began to run the code."""

    execution_count: int = 0


class StdoutText(Struct, frozen=True, tag_field="type", tag="stdout"):
    """A piece of standard output; pieces do not end at lines."""

    text: str = ""


class StderrText(Struct, frozen=True, tag_field="type", tag="stderr"):
    """A piece of standard error."""

    text: str = ""


class ResultImage(Struct, frozen=True):
    """An image in a result."""

    mime: str
    suffix: str
    base64: str

    def decoded(self) -> bytes | None:
        """Return the bytes of the image, or None if they cannot be decoded."""
        try:
            return base64.b64decode(self.base64)
        except (binascii.Error, ValueError):
            return None


class CodeResult(Struct, frozen=True, kw_only=True, tag_field="type", tag="result"):
    """A value that the code displayed, in one or more formats."""

    is_main_result: bool = False
    """Whether it is the value of the last expression."""
    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: str | None = None
    """Base64, as are `jpeg` and `pdf`."""
    jpeg: str | None = None
    pdf: str | None = None
    latex: str | None = None
    json: Raw = _ABSENT
    """JSON as it was sent, as are `data`, `chart` and `extra`: few callers need the objects, which
    take many times the memory."""
    javascript: str | None = None
    data: Raw = _ABSENT
    """The columns of a data frame."""
    chart: Raw = _ABSENT
    """The numbers and labels of a chart."""
    extra: Raw = _ABSENT
    """Other formats by their MIME type."""

    @property
    def is_chart(self) -> bool:
        """Whether it has the numbers of a chart."""
        return bytes(self.chart) not in (b"", b"null")

    def image(self) -> ResultImage | None:
        """Return the result as a PNG or JPEG image, if it has one."""
        if self.png:
            return ResultImage("image/png", "png", self.png)
        if self.jpeg:
            return ResultImage("image/jpeg", "jpg", self.jpeg)
        return None


class CodeError(Struct, frozen=True, tag_field="type", tag="error"):
    """An exception that the code did not handle, or a failure of the kernel."""

    name: str = ""
    value: str = ""
    traceback: str = ""


class RunEnded(Struct, frozen=True, tag_field="type", tag="end_of_execution"):
    """The run is over; no event follows."""


class RunBroken(Struct, frozen=True, tag_field="type", tag="unexpected_end_of_execution"):
    """The kernel ended while it ran the code; no event follows."""


class EventOmitted(Struct, frozen=True):
    """An event that was larger than a limit; the run goes on."""

    size_bytes: int


CodeEvent = RunStarted | StdoutText | StderrText | CodeResult | CodeError | RunEnded | RunBroken
"""What a line of the stream can say."""


class _Line(Struct):
    type: str


_KNOWN = frozenset(
    str(kind.__struct_config__.tag)
    for kind in (RunStarted, StdoutText, StderrText, CodeResult, CodeError, RunEnded, RunBroken)
)
_event = msgspec.json.Decoder(CodeEvent)
_line = msgspec.json.Decoder(_Line)


def parse(
    line: bytes, *, max_lenient_bytes: int = MAX_LENIENT_BYTES
) -> CodeEvent | EventOmitted | None:
    """Return the event of a line, or None if the line has none, such as `keepalive`.

    A line that only Python's JSON reads is left out if it is larger than `max_lenient_bytes`: that
    takes many times its size in memory.
    """
    try:
        return _decoded(line)
    except (msgspec.DecodeError, RecursionError):
        if len(line) > max_lenient_bytes:
            return EventOmitted(len(line))
    try:
        # Python's JSON may have lone surrogates, and NaN in columns of data frames.
        found = json.loads(line, parse_constant=lambda _: None)
        return _decoded(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise BadStreamError(
            f"the code interpreter sent a line that is not an event: {error}",
            hint="the template may have another server on port 49999",
        ) from error


def _decoded(line: bytes) -> CodeEvent | None:
    try:
        return _event.decode(line)
    except msgspec.ValidationError:
        if _line.decode(line).type in _KNOWN:
            raise
        return None
