"""The part of E2B's API that builds templates, called as an SDK calls it."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

from paddock.cli.http import Endpoint
from paddock.cli.template.copies import SentStep

_UPLOAD_SECONDS = 3600.0
_ARCHIVE_TYPE = "application/octet-stream"


class BuildId(NamedTuple):
    """A registered build."""

    template: str
    build: str
    names: tuple[str, ...]
    """Names of the template, `team/name`."""

    @property
    def team(self) -> str:
        """The team that owns the template."""
        return self.names[0].partition("/")[0] if self.names else ""


class BuildApi:
    """Registers, starts and follows builds."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def register(self, name: str, tags: Sequence[str], resources: Mapping[str, int]) -> BuildId:
        """Register a build of a template; the template is created if it is missing."""
        body = {"name": name, **resources, **({"tags": list(tags)} if tags else {})}
        made = self._endpoint.call("POST", "/v3/templates", body)
        return BuildId(made["templateID"], made["buildID"], tuple(made.get("names") or ()))

    def upload(self, build: BuildId, step: SentStep, *, force: bool = False) -> str:
        """Upload the files of a step unless they are stored already; return their hash."""
        if step.archive is None:
            return ""
        digest = step.archive.digest()
        path = f"/templates/{quote(build.template, safe='')}/files/{digest}"
        answer = self._endpoint.call("GET", path)
        if answer["present"] and not force:
            return digest
        parts = urlsplit(str(answer["url"]))
        # The URL itself permits the upload. It may be on another host: no key is sent.
        server = Endpoint(urlunsplit((parts.scheme, parts.netloc, "", "", "")), {})
        target = urlunsplit(("", "", parts.path, parts.query, ""))
        with tempfile.TemporaryFile() as file:
            step.archive.write(file)
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            given: Mapping[str, str] = answer.get("headers") or {}
            headers = {"Content-Type": _ARCHIVE_TYPE, **given, "Content-Length": str(size)}
            with server.open(
                "PUT", target, file, headers=headers, timeout_seconds=_UPLOAD_SECONDS
            ) as response:
                response.read()
        return digest

    def start(self, build: BuildId, body: Mapping[str, Any]) -> None:
        """Submit the steps."""
        self._endpoint.call("POST", f"/v2{_path(build.template, build.build)}", body)

    def status(self, template: str, build: str, offset: int = 0) -> dict[str, Any]:
        """Return the status of a build, with the entries of its log from an offset."""
        path = f"{_path(template, build)}/status?logsOffset={offset}"
        return self._endpoint.call("GET", path)


def step_body(step: SentStep, digest: str) -> dict[str, Any]:
    """Return a step as the API takes it."""
    body: dict[str, Any] = {"type": step.type, "args": list(step.args), "force": False}
    return {**body, "filesHash": digest} if digest else body


def _path(template: str, build: str) -> str:
    return f"/templates/{quote(template, safe='')}/builds/{quote(build, safe='')}"
