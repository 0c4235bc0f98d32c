"""Lightweight pods with a real envd in this process: tasks are real commands of this machine.

For suites about batches. `LightPod` answers the control plane; envd serves the task API, with the
token that the control plane has set.
"""

import os
import pwd
import shutil
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from paddock.envd.config import Config, EnvdSettings
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.process.tree import kill_all
from paddock.envd.sandbox_context import InitRequest
from paddock.envd.server import Envd
from paddock.envd.tasks.model import TaskRecord
from paddock.runtime.kubernetes import names
from paddock.store.kubernetes import KubernetesStore
from tests.on_cluster.world.light_pods import LightKubelet, LightPod

_EXIT = "#!/bin/sh\nexit $1\n"


class TaskPod(LightPod):
    """A pod whose envd runs tasks."""

    def __init__(self, address: str, programs: Path, runs: Counter[str]) -> None:
        super().__init__(address)
        self._home = Path(tempfile.mkdtemp(prefix="paddock-task-pod."))
        me = pwd.getpwuid(os.geteuid()).pw_name
        settings = EnvdSettings(
            env_vars={"PATH": f"{programs}:/usr/bin:/bin"},
            default_user=me,
            default_workdir=str(self._home),
        )
        config = Config(settings=settings, identity_dir=None, tasks_dir=f"{self._home}/tasks")
        self.envd = Envd(config, DirectSpawner())
        self._count(runs)

    def _count(self, runs: Counter[str]) -> None:
        """Count the starts of each task."""
        launcher = self.envd._launcher
        launch = launcher.launch

        async def counted(record: TaskRecord, *rest: Any, **more: Any) -> Any:
            runs[record.name] += 1
            return await launch(record, *rest, **more)

        launcher.launch = counted  # type: ignore[method-assign]

    async def open(self, ports: tuple[int, ...]) -> None:
        await super().open(tuple(port for port in ports if port != names.ENVD_PORT))
        listener = socket.create_server((self.address, names.ENVD_PORT), backlog=64)
        await self.envd.start(listener)

    def _answer(self, head: str, body: bytes) -> bytes:
        answer = super()._answer(head, body)
        if head.startswith("post /init"):
            self.envd.context.apply(InitRequest(access_token=self.settings["accessToken"]))
        return answer

    def kill(self) -> None:
        if self.has_ended:
            return
        super().kill()
        for process in tuple(self.envd.registry.running()):
            kill_all(process.pid)
        self.envd.close()
        shutil.rmtree(self._home, ignore_errors=True)


class TaskKubelet(LightKubelet):
    """Runs pods as `TaskPod`s."""

    def __init__(self, store: KubernetesStore) -> None:
        super().__init__(store)
        self.runs: Counter[str] = Counter()
        """Number of starts of each task, all attempts counted."""
        self._programs = self._directory / "bin"
        self._programs.mkdir()
        # Scenarios name commands of the simulated runner.
        program = self._programs / "exit"
        program.write_text(_EXIT)
        program.chmod(0o755)

    def _make_pod(self, address: str) -> LightPod:
        return TaskPod(address, self._programs, self.runs)


class PodTasks:
    """What the tasks of all pods do, with the names of the simulated runner."""

    def __init__(self, kubelet: TaskKubelet) -> None:
        self._kubelet = kubelet
        self.runs = kubelet.runs

    @property
    def _reports(self) -> dict[str, list[dict[str, Any]]]:
        pods = self._kubelet.pods.items()
        return {
            uid: pod.envd.tasks.all()
            for uid, pod in pods
            if isinstance(pod, TaskPod) and not pod.has_ended
        }

    @property
    def _running(self) -> list[str]:
        return [
            task["name"]
            for tasks in self._reports.values()
            for task in tasks
            if task["processStatus"].get("running")
        ]
