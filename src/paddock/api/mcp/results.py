"""What tools return: structured results, and the text and images that models read."""

from mcp_types import CallToolResult, ContentBlock, ImageContent, TextContent
from pydantic import BaseModel, Field

from paddock.client.model import CodeOutcome, FilePart, KnownSandbox
from paddock.client.output import OutputTail, end_of
from paddock.run_code.events import CodeResult

MAX_IMAGES = 4
MAX_IMAGE_BYTES = 4 << 20
"""Of one image, in base64: models refuse larger ones."""
_IMAGE_HEADS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


class SandboxShown(BaseModel):
    """A sandbox in a list."""

    sandbox_id: str
    template: str
    state: str = Field(description="running or paused")
    started_at: str
    ends_at: str
    metadata: dict[str, str]


class SandboxList(BaseModel):
    """Sandboxes, oldest first."""

    sandboxes: list[SandboxShown]


class CreatedSandbox(BaseModel):
    """A new sandbox."""

    sandbox_id: str
    template: str
    is_default: bool = Field(description="Whether calls without sandbox_id use it")


class ChangedSandbox(BaseModel):
    """A sandbox, and what it does now."""

    sandbox_id: str
    state: str


class ForkedSandboxes(BaseModel):
    """Clones of a sandbox."""

    sandbox_ids: list[str]
    problem: str = Field(default="", description="Why the others could not be created")


class CreatedSnapshot(BaseModel):
    """A snapshot: create_sandbox accepts its id as template."""

    snapshot_id: str
    names: list[str]


class CommandDone(BaseModel):
    """The end of a command."""

    sandbox_id: str
    exit_code: int | None = Field(description="null if it was stopped")
    stdout: str
    stderr: str
    stopped: str = Field(default="", description="Why it was stopped before its end")


class CodeDone(BaseModel):
    """The end of a run of code."""

    sandbox_id: str
    stdout: str
    stderr: str
    results: list[str] = Field(description="The text of each result")
    error: str = Field(default="", description="The exception with its traceback")
    stopped: str = Field(default="", description="Why it was interrupted before its end")


class FileRead(BaseModel):
    """A part of a file."""

    sandbox_id: str
    path: str
    size: int = Field(description="Size of the whole file in bytes")
    offset: int
    bytes_read: int
    encoding: str = Field(description="utf-8, base64, or image (see the content)")
    content: str


class FileWritten(BaseModel):
    """A file that was written."""

    sandbox_id: str
    path: str
    size: int


class EntryShown(BaseModel):
    """An entry of a directory."""

    path: str
    kind: str
    size: int


class FileList(BaseModel):
    """The entries of a directory."""

    sandbox_id: str
    entries: list[EntryShown]
    omitted: int = Field(default=0, description="Further entries that are left out")


class PortUrl(BaseModel):
    """The URL of a port of a sandbox."""

    sandbox_id: str
    url: str
    headers: dict[str, str] = Field(description="Headers that requests need")


def shown(known: KnownSandbox) -> SandboxShown:
    """Return a sandbox of a list."""
    return SandboxShown(
        sandbox_id=known.sandbox_id,
        template=known.template,
        state=known.state,
        started_at=known.started_at.isoformat(),
        ends_at=known.ends_at.isoformat(),
        metadata=dict(known.metadata),
    )


def command_result(done: CommandDone) -> CallToolResult:
    """Return the end of a command as text and as a structure."""
    parts = [done.stdout, f"stderr:\n{done.stderr}" if done.stderr else "", done.stopped]
    if done.exit_code:
        parts.append(f"exit code {done.exit_code}")
    text = "\n".join(part.rstrip("\n") for part in parts if part) or "(no output)"
    return _result(done, [TextContent(type="text", text=text)])


def code_result(
    sandbox_id: str, outcome: CodeOutcome, out: OutputTail, err: OutputTail, stopped: str
) -> CallToolResult:
    """Return the end of a run of code: text, and its images."""
    fault = outcome.fault
    texts = [_text(value) for value in outcome.values]
    done = CodeDone(
        sandbox_id=sandbox_id,
        stdout=out.text,
        stderr=err.text,
        results=texts,
        error=end_of(fault.traceback or f"{fault.name}: {fault.value}") if fault else "",
        stopped=stopped,
    )
    images, skipped = _images(outcome.values)
    skipped += outcome.left_out
    note = f"[{skipped} results are left out: too large, or too many]" if skipped else ""
    stderr = f"stderr:\n{done.stderr}" if done.stderr else ""
    parts = [done.stdout, stderr, *texts, done.error, done.stopped, note]
    text = "\n".join(part.rstrip("\n") for part in parts if part) or "(no output)"
    return _result(done, [TextContent(type="text", text=text), *images])


def file_result(read: FileRead, part: FilePart) -> CallToolResult:
    """Return a part of a file; a whole PNG or JPEG file as an image."""
    if read.encoding == "image":
        image = ImageContent(
            type="image", data=read.content, mime_type=image_type(part.data) or "image/png"
        )
        return _result(read.model_copy(update={"content": ""}), [image])
    end = read.offset + read.bytes_read
    note = f"\n[bytes {read.offset} to {end} of {read.size}]" if end < read.size else ""
    return _result(read, [TextContent(type="text", text=read.content + note)])


def image_type(data: bytes) -> str | None:
    """Return the MIME type of a PNG or JPEG image, or None."""
    return next((kind for head, kind in _IMAGE_HEADS.items() if data.startswith(head)), None)


def _result(structured: BaseModel, content: list[ContentBlock]) -> CallToolResult:
    return CallToolResult(content=content, structured_content=structured.model_dump(mode="json"))


def _text(value: CodeResult) -> str:
    """Return the text of a result; the names of its formats if it has none."""
    text = value.text or value.markdown or value.html or value.latex or value.svg
    if text:
        return end_of(text)
    return "(image)" if value.image() else "(no text)"


def _images(values: list[CodeResult]) -> tuple[list[ContentBlock], int]:
    """Return the images of results, and the number of those that are left out."""
    found = [image for value in values if (image := value.image()) is not None]
    kept = [image for image in found if len(image.base64) <= MAX_IMAGE_BYTES][:MAX_IMAGES]
    content: list[ContentBlock] = [
        ImageContent(type="image", data="".join(image.base64.split()), mime_type=image.mime)
        for image in kept
    ]
    return content, len(found) - len(kept)
