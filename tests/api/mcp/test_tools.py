"""The tools as a client sees them, on sandboxes in memory."""

import base64
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import Client
from mcp_types import CallToolResult, ImageContent, ListToolsResult, TextContent

from paddock.api.mcp.call_slots import CallSlots
from paddock.api.mcp.server import build_server
from paddock.api.mcp.session import McpSession, SessionMemory
from paddock.client.output import LIMIT_BYTES
from paddock.run_code.events import CodeError, CodeResult
from tests.api.mcp.fakes import FakeSandboxes

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
READ_ONLY = {"read_file", "list_files", "get_url", "list_sandboxes"}
DESTRUCTIVE = {"run_code", "run_command", "write_file", "kill_sandbox"}
OTHERS = {"create_sandbox", "pause_sandbox", "resume_sandbox", "fork_sandbox", "snapshot_sandbox"}


@pytest.fixture
def boxes() -> FakeSandboxes:
    return FakeSandboxes()


class Tools:
    """Calls the tools of one session."""

    def __init__(self, boxes: FakeSandboxes) -> None:
        session = McpSession(boxes, "one", SessionMemory(), template="base", idle_seconds=60)
        self._server = build_server(lambda _: session)

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None) -> CallToolResult:
        async with Client(self._server) as client:
            return await client.call_tool(name, arguments)

    async def list_tools(self) -> ListToolsResult:
        async with Client(self._server) as client:
            return await client.list_tools()


@pytest.fixture
def client(boxes: FakeSandboxes) -> Tools:
    return Tools(boxes)


def text(result: CallToolResult) -> str:
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))


def images(result: CallToolResult) -> list[ImageContent]:
    return [part for part in result.content if isinstance(part, ImageContent)]


def structured(result: CallToolResult) -> dict[str, Any]:
    assert not result.is_error, text(result)
    assert result.structured_content is not None
    return result.structured_content


async def test_every_tool_has_annotations_descriptions_and_an_output_schema(
    client: Tools,
) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert tools.keys() == READ_ONLY | DESTRUCTIVE | OTHERS
    for name, tool in tools.items():
        assert tool.description
        assert tool.output_schema
        assert tool.annotations
        assert tool.annotations.read_only_hint is (name in READ_ONLY)
        assert tool.annotations.destructive_hint is (name in DESTRUCTIVE)
        for argument in tool.input_schema["properties"].values():
            assert argument.get("description") or argument["title"] == "Content", name


async def test_a_command_returns_its_output_and_exit_code(
    client: Tools, boxes: FakeSandboxes
) -> None:
    boxes.output, boxes.errors, boxes.exit_code = b"out\n", b"bad\n", 3
    result = await client.call_tool("run_command", {"command": "make", "env": {"A": "b"}})
    assert structured(result) == {
        "sandbox_id": "box1",
        "exit_code": 3,
        "stdout": "out\n",
        "stderr": "bad\n",
        "stopped": "",
    }
    assert text(result) == "out\nstderr:\nbad\nexit code 3"
    assert boxes.commands[0].env == {"A": "b"}


async def test_long_output_ends_with_its_tail_and_a_note(
    client: Tools, boxes: FakeSandboxes
) -> None:
    boxes.output = b"x" * 100_000 + b"the end"
    out = structured(await client.call_tool("run_command", {"command": "yes"}))["stdout"]
    omitted = 100_007 - LIMIT_BYTES
    assert out.startswith(f"[{omitted} bytes before this are left out]\n")
    assert out.endswith("the end")
    assert len(out) < LIMIT_BYTES + 100


async def test_a_stopped_command_has_no_exit_code_and_a_reason(
    client: Tools, boxes: FakeSandboxes
) -> None:
    boxes.output, boxes.interruption = b"so far", "killed after 5 s; raise timeout_seconds"
    result = await client.call_tool("run_command", {"command": "sleep 9", "timeout_seconds": 5})
    shown = structured(result)
    assert (shown["exit_code"], shown["stopped"]) == (None, boxes.interruption)
    assert text(result) == f"so far\n{boxes.interruption}"


async def test_code_returns_results_and_images(client: Tools, boxes: FakeSandboxes) -> None:
    png = base64.b64encode(PNG).decode()
    boxes.output = b"hello\n"
    boxes.values = [CodeResult(text="<Figure>", png=png), CodeResult(text="42")]
    result = await client.call_tool("run_code", {"code": "42"})
    assert structured(result)["results"] == ["<Figure>", "42"]
    assert text(result) == "hello\n<Figure>\n42"
    [image] = images(result)
    assert (image.mime_type, base64.b64decode(image.data)) == ("image/png", PNG)


async def test_an_exception_returns_its_traceback(client: Tools, boxes: FakeSandboxes) -> None:
    boxes.fault = CodeError("ValueError", "bad", "Traceback …\nValueError: bad")
    result = await client.call_tool("run_code", {"code": "fail()"})
    assert structured(result)["error"] == "Traceback …\nValueError: bad"
    assert text(result) == "Traceback …\nValueError: bad"


async def test_images_beyond_the_limit_are_left_out_with_a_note(
    client: Tools, boxes: FakeSandboxes
) -> None:
    large = "A" * (5 << 20)
    small = base64.b64encode(PNG).decode()
    boxes.values = [CodeResult(png=large), *(CodeResult(png=small) for _ in range(6))]
    result = await client.call_tool("run_code", {"code": "plot()"})
    assert len(images(result)) == 4
    assert "[3 results are left out" in text(result)


async def test_files_are_written_and_read(client: Tools, boxes: FakeSandboxes) -> None:
    await client.call_tool("write_file", {"path": "a.txt", "content": "[1, 2]"})
    assert boxes.files["a.txt"] == b"[1, 2]"
    result = await client.call_tool("read_file", {"path": "a.txt"})
    assert text(result) == "[1, 2]"
    assert structured(result)["encoding"] == "utf-8"


async def test_bytes_are_written_and_read_in_base64(client: Tools, boxes: FakeSandboxes) -> None:
    data = bytes(range(256))
    content = base64.b64encode(data).decode()
    await client.call_tool(
        "write_file", {"path": "a.bin", "content": content, "encoding": "base64"}
    )
    assert boxes.files["a.bin"] == data
    shown = structured(await client.call_tool("read_file", {"path": "a.bin"}))
    assert (shown["encoding"], shown["content"]) == ("base64", content)


async def test_malformed_base64_is_refused(client: Tools) -> None:
    wrong = {"path": "a", "content": "no base64!", "encoding": "base64"}
    result = await client.call_tool("write_file", wrong)
    assert result.is_error
    assert "content: is not base64" in text(result)


async def test_an_image_file_is_returned_as_an_image(client: Tools, boxes: FakeSandboxes) -> None:
    boxes.files["plot.png"] = PNG
    result = await client.call_tool("read_file", {"path": "plot.png"})
    assert base64.b64decode(images(result)[0].data) == PNG


async def test_a_long_file_is_read_in_parts_that_do_not_cut_characters(
    client: Tools, boxes: FakeSandboxes
) -> None:
    whole = "a" + "ä" * 200_000
    boxes.files["long"] = whole.encode()
    parts, offset = "", 0
    while offset < len(whole.encode()):
        result = await client.call_tool("read_file", {"path": "long", "offset": offset})
        shown = structured(result)
        assert shown["encoding"] == "utf-8"
        parts, offset = parts + shown["content"], offset + shown["bytes_read"]
    assert parts == whole
    assert "[bytes 0 to" in text(await client.call_tool("read_file", {"path": "long"}))


async def test_a_url_comes_with_the_header_that_it_needs(
    client: Tools, boxes: FakeSandboxes
) -> None:
    boxes.traffic_token = "secret"
    shown = structured(await client.call_tool("get_url", {"port": 8000}))
    assert shown["url"] == "http://8000-box1.localhost/"
    assert shown["headers"] == {"e2b-traffic-access-token": "secret"}


async def test_a_sandbox_is_paused_resumed_cloned_stored_and_killed(
    client: Tools, boxes: FakeSandboxes
) -> None:
    await client.call_tool("create_sandbox", {"template": "tools"})
    await client.call_tool("pause_sandbox")
    assert boxes.state["box1"] == "paused"
    await client.call_tool("resume_sandbox")
    assert boxes.state["box1"] == "running"
    clones = structured(await client.call_tool("fork_sandbox", {"count": 2}))
    assert clones["sandbox_ids"] == ["box2", "box3"]
    stored = structured(await client.call_tool("snapshot_sandbox", {"name": "mine"}))
    assert stored == {"snapshot_id": "snap1", "names": ["mine"]}
    listed = structured(await client.call_tool("list_sandboxes", {"state": "running"}))
    assert [item["sandbox_id"] for item in listed["sandboxes"]] == ["box1", "box2", "box3"]
    await client.call_tool("kill_sandbox", {"sandbox_id": "box2"})
    assert set(boxes.boxes) == {"box1", "box3"}


async def test_errors_reach_the_model_with_their_next_step(
    client: Tools, boxes: FakeSandboxes
) -> None:
    boxes.may_create = False
    result = await client.call_tool("run_command", {"command": "true"})
    assert result.is_error
    assert "the key may not create sandboxes; use another key" in text(result)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run_command", {"command": "true", "timeout_seconds": 0}),
        ("run_command", {"command": "true", "timeout_seconds": 99999}),
        ("get_url", {"port": 70000}),
        ("fork_sandbox", {"count": 1000}),
    ],
)
async def test_arguments_out_of_bounds_are_refused(
    client: Tools, boxes: FakeSandboxes, tool: str, arguments: dict[str, Any]
) -> None:
    assert (await client.call_tool(tool, arguments)).is_error
    assert not boxes.boxes


async def test_a_long_error_is_cut(client: Tools, boxes: FakeSandboxes) -> None:
    boxes.fault = CodeError("ValueError", "x", "line\n" * 100_000)
    done = structured(await client.call_tool("run_code", {"code": "x"}))
    assert len(done["error"]) < LIMIT_BYTES + 100


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run_code", {"code": "1"}),
        ("run_command", {"command": "true"}),
        ("read_file", {"path": "/a"}),
        ("list_files", {}),
    ],
)
async def test_a_key_with_too_many_calls_has_to_wait(
    boxes: FakeSandboxes, tool: str, arguments: dict[str, Any]
) -> None:
    slots = CallSlots(limit=1)
    session = McpSession(boxes, "one", SessionMemory(), slot=lambda: slots.taken("key"))
    boxes.files["/a"] = b"a"
    async with Client(build_server(lambda _: session)) as client:
        with slots.taken("key"):
            refused = await client.call_tool(tool, arguments)
        assert "try again in 1 s" in text(refused)
        assert not (await client.call_tool(tool, arguments)).is_error
