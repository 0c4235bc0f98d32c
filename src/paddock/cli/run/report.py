"""Reports a run: output as it comes, results, images, the exception; or one JSON object."""

import re
import sys
from typing import Any, TextIO

import msgspec

from paddock.cli.output import Output, notes
from paddock.cli.run.files import ImageFiles
from paddock.run_code.events import (
    CodeError,
    CodeEvent,
    CodeResult,
    EventOmitted,
    RunBroken,
    StderrText,
    StdoutText,
)

_EXITS = ("SystemExit", "ExitStatus")
"""The names of errors that set the exit code: of Python, and of the bash of our own interpreter."""
_NUMBER = re.compile(r"-?[0-9]{1,18}")
MAX_COLLECTED_CHARACTERS = 32 << 20
"""How much of each output, and of all results, JSON has; the rest is counted."""


class RunReport:
    """Reports the events of a run; subclasses choose the form."""

    def __init__(self, images: ImageFiles) -> None:
        self._images = images
        self.exit_code = 0

    def add(self, event: CodeEvent | EventOmitted) -> None:
        """Report an event."""
        if isinstance(event, StdoutText):
            self.print(event.text, sys.stdout)
        elif isinstance(event, StderrText):
            self.print(event.text, sys.stderr)
        elif isinstance(event, CodeResult):
            self.show(event)
        elif isinstance(event, EventOmitted):
            self.note(f"output of {event.size_bytes} bytes at once is too large and was left out")
        elif isinstance(event, RunBroken):
            self.exit_code = self.exit_code or 1
            self.note("the kernel ended while it ran the code")
        elif isinstance(event, CodeError):
            self.exit_code = exit_code_of(event)
            self.fail(event)

    def print(self, text: str, stream: TextIO) -> None:
        """Report a piece of output."""
        raise NotImplementedError

    def show(self, result: CodeResult) -> None:
        """Report a result."""
        raise NotImplementedError

    def fail(self, error: CodeError) -> None:
        """Report an exception."""
        raise NotImplementedError

    def note(self, text: str) -> None:
        """Report something about the run."""
        notes.print(text, markup=False, soft_wrap=True)

    def finish(self, sandbox_id: str) -> None:
        """Report the end of the run."""


class TextReport(RunReport):
    """Forwards output and prints results."""

    def print(self, text: str, stream: TextIO) -> None:
        """Forward a piece of output."""
        stream.buffer.write(text.encode(errors="replace"))
        stream.buffer.flush()

    def show(self, result: CodeResult) -> None:
        """Save an image; print any other result."""
        path = self._images.save(result)
        if path is not None:
            self.note(f"saved {path}")
        elif text := result.markdown or result.text:
            self.print(_line(text), sys.stdout)

    def fail(self, error: CodeError) -> None:
        """Print the traceback, or the message of `sys.exit`."""
        if error.name not in _EXITS:
            self.print(_line(error.traceback or f"{error.name}: {error.value}"), sys.stderr)
        elif _status(error.value) is None:
            self.print(_line(error.value), sys.stderr)


class JsonReport(RunReport):
    """Collects the run and prints one object at its end."""

    def __init__(self, images: ImageFiles, output: Output) -> None:
        super().__init__(images)
        self._output = output
        self._texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}
        self._results: list[dict[str, Any]] = []
        self._results_size = 0
        self._results_omitted = 0
        self._error: CodeError | None = None

    def print(self, text: str, stream: TextIO) -> None:
        """Keep a piece of output, up to a limit."""
        name = "stdout" if stream is sys.stdout else "stderr"
        room = MAX_COLLECTED_CHARACTERS - self._sizes[name]
        if room > 0:
            self._texts[name].append(text[:room])
        self._sizes[name] += len(text)

    def show(self, result: CodeResult) -> None:
        """Save an image; keep the other formats."""
        path = self._images.save(result)
        fields = _formats(result)
        if path is not None:
            for name in ("png", "jpeg", "svg"):
                fields.pop(name, None)
            fields["file"] = str(path)
        size = len(msgspec.json.encode(fields))
        if self._results_size + size > MAX_COLLECTED_CHARACTERS:
            self._results_omitted += 1
            return
        self._results_size += size
        self._results.append(fields)

    def fail(self, error: CodeError) -> None:
        """Keep the exception."""
        self._error = error

    def finish(self, sandbox_id: str) -> None:
        """Print the object."""
        found: dict[str, Any] = {
            "sandboxID": sandbox_id,
            "exitCode": self.exit_code,
            **{name: "".join(parts) for name, parts in self._texts.items()},
            "results": self._results,
            "error": None if self._error is None else _error_fields(self._error),
        }
        for name, size in self._sizes.items():
            if size > MAX_COLLECTED_CHARACTERS:
                found[f"{name}Omitted"] = size - MAX_COLLECTED_CHARACTERS
        if self._results_omitted:
            found["resultsOmitted"] = self._results_omitted
        self._output.data(found)


def exit_code_of(error: CodeError) -> int:
    """Return the exit code of code that ended by an exception or with an exit status."""
    if error.name not in _EXITS:
        return 1
    status = _status(error.value)
    return 1 if status is None else status & 0xFF


def _status(value: str) -> int | None:
    """Return the status that `sys.exit` got; None if it got a message."""
    if value in ("", "None"):
        return 0
    return int(value) if _NUMBER.fullmatch(value) else None


def _formats(result: CodeResult) -> dict[str, Any]:
    """Return the formats that a result has."""
    found: dict[str, Any] = {}
    for name in result.__struct_fields__:
        value = getattr(result, name)
        if isinstance(value, msgspec.Raw):
            text = bytes(value).decode(errors="replace")
            value = None if text in ("", "null") else msgspec.Raw(text.encode())
        if value is not None:
            found[name] = value
    return found


def _error_fields(error: CodeError) -> dict[str, str]:
    return {"name": error.name, "value": error.value, "traceback": error.traceback}


def _line(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"
