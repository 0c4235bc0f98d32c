"""A fake kubelet: runs each Pod of a real API server as processes of this machine.

It implements what sandboxes need: it takes unscheduled pods, assigns each a loopback address, runs
the main container in its own root with the sidecar next to it, reports status to the API server,
and finishes deletions. Volume claims are directories that outlive pods. Images are not pulled:
`missing` fails, all others are the base image. A new image for a running pod replaces only its main
container; a resize is granted, or refused if the test says so (`resizes`). Both are reported to the
API server as by a real kubelet.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
)
from paddock.resources.kinds.pods import PodManifest
from paddock.runtime.kubernetes.freezer import CGROUPS, freeze
from paddock.store.kubernetes import KubernetesStore
from paddock.store.kubernetes.client import JSON, MERGE_PATCH
from paddock.store.port import Change
from tests.cluster.addresses import fresh_address
from tests.cluster.pod_runner import Plan
from tests.cluster.pod_status import RunningPod, main_of, size_of, waiting
from tests.leaks import note_group

log = logging.getLogger(__name__)

IMAGES = Path(os.environ.get("PADDOCK_CACHE_DIR", "/var/cache/paddock")) / "images"
ROOT = Path(__file__).parents[2]
NODE = "fake-node"
PATIENCE_SECONDS = 60.0
"""Timeout for killed processes to end on a busy machine."""


def base_rootfs() -> Path | None:
    """Return the root of the image `minimal`, or `None` if it is not built."""
    found = sorted(IMAGES.glob("minimal-*/rootfs"))
    return found[-1] if found else None


def build_hold(directory: Path) -> Path:
    """Compile the program that keeps main containers alive."""
    target = directory / "hold"
    source = ROOT / "deploy" / "image" / "hold.c"
    subprocess.run(["cc", "-static", "-Os", "-o", str(target), str(source)], check=True)
    return target


class Kubelet:
    """Runs pods; use as an async context manager."""

    def __init__(
        self, store: KubernetesStore, rootfs: Path, *, runs_processes: bool = True
    ) -> None:
        self._store = store
        self._rootfs = rootfs
        self._runs_processes = runs_processes
        self._directory = Path(tempfile.mkdtemp(prefix="paddock-kubelet."))
        self._hold = build_hold(self._directory) if runs_processes else None
        self._claims = self._directory / "claims"
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cgroups: dict[str, list[Path]] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        """Process 1 of each running pod, by pod name."""
        self.running_pods: dict[str, RunningPod] = {}
        """The state of each running pod, by pod uid."""
        self._can_resize = False
        self.resizes = ""
        """The outcome of resizes: empty for granted, else `Deferred` or `Infeasible`."""
        self.started: list[str] = []
        """Names of pods in the order of their start."""

    async def __aenter__(self) -> "Kubelet":
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        with contextlib.suppress(AlreadyExistsError):
            await self._request("POST", "/api/v1/nodes", node, "nodes")
        self._following = asyncio.create_task(self._follow(), name="kubelet")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._following.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(self._following, *self._tasks.values(), return_exceptions=True)
        for uid in self._cgroups:
            with contextlib.suppress(PaddockError):
                await freeze(uid, frozen=False)
        for process in list(self.processes.values()):
            await self._kill(process)
        for uid in list(self._cgroups):
            await self._remove_cgroup(uid)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._store.watch(PodManifest)) as events:
                    async for event in events:
                        if event.object is not None:
                            self._on_change(event.change, event.object)
            except PaddockError as error:
                log.warning("watch ended: %r", error)
                await asyncio.sleep(0.2)

    def _on_change(self, change: Change, pod: PodManifest) -> None:
        uid = pod.metadata.uid
        if pod.spec.get("nodeName", NODE) != NODE:
            return  # another node's
        if change is Change.DELETED:
            if (task := self._tasks.pop(uid, None)) is not None:
                task.cancel()
            self.running_pods.pop(uid, None)
            return
        if pod.metadata.deletion_timestamp is not None:
            self._spawn(uid + "/ending", self._end(pod))
        elif uid not in self._tasks:
            self._spawn(uid, self._run(pod))
        elif (running := self.running_pods.get(uid)) is not None:
            running.pod = pod
            if main_of(pod)["image"] != running.image:
                running.image = main_of(pod)["image"]
                self._spawn(f"{uid}/{running.image}", self._replace(running))
            if size_of(pod) != running.size:
                running.size = size_of(pod)
                self._spawn(f"{uid}/{pod.metadata.generation}", self._resize(running))

    def _spawn(self, key: str, work: Any) -> None:
        if key in self._tasks:
            work.close()
            return
        task = self._tasks[key] = asyncio.create_task(work, name=f"pod {key}")
        task.add_done_callback(_log_failure)

    # ---- one pod -------------------------------------------------------------------------

    async def _run(self, pod: PodManifest) -> None:
        images = [container["image"] for container in pod.spec["containers"]]
        if "nodeName" not in pod.spec:
            await self._bind(pod)
        if all(each["name"] != "envd" for each in pod.spec.get("initContainers", ())):
            return  # not a sandbox: its status is reported elsewhere
        if any("missing" in image for image in images):
            await self._report(pod, waiting("ImagePullBackOff", f"no such image: {images[0]}"))
            return
        address = fresh_address()
        running = RunningPod(pod, address)
        self.started.append(pod.metadata.name)
        if not self._runs_processes:
            self.running_pods[pod.metadata.uid] = running
            await self._show(running)
            return
        process = await self._start(pod, address)
        self.running_pods[pod.metadata.uid] = running
        try:
            await self._show(running)
            code = await process.wait()
        except asyncio.CancelledError:
            # Removed from the API server without a graceful deletion.
            await self._finish(pod.metadata.uid, process)
            raise
        self.processes.pop(pod.metadata.name, None)
        self.running_pods.pop(pod.metadata.uid, None)
        await self._report(pod, running.ended(code))

    async def _show(self, running: RunningPod) -> None:
        await self._report(running.pod, running.status(resizes=self._can_resize))

    async def _replace(self, running: RunningPod) -> None:
        """End the main container and restart it from another image, if that exists."""
        pod = running.pod
        if "missing" in running.image:
            # The restart policy is Never, so this is final.
            why = f'Failed to pull image "{running.image}": no such image'
            await self._complain(pod, why)
            await self._complain(pod, "Error: ErrImagePull")
            await self._replace_main(pod, "")
            return
        await self._replace_main(pod, running.image)
        running.replace_main()
        await self._show(running)

    async def _replace_main(self, pod: PodManifest, image: str) -> None:
        """Replace a pod's main container by one of this image; end the pod if it is empty."""
        if not self._runs_processes:
            return
        stdin = self.processes[pod.metadata.name].stdin
        assert stdin is not None
        stdin.write(f"{image}\n".encode())
        file = self._directory / pod.metadata.uid / "started"
        while image and not (file.exists() and file.read_text() == image):
            await asyncio.sleep(0.01)

    async def enable_resize(self) -> None:
        """Enable in-place resize, and report it."""
        self._can_resize = True
        room = {"cpu": "64", "memory": "256Gi", "pods": "1000"}
        status = {
            "declaredFeatures": ["InPlacePodLevelResourcesVerticalScaling"],
            "capacity": room,
            "allocatable": room,
        }
        await self._request("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status}, "nodes")
        for running in list(self.running_pods.values()):
            await self._show(running)

    async def _resize(self, running: RunningPod) -> None:
        running.resizing = []
        if self.resizes:
            running.resizing.append(
                {
                    "type": "PodResizePending",
                    "status": "True",
                    "reason": self.resizes,
                    "message": "Node didn't have enough resource: memory",
                    "observedGeneration": running.pod.metadata.generation,
                }
            )
        await self._show(running)

    async def _start(self, pod: PodManifest, address: str) -> asyncio.subprocess.Process:
        home = self._directory / pod.metadata.uid
        tools, state = home / "tools", home / "state"
        for each in (tools, state):
            each.mkdir(parents=True)
        assert self._hold is not None
        shutil.copy(self._hold, tools / "hold")
        main = pod.spec["containers"][0]
        envd = next(c for c in pod.spec["initContainers"] if c["name"] == "envd")
        config = json.loads(envd["env"][0]["value"]) | {"host": address}
        plan = Plan(
            uid=pod.metadata.uid,
            rootfs=str(self._rootfs),
            tools=str(tools),
            state=str(state),
            command=main["command"],
            env={item["name"]: item["value"] for item in main["env"]},
            sidecar=[sys.executable, "-m", "paddock.runtime.kubernetes.sidecar"],
            sidecar_env={
                "PADDOCK_SIDECAR": json.dumps(config),
                "PADDOCK_TOOLS_DIR": str(tools),
                "PADDOCK_STATE_DIR": str(state),
            },
            user_id=main["securityContext"]["runAsUser"],
            binds=self._volumes(pod, main),
            image=main["image"],
            started=str(home / "started"),
        )
        file = home / "plan.json"
        file.write_bytes(msgspec.json.encode(plan))
        with (home / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                # Join the cgroup first, so that all children are in it.
                *("sh", "-c", 'for d in $0; do echo $$ > $d/cgroup.procs; done; exec "$@"'),
                " ".join(map(str, self._cgroup(pod.metadata.uid))),
                *("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
                *(sys.executable, "-m", "tests.cluster.pod_runner", str(file)),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[pod.metadata.name] = process
        return process

    def _cgroup(self, pod_uid: str) -> list[Path]:
        """Create the cgroups of a pod, for node agents and accounting."""
        kinds = ["."] if (CGROUPS / "cgroup.controllers").exists() else ["freezer", "cpuacct"]
        ours = f"paddock-kubelet-{os.getpid()}"
        note_group(ours)
        places = [CGROUPS / kind / ours / f"pod{pod_uid}" for kind in kinds]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        self._cgroups[pod_uid] = places
        return places

    async def _remove_cgroup(self, pod_uid: str) -> None:
        # Forgotten at the end: whoever closes the node removes what a cancelled task has left.
        for place in self._cgroups.get(pod_uid, ()):
            # Process 1 has ended; the kernel kills all others, which takes a moment.
            async with asyncio.timeout(PATIENCE_SECONDS):
                while place.exists():
                    with contextlib.suppress(OSError):
                        place.rmdir()
                        break
                    await asyncio.sleep(0.01)
            with contextlib.suppress(OSError):
                place.parent.rmdir()
        self._cgroups.pop(pod_uid, None)

    def _volumes(self, pod: PodManifest, main: dict[str, Any]) -> dict[str, str]:
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod.spec.get("volumes", ())
            if "persistentVolumeClaim" in volume
        }
        binds: dict[str, str] = {}
        for mount in main.get("volumeMounts", ()):
            if (claim := claims.get(mount["name"])) is not None:
                place = self._claims / pod.metadata.namespace / claim
                place.mkdir(parents=True, exist_ok=True)
                os.chown(place, 1000, 1000)
                binds[str(place)] = mount["mountPath"]
        return binds

    async def _end(self, pod: PodManifest) -> None:
        process = self.processes.pop(pod.metadata.name, None)
        if process is not None:
            await self._finish(pod.metadata.uid, process)
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.metadata.uid}}
        with contextlib.suppress(NotFoundError, ConflictError):
            await self._request("DELETE", _path(pod), body)
        shutil.rmtree(self._directory / pod.metadata.uid, ignore_errors=True)

    async def _finish(self, uid: str, process: asyncio.subprocess.Process) -> None:
        # Frozen processes cannot be killed.
        with contextlib.suppress(PaddockError):
            await freeze(uid, frozen=False)
        await self._kill(process)
        await self._remove_cgroup(uid)

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def log(self, pod_uid: str) -> str:
        """Return the output of a pod."""
        return (self._directory / pod_uid / "log").read_text(errors="replace")

    async def lose(self, name: str) -> None:
        """Kill a pod's processes, as a crash would."""
        await self._kill(self.processes[name])

    # ---- reports to the API server -------------------------------------------------------

    async def _bind(self, pod: PodManifest) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod.metadata.name, "uid": pod.metadata.uid},
            "target": {"kind": "Node", "name": NODE},
        }
        with contextlib.suppress(ConflictError, NotFoundError):
            await self._request("POST", _path(pod) + "/binding", body)

    async def _complain(self, pod: PodManifest, message: str) -> None:
        body = {
            "metadata": {"generateName": f"{pod.metadata.name}."},
            "involvedObject": {
                "kind": "Pod",
                "name": pod.metadata.name,
                "namespace": pod.metadata.namespace,
                "uid": pod.metadata.uid,
            },
            "type": "Warning",
            "reason": "Failed",
            "message": message,
            "source": {"component": "kubelet", "host": NODE},
        }
        await self._request("POST", f"/api/v1/namespaces/{pod.metadata.namespace}/events", body)

    async def _report(self, pod: PodManifest, status: dict[str, Any]) -> None:
        body = {"metadata": {"uid": pod.metadata.uid}, "status": status}
        while True:
            try:
                await self._request("PATCH", _path(pod) + "/status", body)
            except ConflictError as error:
                if "UID" not in error.message:
                    continue  # concurrent writes
            except NotFoundError:
                pass
            return

    async def _request(self, verb: str, path: str, body: Any, resource: str = "pods") -> None:
        """Retry a report until it succeeds, as kubelets do when the API server is down."""
        while True:
            try:
                await self._store.client.request(
                    verb,
                    path,
                    resource=resource,
                    body=json.dumps(body).encode(),
                    content_type=MERGE_PATCH if verb == "PATCH" else JSON,
                )
            except (AlreadyExistsError, ConflictError, ForbiddenError, InvalidError, NotFoundError):
                raise
            except PaddockError as error:
                log.warning("%s %s: %r", verb, path, error)
                await asyncio.sleep(0.2)
            else:
                return


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)


def _path(pod: PodManifest) -> str:
    return f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}"
