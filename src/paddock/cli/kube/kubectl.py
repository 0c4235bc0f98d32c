"""`kubectl`, which does the talking to a cluster for `paddock kube`."""

import json
import shutil
import subprocess
import time
from typing import Any

from paddock.cli.kube.options import Manifest
from paddock.kit.errors import (
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)

_FREE = json.dumps({"metadata": {"finalizers": None}})
_UNKNOWN = ("no matches for kind", "could not find the requested resource")
"""What is said of kinds that a server does not serve, or does not tell of yet."""
SERVED_SECONDS = 60.0
LOOK_SECONDS = 0.5


class Kubectl:
    """Runs `kubectl`, as whoever the user is to it."""

    def __init__(self, kubeconfig: str | None, context: str | None) -> None:
        found = shutil.which("kubectl")
        if found is None:
            raise NotFoundError("kubectl is not installed", hint="install it; it does the talking")
        self._command = [found]
        if kubeconfig:
            self._command.append(f"--kubeconfig={kubeconfig}")
        if context:
            self._command.append(f"--context={context}")

    def apply(self, objects: list[Manifest]) -> None:
        """Make or change objects; what others own of them stays theirs."""
        self._run(
            "apply",
            "--server-side",
            "--force-conflicts",
            "--field-manager=paddock-kube",
            "-f",
            "-",
            given=as_list(objects),
        )

    def apply_when_served(self, objects: list[Manifest]) -> None:
        """Apply what may be of kinds that are new: a busy server tells of them a while later."""
        deadline = time.monotonic() + SERVED_SECONDS
        while True:
            try:
                return self.apply(objects)
            except UnsupportedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_SECONDS)

    def create(self, obj: Manifest) -> None:
        """Make an object that must be new."""
        self._run("create", "-f", "-", given=json.dumps(obj))

    def delete(self, *arguments: str) -> None:
        """Delete what is there."""
        self._run("delete", "--ignore-not-found", *arguments)

    def delete_all(self, objects: list[Manifest]) -> None:
        """Delete these very objects, where they are."""
        self._run("delete", "--ignore-not-found", "-f", "-", given=as_list(objects))

    def release(self, kind: str) -> None:
        """Take finalizers off all of a kind: nobody is there who would."""
        for item in self.get(kind, "--all-namespaces").get("items", ()):
            if item["metadata"].get("finalizers"):
                place = ("-n", item["metadata"]["namespace"], kind, item["metadata"]["name"])
                self._run("patch", *place, "--type=merge", "-p", _FREE)

    def wait(self, *arguments: str) -> None:
        """Wait for a condition."""
        self._run("wait", *arguments)

    def roll_out(self, *arguments: str) -> None:
        """Wait until all pods of an object are new and ready."""
        self._run("rollout", "status", *arguments)

    def get(self, *arguments: str) -> dict[str, Any]:
        """Read; empty where it is not there."""
        text = self._run("get", "--ignore-not-found", "-o", "json", *arguments)
        return json.loads(text) if text.strip() else {}

    def count(self, path: str) -> int:
        """Say how many objects there are below a path of the API, without reading them all."""
        page = json.loads(self._run("get", "--raw", f"{path}?limit=1"))
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))

    def _run(self, *arguments: str, given: str | None = None) -> str:
        done = subprocess.run(
            [*self._command, *arguments], input=given, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout
        problem = done.stderr.strip().splitlines()
        message = problem[-1] if problem else f"kubectl ended with {done.returncode}"
        unknown = [line for line in problem if any(words in line for words in _UNKNOWN)]
        if unknown:
            raise UnsupportedError(unknown[0], hint="`kubectl get crd` shows which kinds there are")
        if "orbidden" in message:
            raise ForbiddenError(message, hint="an administrator of the cluster may")
        if "onnection refused" in message or "no such host" in message:
            raise UnavailableError(message, hint="is the kubeconfig's cluster up?")
        raise InvalidError(message)


def as_list(objects: list[Manifest]) -> str:
    """Write objects as one."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
