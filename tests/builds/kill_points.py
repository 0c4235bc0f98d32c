"""Moments of a template build at which its control plane kills itself, as by kill -9.

A moment is just before or after a write of the store, or after a line of the log of the build.
After a write means: it is durable, and nobody has learned of it.
"""

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from paddock.builds.logs import BuildLogs
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase
from paddock.resources.kinds.sandbox import Phase, Sandbox
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import (
    FINALIZER_BUILD,
    LABEL_BUILD,
    BuildPhase,
    TemplateBuild,
)
from paddock.store.embedded import EmbeddedStore

_VERBS = ("create", "update", "update_status", "delete")


class Write(Struct, frozen=True):
    """A write of the store."""

    verb: str
    matches: Callable[[Any], bool]
    """Gets the object as it is after the write."""
    before: bool = False


class Line(Struct, frozen=True):
    """A line of the log of a build that contains a text."""

    text: str


def _build_is(phase: BuildPhase) -> Callable[[Any], bool]:
    return lambda obj: isinstance(obj, TemplateBuild) and obj.status.phase is phase


def _sandbox_is(phase: Phase) -> Callable[[Any], bool]:
    return lambda obj: _is_sandbox(obj) and obj.status.phase is phase


def _is_sandbox(obj: Any) -> bool:
    return isinstance(obj, Sandbox) and LABEL_BUILD in obj.metadata.labels


def _is_layer(obj: Any, *, memory: bool | None = None) -> bool:
    if not isinstance(obj, Checkpoint) or LABEL_BUILD not in obj.metadata.labels:
        return False
    return memory is None or (len(obj.spec.persistent_contents) == 2) is memory


def _stored(*, memory: bool) -> Callable[[Any], bool]:
    return lambda obj: (
        _is_layer(obj, memory=memory) and obj.status.phase is CheckpointPhase.SUCCEEDED
    )


def _has_finalizer(obj: Any) -> bool:
    return isinstance(obj, TemplateBuild) and FINALIZER_BUILD in obj.metadata.finalizers


def _is_released(obj: Any) -> bool:
    return isinstance(obj, TemplateBuild) and obj.is_deleting and not obj.metadata.finalizers


def _is_result(obj: Any) -> bool:
    return isinstance(obj, SandboxTemplate) and bool(obj.spec.restore_from)


SUCCESS: dict[str, Write | Line] = {
    "finalizer": Write("update", _has_finalizer),
    "begin": Write("update_status", _build_is(BuildPhase.BUILDING), before=True),
    "begun": Write("update_status", _build_is(BuildPhase.BUILDING)),
    "base": Line("[base] FROM"),
    "sandbox created": Write("create", _is_sandbox),
    "sandbox running": Write("update_status", _sandbox_is(Phase.RUNNING)),
    "first step": Line("[stdout]: step 1"),
    "layer requested": Write("create", _is_layer),
    "layer stored": Write("update_status", _stored(memory=False), before=True),
    "layer recorded": Write("update_status", _stored(memory=False)),
    "second step": Line("[stdout]: step 2"),
    "start command": Line("Running start command"),
    "ready": Line("Template is ready"),
    "result requested": Write("create", lambda obj: _is_layer(obj, memory=True)),
    "result stored": Write("update_status", _stored(memory=True), before=True),
    "result recorded": Write("update_status", _stored(memory=True)),
    "template written": Write("update", _is_result),
    "template recorded": Write("update_status", _is_result),
    "build is ready": Write("update_status", _build_is(BuildPhase.READY), before=True),
    "build was ready": Write("update_status", _build_is(BuildPhase.READY)),
}
"""All steps of a build with two instructions and a start command, in their order."""

FAILURE: dict[str, Write | Line] = {
    "sandbox deleted": Write("delete", _is_sandbox),
    "reason logged": Line("failed to run command"),
    "build has failed": Write("update_status", _build_is(BuildPhase.FAILED), before=True),
    "build had failed": Write("update_status", _build_is(BuildPhase.FAILED)),
}
"""The steps of a build that fails."""

DELETION: dict[str, Write | Line] = {
    "finalizer goes": Write("update", _is_released, before=True),
    "finalizer went": Write("update", _is_released),
}
"""The steps of the deletion of a build."""

MOMENTS = SUCCESS | FAILURE | DELETION


def prelude(moment: str) -> str:
    """Return the program that makes a control plane kill itself at a moment."""
    root = Path(__file__).resolve().parents[2]
    return (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        f"from tests.builds.kill_points import install; install({moment!r})"
    )


def install(moment: str) -> None:
    """Kill this process at a moment."""
    point = MOMENTS[moment]
    if isinstance(point, Line):
        _watch_log(point)
        return
    for verb in _VERBS:
        if verb == point.verb:
            setattr(EmbeddedStore, verb, _killing(getattr(EmbeddedStore, verb), point))


def _watch_log(point: Line) -> None:
    append = BuildLogs.append

    def killing(self: BuildLogs, uid: str, message: str, **more: Any) -> None:
        append(self, uid, message, **more)
        if point.text in message:
            _kill()

    BuildLogs.append = killing


def _killing(real: Callable[..., Awaitable[Any]], point: Write) -> Callable[..., Awaitable[Any]]:
    async def call(self: EmbeddedStore, first: Any, *args: Any, **more: Any) -> Any:
        # A deletion names kind and key; others have the object.
        obj = await self.get(first, args[0]) if point.verb == "delete" else first
        if point.before and point.matches(obj):
            _kill()
        done = await real(self, first, *args, **more)
        if point.matches(obj):
            _kill()
        return done

    return call


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
