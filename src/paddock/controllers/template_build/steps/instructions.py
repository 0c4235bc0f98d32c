"""What each instruction does. An instruction returns the context that applies after it."""

import posixpath
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from msgspec import structs

from paddock.builds.uploads import Uploads
from paddock.controllers.template_build.keys import StepContext
from paddock.controllers.template_build.ports import CommandRefusedError, CopyFiles
from paddock.controllers.template_build.steps.runner import ROOT, StepFailedError, StepRunner
from paddock.resources.schema import formats

_USER = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\$?$")
_MAX_VALUE_BYTES = 128 << 10
_MAX_VARIABLES = 512
"""Variables of a template (`resources/schema/constraints.py`)."""
_MAX_CONTEXT_BYTES = 128 << 10
"""The context of a layer is an annotation of its checkpoint."""


class Instructions:
    """Performs steps by their type."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._by_type: Mapping[str, Callable[[StepRunner], Awaitable[StepContext]]] = {
            "RUN": _run,
            "COPY": self._copy,
            "ADD": self._copy,
            "ENV": _variables,
            "ARG": _variables,
            "WORKDIR": _workdir,
            "USER": _user,
        }

    async def perform(self, runner: StepRunner) -> StepContext:
        """Perform a step and return the context after it; `StepFailedError`."""
        perform = self._by_type.get(runner.step.type)
        if perform is None:
            raise StepFailedError(f"command type {runner.step.type} is not implemented")
        try:
            return await perform(runner)
        except CommandRefusedError as error:
            raise StepFailedError(f"{runner.step.type} failed: {error.message}") from error

    async def _copy(self, runner: StepRunner) -> StepContext:
        step, context = runner.step, runner.context
        source, destination, owner, mode = (*step.args, "", "", "", "")[:4]
        if not source or not destination:
            raise StepFailedError(f"{step.type} needs a source and a destination")
        archive = self._uploads.path(runner.build.metadata.namespace, step.files_hash or "-")
        if archive is None:
            raise StepFailedError(
                f"the files of {step.type} {source} (hash {step.files_hash}) were not uploaded"
            )
        files = CopyFiles(
            archive=archive,
            source=source,
            destination=destination,
            owner=owner,
            mode=mode,
            user=context.user,
            workdir=context.workdir,
        )
        await runner.shell.copy(await runner.sandbox(), files)
        return context


async def _run(runner: StepRunner) -> StepContext:
    if not runner.step.args:
        raise StepFailedError("RUN needs a command")
    command, user = (*runner.step.args, "")[:2]
    await runner.require(command, user=user or runner.context.user)
    return runner.context


async def _variables(runner: StepRunner) -> StepContext:
    args = runner.step.args
    if not args or len(args) % 2:
        raise StepFailedError(f"{runner.step.type} needs pairs of a name and a value")
    changes: dict[str, str] = {}
    for name, value in zip(args[::2], args[1::2], strict=True):
        if problem := formats.env_name(name):
            raise StepFailedError(f"{runner.step.type}: {problem}")
        if "\0" in value:
            raise StepFailedError(f"{runner.step.type}: the value of {name} has a NUL character")
        changes[name] = await _expanded(runner, name, value) if "$" in value else value
    if runner.step.type == "ARG":
        after = runner.context.with_arguments(changes)
    else:
        after = runner.context.with_env(changes)
    _check_size(runner.step.type, after)
    return after


def _check_size(step_type: str, context: StepContext) -> None:
    """Raise `StepFailedError` for more variables than a template and its layers can store."""
    if max(len(context.env), len(context.arguments)) > _MAX_VARIABLES:
        raise StepFailedError(f"{step_type}: more than {_MAX_VARIABLES} variables")
    if len(msgspec.json.encode(context)) > _MAX_CONTEXT_BYTES:
        raise StepFailedError(
            f"{step_type}: the variables have more than {_MAX_CONTEXT_BYTES >> 10} KiB in total"
        )


async def _expanded(runner: StepRunner, name: str, value: str) -> str:
    """Expand variables with a shell of the sandbox. Commands in the value stay as they are."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`")
    escaped = escaped.replace("$(", "\\$(")
    text = bytearray()

    def keep(stream: str, data: bytes) -> None:
        if stream == "stdout" and len(text) <= _MAX_VALUE_BYTES:
            text.extend(data)

    status = await runner.run_with(f'printf %s "{escaped}"', keep, user=ROOT)
    if status or len(text) > _MAX_VALUE_BYTES:
        raise StepFailedError(f"{runner.step.type}: cannot expand the value of {name}")
    return text.decode("utf-8", "replace")


async def _workdir(runner: StepRunner) -> StepContext:
    if len(runner.step.args) != 1 or not runner.step.args[0] or "\0" in runner.step.args[0]:
        raise StepFailedError("WORKDIR needs one path")
    path = posixpath.normpath(posixpath.join(runner.context.workdir or "/", runner.step.args[0]))
    path = "/" + path.lstrip("/")
    await runner.shell.make_directory(await runner.sandbox(), path, user=runner.context.user)
    return structs.replace(runner.context, workdir=path)


async def _user(runner: StepRunner) -> StepContext:
    name = runner.step.args[0].partition(":")[0] if runner.step.args else ""
    if not _USER.match(name):
        raise StepFailedError(f"USER: {name!r} is not the name of a user")
    if not name.isdigit():
        with_sudo = runner.step.args[1:2] == ("true",)
        await runner.require(create_user(name, with_sudo=with_sudo), user=ROOT)
    return structs.replace(runner.context, user=name)


def create_user(name: str, *, with_sudo: bool) -> str:
    """Return the command that creates a user unless there is one of this name."""
    user = shlex.quote(name)
    known = f"id -u {user} >/dev/null 2>&1"
    lines = [f"{known} || useradd --create-home {user} 2>/dev/null || adduser -D {user}"]
    if with_sudo:
        rule = shlex.quote(f"{name} ALL=(ALL) NOPASSWD: ALL")
        file = shlex.quote(f"/etc/sudoers.d/{name}")
        lines.append(f"mkdir -p /etc/sudoers.d && echo {rule} > {file} && chmod 0440 {file}")
    return "{ " + "; } && { ".join(lines) + "; }"
