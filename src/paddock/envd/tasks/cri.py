"""Container mode: each task is a container in the executor's own pod, created through a CRI socket.

Speaks `runtime.v1` to containerd or another CRI runtime. The runtime's StopContainer sends TERM,
waits for the grace period and sends KILL. Each container has its own process namespace, so that
all of its processes end with it. Containers are labelled with the task's name, by which a later
executor finds them. Output is copied by `cri_logs.py`. Needs the extra `cri` (grpcio).
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import grpc  # pyright: ignore[reportMissingTypeStubs]
import msgspec
from msgspec import Struct

from paddock.envd.tasks.cri_logs import ContainerLog
from paddock.envd.tasks.cri_wire import (
    CriError,
    decode,
    encode,
    get_int,
    get_message,
    get_messages,
    get_text,
    map_entries,
)
from paddock.envd.tasks.model import TaskRecord
from paddock.envd.tasks.task_launcher import ExecutorError, TaskLaunchError
from paddock.wire.protobuf import Message

log = logging.getLogger(__name__)

LABEL_TASK = "paddock.dev/task"
LABEL_ATTEMPT = "paddock.dev/attempt"
POD_UID = "io.kubernetes.pod.uid"
POLL_SECONDS = 0.5
DRAIN_SECONDS = 0.25
CALL_SECONDS = 30.0
PULL_SECONDS = 600.0
LOST_CODE = 137
"""The exit code of a container that was removed by another client: the real one is lost."""
_EXITED = 2
_OWN_PID_NAMESPACE: Mapping[int, Any] = {2: {3: {2: 1}}}
"""Its own process namespace: when the first process ends, the kernel kills the others."""
_rpc = cast("Any", grpc)


class _Linux(Struct, frozen=True):
    cgroup_parent: str = ""


class _SandboxConfig(Struct, frozen=True):
    linux: _Linux = _Linux()


class _SandboxInfo(Struct, frozen=True):
    """The verbose information of containerd about a pod, which CRI does not define."""

    config: _SandboxConfig = _SandboxConfig()


class CriClient:
    """A connection to a CRI socket."""

    def __init__(self, socket_path: str) -> None:
        self._channel = _rpc.aio.insecure_channel(f"unix://{socket_path}")
        self._path = socket_path

    async def call(
        self, method: str, fields: Mapping[int, Any], *, seconds: float = CALL_SECONDS
    ) -> Message:
        """Call a method of the runtime service, or of the image service if its name has `Image`."""
        service = "ImageService" if "Image" in method else "RuntimeService"
        unary = self._channel.unary_unary(
            f"/runtime.v1.{service}/{method}",
            request_serializer=encode,
            response_deserializer=None,
        )
        try:
            response = await unary(fields, timeout=seconds)
        except _rpc.aio.AioRpcError as error:
            is_gone = error.code() is _rpc.StatusCode.NOT_FOUND
            message = f"{method}: {error.details()} ({error.code().name})"
            raise CriError(message, is_gone=is_gone) from error
        return decode(response)

    async def close(self) -> None:
        await self._channel.close()


class RunningContainer:
    """A task's container."""

    def __init__(
        self, client: CriClient, container_id: str, grace: float, log: ContainerLog
    ) -> None:
        self._client = client
        self._id = container_id
        self._grace = grace
        self._log = log
        self._stopping: set[asyncio.Task[None]] = set()
        self._cause = ""
        self._problem = ""
        """The last error of the runtime; each is logged once."""

    @property
    def cause(self) -> str:
        """Why the container was killed, as far as its runtime reports it."""
        return self._cause

    @property
    def handle(self) -> str:
        """The container's id."""
        return self._id

    async def wait(self) -> int:
        """Wait for the container to exit, remove it, and return its exit code."""
        while True:
            code = await self._exit_code()
            self._log.copy_new()
            if code is not None:
                await self._drain_log()
                return code
            await asyncio.sleep(POLL_SECONDS)

    async def _drain_log(self) -> None:
        """Copy until no output is left: runtimes write some after they report the exit."""
        has_copied = True
        while has_copied:
            await asyncio.sleep(DRAIN_SECONDS)
            has_copied = self._log.copy_new()

    async def _exit_code(self) -> int | None:
        try:
            response = await self._client.call("ContainerStatus", {1: self._id})
            status = get_message(response, 1)
            if get_int(status, 3) != _EXITED:
                self._problem = ""
                return None
            code = get_int(status, 7)
            if get_text(status, 10) == "OOMKilled":
                self._cause = "the container used up its memory"
            await self._client.call("RemoveContainer", {1: self._id})
        except CriError as error:
            if error.is_gone:
                return LOST_CODE
            # Containers survive a restart of the runtime, so the call is retried.
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning(
                    "container status not read",
                    extra={"container": self._id, "error": self._problem},
                )
            return None
        self._problem = ""
        return code

    async def signal(self, number: int) -> None:
        """Stop the container: TERM, then KILL after the grace period; SIGKILL has none."""
        grace = 0 if number == signal.SIGKILL else max(int(self._grace), 1)
        if number not in (signal.SIGTERM, signal.SIGKILL):
            return
        # The call returns when the container has ended; `wait` reports that.
        task = asyncio.get_running_loop().create_task(self._stop(grace), name=f"stop {self._id}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def wait_responsive(self) -> None:
        """Return at once: a pause of the pod pauses its executor too."""

    async def _stop(self, grace: int) -> None:
        try:
            await self._client.call(
                "StopContainer", {1: self._id, 2: grace}, seconds=grace + CALL_SECONDS
            )
        except CriError:
            # The container has ended meanwhile, or `wait` reports what happened to it.
            return


class ContainerLauncher:
    """Creates containers in one pod."""

    def __init__(self, client: CriClient, pod_uid: str, socket_path: str) -> None:
        self._client = client
        self._pod_uid = pod_uid
        self._socket_path = socket_path
        self._sandbox = ""
        self._sandbox_meta: Mapping[int, Any] = {}
        self._cgroup_parent = ""

    @classmethod
    def connect(cls, socket_path: str, pod_uid: str) -> "ContainerLauncher":
        """Return a launcher for a socket; `probe` checks that a runtime answers there."""
        return cls(CriClient(socket_path), pod_uid, socket_path)

    async def probe(self) -> None:
        """Find the runtime and the own pod, or raise `ExecutorError`."""
        try:
            await self._client.call("Version", {1: "v1"})
            response = await self._client.call("ListPodSandbox", {1: self._pod_filter()})
            found = [
                (get_text(item, 1), get_message(item, 2)) for item in get_messages(response, 1)
            ]
        except CriError as error:
            raise ExecutorError(f"no CRI runtime at {self._socket_path}: {error}") from error
        if len(found) != 1:
            raise ExecutorError(
                f"{len(found)} pods have the uid {self._pod_uid!r}: set POD_UID to this pod's "
                "(fieldRef metadata.uid)"
            )
        ((self._sandbox, metadata),) = found
        self._sandbox_meta = {number: values[-1] for number, values in metadata.items()}
        self._cgroup_parent = await self._read_cgroup_parent()

    async def _read_cgroup_parent(self) -> str:
        """Return the cgroup of the pod, whose limits apply to tasks too, or an empty string."""
        try:
            response = await self._client.call("PodSandboxStatus", {1: self._sandbox, 2: True})
            entries = {get_text(item, 1): get_text(item, 2) for item in get_messages(response, 2)}
            info = msgspec.json.decode(entries.get("info", "{}"), type=_SandboxInfo)
        except (CriError, msgspec.DecodeError):
            return ""
        return info.config.linux.cgroup_parent

    def _pod_filter(self) -> Mapping[int, Any]:
        # An earlier sandbox of the same pod may still be listed: only the ready one counts.
        ready: Mapping[int, Any] = {2: {}}
        return {**ready, 3: map_entries({POD_UID: self._pod_uid})} if self._pod_uid else ready

    async def launch(
        self, record: TaskRecord, argv: tuple[str, ...], log_path: str, *, is_hook: bool = False
    ) -> RunningContainer:
        """Pull the image, create the container, start it."""
        container = _container(record)
        image = {1: str(container["image"])}
        labels = {LABEL_TASK: record.name, LABEL_ATTEMPT: str(record.attempt)}
        if is_hook:
            labels = {f"{LABEL_TASK}-hook": record.name}
        log = ContainerLog(Path(log_path), _attempt(record, is_hook=is_hook))
        log.reset()
        config = {
            1: {1: f"{record.name}{'-hook' if is_hook else ''}", 2: record.attempt},
            2: image,
            3: list(argv) or list(container.get("command") or ()),
            4: [] if argv else list(container.get("args") or ()),
            5: container.get("workingDir") or "",
            6: [{1: item["name"], 2: item.get("value", "")} for item in _env(record, container)],
            9: map_entries(labels),
            11: log.source.name,
            15: _OWN_PID_NAMESPACE,
        }
        try:
            if not (await self._client.call("ImageStatus", {1: image})).get(1):
                await self._client.call("PullImage", {1: image}, seconds=PULL_SECONDS)
            sandbox_config = {
                1: self._sandbox_meta,
                3: str(log.source.parent),
                8: {1: self._cgroup_parent},
            }
            made = await self._client.call(
                "CreateContainer", {1: self._sandbox, 2: config, 3: sandbox_config}
            )
            container_id = get_text(made, 1)
            await self._start(container_id)
        except CriError as error:
            raise TaskLaunchError(f"cannot start a container: {error}") from error
        return RunningContainer(self._client, container_id, _grace(record), log)

    async def _start(self, container_id: str) -> None:
        try:
            await self._client.call("StartContainer", {1: container_id})
        except CriError:
            with contextlib.suppress(CriError):
                await self._client.call("RemoveContainer", {1: container_id})
            raise

    async def find(self, record: TaskRecord, log_path: str) -> RunningContainer | None:
        """Find the container that an earlier executor created."""
        wanted = {LABEL_TASK: record.name, LABEL_ATTEMPT: str(record.attempt)}
        try:
            response = await self._client.call("ListContainers", {1: {4: map_entries(wanted)}})
            ids = [get_text(item, 1) for item in get_messages(response, 1)]
        except CriError as error:
            raise TaskLaunchError(str(error)) from error
        if not ids:
            return None
        log = ContainerLog(Path(log_path), _attempt(record))
        return RunningContainer(self._client, ids[0], _grace(record), log)


def _attempt(record: TaskRecord, *, is_hook: bool = False) -> str:
    return f"hook-{record.attempt}" if is_hook else f"attempt-{record.attempt}"


def _grace(record: TaskRecord) -> float:
    return record.task.process.grace_seconds if record.task.process is not None else 10.0


def _container(record: TaskRecord) -> dict[str, Any]:
    template = record.task.pod_template_spec or {}
    spec = cast("dict[str, Any]", template.get("spec") or {})
    containers = cast("list[dict[str, Any]]", spec.get("containers") or [])
    if len(containers) != 1 or not containers[0].get("image"):
        raise TaskLaunchError(
            "podTemplateSpec.spec.containers must hold one container with an image"
        )
    return containers[0]


def _env(record: TaskRecord, container: dict[str, Any]) -> list[dict[str, str]]:
    own = cast("list[dict[str, str]]", container.get("env") or [])
    process = record.task.process
    more = [{"name": item.name, "value": item.value} for item in process.env] if process else []
    return [*own, *more]
