"""The task executor's HTTP API: `/setTasks`, `/getTasks`, `/tasks`, `/tasks/{id}`, and logs.

`GET /tasks?watch=1` stays open and sends all tasks as a line of JSON at every change. envd serves
these routes behind the sandbox's token; `paddock task-executor` serves them too.
"""

import os
import stat
from http import HTTPStatus
from typing import BinaryIO, cast

import msgspec

from paddock.envd.http.request import BodyTooLargeError, HttpRequest
from paddock.envd.tasks.manager import TaskManager
from paddock.envd.tasks.model import Task, TaskError

MAX_BODY_BYTES = 4 << 20
_JSON = [("Content-Type", "application/json")]
_LINES = [("Content-Type", "application/x-ndjson"), ("Cache-Control", "no-store")]


def is_task_path(path: str) -> bool:
    """Whether a path belongs to this API."""
    return path in ("/setTasks", "/getTasks", "/tasks") or path.startswith("/tasks/")


class TaskRoutes:
    """Serves the task routes."""

    def __init__(self, tasks: TaskManager) -> None:
        self._tasks = tasks

    async def serve(self, request: HttpRequest) -> None:
        """Serve one authorized request."""
        try:
            await self._route(request)
        except TaskError as problem:
            respond_problem(request, problem.status, str(problem))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            respond_problem(request, 400, f"cannot read the task: {error}")
        except BodyTooLargeError as error:
            respond_problem(request, 413, str(error))

    async def _route(self, request: HttpRequest) -> None:
        method, path = request.method, request.path
        if path == "/setTasks" and method == "POST":
            body = await request.body.read(MAX_BODY_BYTES)
            wanted = msgspec.json.decode(body or b"[]", type=tuple[Task, ...])
            _respond(request, 200, self._tasks.set(wanted))
        elif path in ("/getTasks", "/tasks") and method == "GET":
            if path == "/tasks" and request.query.get("watch") in ("1", "true"):
                await self._watch(request)
            else:
                _respond(request, 200, self._tasks.all())
        elif path == "/tasks" and method == "POST":
            body = await request.body.read(MAX_BODY_BYTES)
            _respond(request, 201, self._tasks.add(msgspec.json.decode(body, type=Task)))
        elif path.startswith("/tasks/"):
            await self._one(request, method, path.removeprefix("/tasks/"))
        else:
            raise TaskError(f"{method} is not allowed here", 405)

    async def _one(self, request: HttpRequest, method: str, rest: str) -> None:
        name, _, part = rest.partition("/")
        if part in ("log", "logs") and method == "GET":
            await self._log(request, name)
        elif part:
            raise TaskError(f"there is no {request.path} here", 404)
        elif method == "GET":
            _respond(request, 200, self._tasks.show(name))
        elif method == "DELETE":
            self._tasks.remove(name)
            request.respond(204)
        else:
            raise TaskError(f"{method} is not allowed here", 405)

    async def _watch(self, request: HttpRequest) -> None:
        request.start(200, _LINES)
        async for tasks in self._tasks.watch():
            await request.write(msgspec.json.encode(tasks) + b"\n")

    async def _log(self, request: HttpRequest, name: str) -> None:
        path = self._tasks.log_path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            request.respond(200, b"", headers=[("Content-Type", "text/plain; charset=utf-8")])
            return
        with cast("BinaryIO", os.fdopen(fd, "rb")) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise TaskError("the log is not a regular file any more", 500)
            headers = [("Content-Type", "text/plain; charset=utf-8")]
            request.start(200, headers, length=info.st_size)
            await request.send_file(file, 0, info.st_size)


def _respond(request: HttpRequest, status: int, value: object) -> None:
    request.respond(status, msgspec.json.encode(value), headers=_JSON)


def respond_problem(request: HttpRequest, status: int, message: str) -> None:
    """Send an error in the format of task executors."""
    code = HTTPStatus(status).phrase
    _respond(request, status, {"code": code, "message": message})
