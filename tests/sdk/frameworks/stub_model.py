"""A model that answers with canned turns, served like OpenAI's API on loopback.

A turn calls a tool or says something. `{result}` in what it says stands for the last result of a
tool, so that the answer proves that the tool really ran.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Call:
    """The model calls a tool."""

    tool: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Say:
    """The model answers with a text."""

    text: str


class StubModel:
    """The turns of a model, and what it was sent."""

    def __init__(self, turns: Sequence[Call | Say]) -> None:
        self._turns = list(turns)
        self.url = ""
        self.requests: list[dict[str, Any]] = []

    @property
    def is_finished(self) -> bool:
        """Whether every turn was requested."""
        return not self._turns

    def _next(self, body: dict[str, Any], results: Sequence[str]) -> Call | Say:
        self.requests.append(body)
        if body.get("stream"):
            raise web.HTTPBadRequest(text="the stub does not stream")
        if not self._turns:
            raise web.HTTPBadRequest(text="the stub has no further turn")
        if isinstance(self._turns[0], Call) and not body.get("tools"):
            return Say("hello")  # a request that only finds out what the server can do
        turn = self._turns.pop(0)
        if isinstance(turn, Say) and results:
            return Say(turn.text.replace("{result}", results[-1].strip()))
        return turn

    async def completions(self, request: web.Request) -> web.Response:
        """Answer as `POST /chat/completions`."""
        body = await request.json()
        sent = body["messages"]
        turn = self._next(body, [_text(item["content"]) for item in sent if item["role"] == "tool"])
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if isinstance(turn, Say):
            message["content"] = turn.text
        else:
            function = {"name": turn.tool, "arguments": json.dumps(turn.arguments)}
            name = f"call_{len(self.requests)}"
            message["tool_calls"] = [{"id": name, "type": "function", "function": function}]
        reason = "stop" if isinstance(turn, Say) else "tool_calls"
        return web.json_response(
            {
                "id": f"chatcmpl-{len(self.requests)}",
                "object": "chat.completion",
                "created": 0,
                "model": "stub",
                "choices": [{"index": 0, "finish_reason": reason, "message": message}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )

    async def responses(self, request: web.Request) -> web.Response:
        """Answer as `POST /responses`."""
        body = await request.json()
        sent = body["input"] if isinstance(body["input"], list) else []
        results = [
            _text(item["output"]) for item in sent if item.get("type") == "function_call_output"
        ]
        turn = self._next(body, results)
        number = len(self.requests)
        if isinstance(turn, Say):
            content = [{"type": "output_text", "text": turn.text, "annotations": []}]
            item: dict[str, Any] = {"type": "message", "role": "assistant", "content": content}
        else:
            arguments = json.dumps(turn.arguments)
            item = {"type": "function_call", "name": turn.tool, "arguments": arguments}
            item["call_id"] = f"call_{number}"
        return web.json_response(
            {
                "id": f"resp_{number}",
                "object": "response",
                "created_at": 0,
                "model": "stub",
                "status": "completed",
                "output": [{"id": f"item_{number}", "status": "completed", **item}],
                "parallel_tool_calls": False,
                "tool_choice": "auto",
                "tools": [],
                "usage": {
                    "input_tokens": 1,
                    "input_tokens_details": {"cached_tokens": 0},
                    "output_tokens": 1,
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": 2,
                },
            }
        )


def _text(content: Any) -> str:
    """Return the text of a message, which may come in parts."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


@asynccontextmanager
async def stub_model(*turns: Call | Say) -> AsyncIterator[StubModel]:
    """Serve a model with these turns."""
    model = StubModel(turns)
    app = web.Application(client_max_size=16 << 20)
    app.router.add_post("/v1/chat/completions", model.completions)
    app.router.add_post("/v1/responses", model.responses)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    model.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    try:
        yield model
    finally:
        await runner.cleanup()
