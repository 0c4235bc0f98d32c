"""Builds templates: from steps, or a Dockerfile, each of whose stages is a build of its own."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from paddock.cli.template.api import BuildApi, BuildId, step_body
from paddock.cli.template.context import BuildContext
from paddock.cli.template.copies import Fetch, SentStep, with_files
from paddock.cli.template.dockerfile.model import Copy, Dockerfile, DockerfileError, StageSteps
from paddock.cli.template.dockerfile.translate import translate
from paddock.cli.template.progress import PlainProgress
from paddock.kit.errors import PaddockError

_FIRST_POLL_SECONDS = 0.02
_POLL_SECONDS = 0.2
_POLL_GROWTH = 1.5


class BuildOptions(NamedTuple):
    """What the caller asks for."""

    name: str
    tags: tuple[str, ...] = ()
    arguments: Mapping[str, str] = {}
    no_cache: bool = False
    start_command: str | None = None
    """None means that of the Dockerfile."""
    ready_command: str | None = None
    resources: Mapping[str, int] = {}


class FileSource(Protocol):
    """Takes files out of a template."""

    def fetch(self, template: str, source: str) -> Any:
        """Return a tar of a path."""
        ...


class BuildFailedError(PaddockError):
    """A build ended with an error."""


class TemplateBuilder:
    """Runs builds, one after another."""

    def __init__(
        self,
        api: BuildApi,
        files: FileSource,
        progress: PlainProgress,
        *,
        cancel: Callable[[BuildId], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api = api
        self._files = files
        self._progress = progress
        self._cancel = cancel
        self._sleep = sleep
        self._built: dict[str, str] = {}
        """What COPY --from refers to, with the template that has it."""

    def build(
        self,
        dockerfile: Dockerfile,
        target: StageSteps,
        context: BuildContext,
        wanted: BuildOptions,
    ) -> BuildId:
        """Build a stage, after those that it copies files from; return its build."""
        fetch = self._fetch_for(dockerfile, context, wanted)
        steps = with_files(target.steps, context, fetch)
        start = target.start_command if wanted.start_command is None else wanted.start_command
        ready = target.ready_command if wanted.ready_command is None else wanted.ready_command
        body: dict[str, Any] = {"fromImage": target.image, "force": wanted.no_cache}
        if start:
            body["startCmd"] = start
        if ready:
            body["readyCmd"] = ready
        return self.run(steps, body, wanted, f"{wanted.name} from {target.image}")

    def _fetch_for(
        self, dockerfile: Dockerfile, context: BuildContext, wanted: BuildOptions
    ) -> Fetch:
        def fetch(copy: Copy, source: str) -> Any:
            """Return a tar of a source, after building what it lies in."""
            if copy.stage is None:
                template = self._image(copy.image, wanted)
            else:
                stage = translate(dockerfile, dockerfile.stages[copy.stage], wanted.arguments)
                template = self._stage(dockerfile, stage, context, wanted)
            return self._files.fetch(template, source)

        return fetch

    def _stage(
        self,
        dockerfile: Dockerfile,
        stage: StageSteps,
        context: BuildContext,
        wanted: BuildOptions,
    ) -> str:
        tag = f"stage.{stage.stage.label}"
        if tag not in self._built:
            options = wanted._replace(tags=(tag,), start_command="", ready_command="")
            self._built[tag] = _reference(self.build(dockerfile, stage, context, options))
        return self._built[tag]

    def _image(self, image: str, wanted: BuildOptions) -> str:
        tag = f"image.{hashlib.sha256(image.encode()).hexdigest()[:12]}"
        if tag not in self._built:
            options = wanted._replace(tags=(tag,))
            body = {"fromImage": image, "force": wanted.no_cache}
            self._built[tag] = _reference(self.run([], body, options, f"files of {image}"))
        return self._built[tag]

    def run(
        self,
        steps: Sequence[SentStep],
        body: Mapping[str, Any],
        wanted: BuildOptions,
        title: str,
    ) -> BuildId:
        """Register, upload, start and follow one build; return it once it is ready."""
        build = self._api.register(wanted.name, wanted.tags, wanted.resources)
        tags = f" ({', '.join(wanted.tags)})" if wanted.tags else ""
        is_started = False
        try:
            self._progress.begin(f"{title}{tags}, build {build.build}")
            sent = [step_body(step, self._api.upload(build, step)) for step in steps]
            self._api.start(build, {**body, "steps": sent})
            is_started = True
            status = self.follow(build)
        except BaseException as error:
            # A build that was started goes on where only its log was not reached.
            if not is_started or isinstance(error, (KeyboardInterrupt, SystemExit)):
                self._cancel(build)
                self._progress.note(f"canceled build {build.build}")
            raise
        self._progress.end(is_ready=status["status"] == "ready")
        if status["status"] != "ready":
            raise _failure(status, steps)
        return build

    def follow(self, build: BuildId) -> dict[str, Any]:
        """Show the log of a build until it ends; return its last status."""
        offset, pause = 0, _FIRST_POLL_SECONDS
        while True:
            status = self._api.status(build.template, build.build, offset)
            entries = status["logEntries"]
            offset += len(entries)
            for entry in entries:
                self._progress.entry(entry)
            if status["status"] in ("ready", "error") and not entries:
                return status
            if not entries:
                self._sleep(pause)
                pause = min(_POLL_SECONDS, pause * _POLL_GROWTH)


def _reference(build: BuildId) -> str:
    return f"{build.template}:{build.build}"


def _failure(status: Mapping[str, Any], steps: Sequence[SentStep]) -> PaddockError:
    reason: Mapping[str, Any] = status.get("reason") or {}
    message = str(reason.get("message") or "the build failed")
    number = str(reason.get("step") or "")
    if (
        number.isdecimal()
        and 0 < int(number) <= len(steps)
        and (step := steps[int(number) - 1]).line
    ):
        return DockerfileError(step.line, f"{step.type}: {message}")
    where = f" ({number})" if number else ""
    return BuildFailedError(f"the build failed{where}: {message}")
