"""A Dockerfile is built by the calls that an SDK makes, stage by stage."""

import io
import tarfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paddock.cli.template.api import BuildApi, BuildId
from paddock.cli.template.build import BuildFailedError, BuildOptions, TemplateBuilder
from paddock.cli.template.context import BuildContext
from paddock.cli.template.copies import SentStep
from paddock.cli.template.dockerfile.model import DockerfileError
from paddock.cli.template.dockerfile.stages import find_target, parse
from paddock.cli.template.dockerfile.translate import translate
from paddock.cli.template.log_lines import Heading, Line
from paddock.cli.template.log_lines import parse as parse_line
from paddock.cli.template.progress import QuietProgress
from paddock.kit.errors import InvalidError, UnavailableError

MULTI_STAGE = """
FROM golang:1 AS unused
RUN exit 1
FROM node:22 AS build
COPY app.js .
RUN npm run build
FROM build AS tested
RUN npm test
FROM nginx:1
COPY --from=build /dist /usr/share/nginx/html
COPY --from=tested /report /report
COPY --from=busybox:1 /bin/busybox /bin/
"""


class MemoryApi(BuildApi):
    """Builds that end at once: the API without a server."""

    def __init__(
        self, reason: dict[str, Any] | None = None, *, interruption: BaseException | None = None
    ) -> None:
        self.registered: dict[str, tuple[str, ...]] = {}
        self.started: dict[str, dict[str, Any]] = {}
        self.stored: set[str] = set()
        self._reason = reason
        self._interruption = interruption

    def register(self, name: str, tags: Sequence[str], resources: Any) -> BuildId:
        build = BuildId(name, str(uuid.uuid4()), (f"team/{name}",))
        self.registered[build.build] = tuple(tags)
        return build

    def upload(self, build: BuildId, step: SentStep, *, force: bool = False) -> str:
        if step.archive is None:
            return ""
        self.stored.add(step.archive.digest())
        return step.archive.digest()

    def start(self, build: BuildId, body: Any) -> None:
        self.started[build.build] = body

    def status(self, template: str, build: str, offset: int = 0) -> dict[str, Any]:
        if self._interruption is not None:
            raise self._interruption
        if offset == 0:
            return {"status": "building", "logEntries": [{"message": "line", "level": "info"}]}
        if self._reason is not None:
            return {"status": "error", "logEntries": [], "reason": self._reason}
        return {"status": "ready", "logEntries": []}


class Files:
    """Files of stages: every path holds one file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.fetched: list[tuple[str, str]] = []

    def fetch(self, template: str, source: str) -> Path:
        self.fetched.append((template, source))
        path = self._directory / f"{len(self.fetched)}.tar"
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo(source.lstrip("/"))
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
        return path


class Case:
    """A builder with what it calls."""

    def __init__(self, directory: Path, api: MemoryApi | None = None) -> None:
        self.api = api or MemoryApi()
        self.files = Files(directory)
        self.canceled: list[str] = []
        self._directory = directory
        (directory / "app.js").write_text("1")

    def build(self, text: str, **options: Any) -> BuildId:
        wanted = BuildOptions(name="web", **options)
        dockerfile = parse(text, wanted.arguments)
        target = translate(dockerfile, find_target(dockerfile, None), wanted.arguments)
        builder = TemplateBuilder(
            self.api,
            self.files,
            QuietProgress(),
            cancel=lambda item: self.canceled.append(item.build),
            sleep=lambda _: None,
        )
        return builder.build(dockerfile, target, BuildContext(self._directory), wanted)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_single_stage_is_one_build(case: Case) -> None:
    built = case.build(
        "FROM node:22\nCOPY app.js .\nCMD node app.js",
        tags=("v1",),
        ready_command="curl localhost",
    )
    assert case.api.registered == {built.build: ("v1",)}
    body = case.api.started[built.build]
    assert (body["fromImage"], body["force"]) == ("node:22", False)
    assert (body["startCmd"], body["readyCmd"]) == ("node app.js", "curl localhost")
    (copy,) = [step for step in body["steps"] if step["type"] == "COPY"]
    assert copy["args"] == ["app.js", "./", "", ""]
    assert {copy["filesHash"]} == case.api.stored


def test_a_start_command_of_the_caller_replaces_that_of_the_dockerfile(case: Case) -> None:
    built = case.build("FROM a\nCMD serve", start_command="")
    assert "startCmd" not in case.api.started[built.build]
    built = case.build("FROM a\nCMD serve", start_command="other")
    assert case.api.started[built.build]["startCmd"] == "other"


def test_stages_that_files_come_from_are_built_first_and_once(case: Case) -> None:
    built = case.build(MULTI_STAGE)
    tags = list(case.api.registered.values())
    assert tags[0] == ("stage.build",)
    assert tags[1] == ("stage.tested",)
    assert tags[2][0].startswith("image.")
    assert tags[3] == ()
    assert list(case.api.registered)[3] == built.build
    images = [body["fromImage"] for body in case.api.started.values()]
    assert images == ["node:22", "node:22", "busybox:1", "nginx:1"]
    builds = list(case.api.registered)
    assert case.files.fetched == [
        (f"web:{builds[0]}", "/dist"),
        (f"web:{builds[1]}", "/report"),
        (f"web:{builds[2]}", "/bin/busybox"),
    ]


def test_nothing_is_taken_from_the_cache_on_request(case: Case) -> None:
    case.build(MULTI_STAGE, no_cache=True)
    assert all(body["force"] for body in case.api.started.values())


def test_a_failed_step_names_its_line(tmp_path: Path) -> None:
    case = Case(tmp_path, MemoryApi({"message": "exit status 7", "step": "3"}))
    with pytest.raises(DockerfileError) as caught:
        case.build("FROM a\n\nRUN exit 7")
    assert caught.value.message == "line 3: RUN: exit status 7"


def test_a_failed_base_names_its_phase(tmp_path: Path) -> None:
    case = Case(tmp_path, MemoryApi({"message": "image 'a' not found", "step": "base"}))
    with pytest.raises(BuildFailedError, match=r"failed \(base\): image 'a' not found"):
        case.build("FROM a")


@pytest.mark.parametrize("failing", ["upload", "start"])
def test_a_build_that_cannot_be_started_is_canceled(
    case: Case, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise InvalidError("refused")

    monkeypatch.setattr(case.api, failing, refuse)
    with pytest.raises(InvalidError, match="refused"):
        case.build("FROM a\nCOPY app.js .")
    assert case.canceled == list(case.api.registered)


def test_a_started_build_goes_on_where_its_log_is_not_reached(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise UnavailableError("connection lost")

    monkeypatch.setattr(case.api, "status", lost)
    with pytest.raises(UnavailableError):
        case.build("FROM a\nRUN true")
    assert case.canceled == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(143)], ids=type)
def test_an_interrupt_cancels_the_build(tmp_path: Path, interruption: BaseException) -> None:
    case = Case(tmp_path, MemoryApi(interruption=interruption))
    with pytest.raises(type(interruption)):
        case.build("FROM a\nRUN sleep 100")
    assert case.canceled == list(case.api.registered)


def test_an_interrupt_before_the_start_cancels_the_build(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(QuietProgress, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.build("FROM a")
    assert case.canceled == list(case.api.registered)


@pytest.mark.parametrize(
    ("message", "meaning"),
    [
        ("[builder 2/5] RUN make [0a1b2c3d]", Heading("2/5", "RUN make", is_cached=False)),
        ("CACHED [builder 1/2] ENV A b [0a1b2c3d]", Heading("1/2", "ENV A b", is_cached=True)),
        ("[base] FROM debian [0a1b2c3d]", Heading("base", "FROM debian", is_cached=False)),
        ("[builder 2/5] [stdout]: hello", Line("hello", is_output=True)),
        ("[start] [stderr]: oh", Line("oh", is_output=True)),
        ("Template is ready", Line("Template is ready", is_output=False)),
    ],
)
def test_lines_of_the_log_are_understood(message: str, meaning: Heading | Line) -> None:
    assert parse_line(message) == meaning
