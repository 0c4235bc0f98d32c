"""Template builds in a real installation, through the declarative API."""

import asyncio
import gzip
import io
import tarfile
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from paddock.builds.log_files import MAX_BYTES, MAX_LINES, BuildLogEntry, LogFiles
from tests.installation import Installation

API = "/apis/paddock.dev/v1alpha1/namespaces/default"
DIGEST = "ab" * 32
SECONDS = 90


def run(command: str, user: str = "") -> dict[str, Any]:
    """A step RUN."""
    return {"type": "RUN", "args": [command, user] if user else [command]}


class Builder:
    """Builds templates and waits for the end."""

    def __init__(self, paddock: Installation) -> None:
        self.paddock = paddock

    async def start(
        self, template: str, *steps: Mapping[str, Any], name: str = "", **spec: Any
    ) -> dict[str, Any]:
        """Write the objects of a build that is to begin at once."""
        await self.ensure_template(template)
        if "fromTemplate" not in spec:
            spec = {"fromImage": "base", **spec}
        body = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "TemplateBuild",
            "metadata": {"name": name or str(uuid.uuid4())},
            "spec": {
                "templateName": template,
                "started": True,
                "owner": "default",
                "steps": steps,
                "resources": {"cpu": "1", "memory": "512Mi"},
                **spec,
            },
        }
        return await self.paddock.kube("POST", f"{API}/templatebuilds", body)

    async def ensure_template(self, name: str) -> None:
        """Create a template without a build, unless it exists."""
        known = await self.paddock.kube("GET", f"{API}/sandboxtemplates")
        if any(item["metadata"]["name"] == name for item in known["items"]):
            return
        body = {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": "SandboxTemplate",
            "metadata": {"name": name},
            "spec": {"image": "base"},
        }
        await self.paddock.kube("POST", f"{API}/sandboxtemplates", body)

    async def get(self, build: Mapping[str, Any]) -> dict[str, Any]:
        """Read a build."""
        name = build["metadata"]["name"]
        return await self.paddock.kube("GET", f"{API}/templatebuilds/{name}")

    async def until(
        self, build: Mapping[str, Any], holds: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """Wait until the status of a build is as wanted."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = await self.get(build)
            if holds(found.get("status", {})):
                return found
            assert time.monotonic() < deadline, (found, self.paddock.log("control")[-4000:])
            await asyncio.sleep(0.02)

    async def end(self, build: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until a build has ended, and return its status."""
        ended = await self.until(build, lambda status: status.get("phase") in ("Ready", "Failed"))
        # The last lines of the log are written after the status, unless a client reads them.
        template, name = ended["spec"]["templateName"], ended["metadata"]["name"]
        await self.paddock.api("GET", f"/templates/{template}/builds/{name}/status")
        return ended["status"]

    async def build(self, template: str, *steps: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
        """Build a template; it must succeed. Return the status of the build."""
        build = await self.start(template, *steps, **spec)
        status = await self.end(build)
        assert status["phase"] == "Ready", (status, self.messages(build))
        return status | {"uid": build["metadata"]["uid"]}

    async def fail(self, template: str, *steps: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
        """Build a template; it must fail. Return the status of the build."""
        status = await self.end(await self.start(template, *steps, **spec))
        assert status["phase"] == "Failed", status
        return status

    def logs(self, uid: str) -> tuple[BuildLogEntry, ...]:
        """Return the log of a build."""
        directory = self.paddock.directory / "state" / "builds" / "logs"
        files = LogFiles(directory, max_bytes=MAX_BYTES, max_lines=MAX_LINES)
        return files.read(uid, 0, 100_000, "debug")

    def messages(self, build: Mapping[str, Any] | str) -> list[str]:
        """Return the messages of the log of a build."""
        uid = build if isinstance(build, str) else build["metadata"]["uid"]
        return [entry.message for entry in self.logs(uid)]

    def upload(self, archive: bytes, digest: str = DIGEST) -> None:
        """Store an upload of the team."""
        directory = self.paddock.directory / "state" / "builds" / "uploads" / "default"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / digest).write_bytes(archive)

    async def out(self, template: str, command: str) -> str:
        """Run a command in a new sandbox of a template."""
        box = await self.paddock.create(templateID=template, timeout=60)
        try:
            return await self.paddock.run(box, command)
        finally:
            await self.paddock.api("DELETE", f"/sandboxes/{box.id}")

    async def layers(self) -> list[dict[str, Any]]:
        """Return the checkpoints of layers."""
        found = await self.paddock.kube("GET", f"{API}/checkpoints")
        label = "paddock.dev/template-layer"
        return [item for item in found["items"] if label in item["metadata"].get("labels", {})]

    async def no_sandboxes(self) -> None:
        """Wait until builds have no sandboxes."""
        deadline = time.monotonic() + SECONDS
        while found := await self.sandboxes():
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)

    async def sandboxes(self) -> list[dict[str, Any]]:
        """Return the sandboxes of builds."""
        found = await self.paddock.kube("GET", f"{API}/sandboxes")
        label = "paddock.dev/template-build"
        return [item for item in found["items"] if label in item["metadata"].get("labels", {})]


def archive(
    files: Mapping[str, bytes | str], *, zipped: bool = True, links: Mapping[str, str] | None = None
) -> bytes:
    """Return a tar of files, by name; a text is the content too."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            if name.endswith("/"):
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
                continue
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return gzip.compress(out.getvalue()) if zipped else out.getvalue()
