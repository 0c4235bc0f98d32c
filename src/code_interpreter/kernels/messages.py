"""Translates messages of the Jupyter protocol into events."""

from collections.abc import Mapping
from typing import Any

from code_interpreter.kernels.events import Accepted, Event, Failure, Output, Result

ABORTED = Failure("ExecutionAborted", "the kernel discarded the code without running it")


def event_of(kind: str, content: Mapping[str, Any]) -> Event | None:
    """Return the event that a message of the iopub channel stands for."""
    match kind:
        case "execute_input":
            return Accepted(int(content.get("execution_count") or 0))
        case "stream":
            return Output(str(content.get("name", "stdout")), str(content.get("text", "")))
        case "execute_result":
            return Result(dict(content.get("data") or {}), is_main=True)
        case "display_data" | "update_display_data":
            return Result(dict(content.get("data") or {}), is_main=False)
        case "error":
            return failure_of(content)
        case _:
            return None


def failure_of(content: Mapping[str, Any]) -> Failure:
    """Return the failure in an `error` message or in a reply with status `error`."""
    lines: list[str] = [str(line) for line in content.get("traceback") or ()]
    return Failure(str(content.get("ename", "")), str(content.get("evalue", "")), "\n".join(lines))
