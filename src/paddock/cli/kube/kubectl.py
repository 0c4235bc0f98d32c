"""Runs `kubectl` for `paddock kube`."""

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

_NO_FINALIZERS = json.dumps({"metadata": {"finalizers": None}})
_UNKNOWN = ("no matches for kind", "could not find the requested resource")
"""kubectl's errors for kinds that the server does not serve, or does not list yet."""
SERVED_SECONDS = 60.0
RETRY_SECONDS = 0.5


class Kubectl:
    """Runs `kubectl` with the credentials of the user."""

    def __init__(self, kubeconfig: str | None, context: str | None) -> None:
        found = shutil.which("kubectl")
        if found is None:
            raise NotFoundError(
                "kubectl is not installed", hint="install kubectl; `paddock kube` uses it"
            )
        self._command = [found]
        if kubeconfig:
            self._command.append(f"--kubeconfig={kubeconfig}")
        if context:
            self._command.append(f"--context={context}")

    def apply(self, objects: list[Manifest]) -> None:
        """Create or change objects by server-side apply."""
        self._run(
            "apply",
            "--server-side",
            "--force-conflicts",
            "--field-manager=paddock-kube",
            "-f",
            "-",
            stdin=as_list(objects),
        )

    def apply_when_served(self, objects: list[Manifest]) -> None:
        """Apply objects of new kinds; retry until the server lists the kinds."""
        deadline = time.monotonic() + SERVED_SECONDS
        while True:
            try:
                return self.apply(objects)
            except UnsupportedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    def create(self, obj: Manifest) -> None:
        """Create an object that must not exist."""
        self._run("create", "-f", "-", stdin=json.dumps(obj))

    def replace(self, obj: Manifest) -> None:
        """Replace an object, unless it has changed since it was read."""
        self._run("replace", "-f", "-", stdin=json.dumps(obj))

    def delete(self, *arguments: str) -> None:
        """Delete objects, if they exist."""
        self._run("delete", "--ignore-not-found", *arguments)

    def delete_all(self, objects: list[Manifest]) -> None:
        """Delete these objects, if they exist."""
        self._run("delete", "--ignore-not-found", "-f", "-", stdin=as_list(objects))

    def remove_finalizers(self, kind: str) -> None:
        """Remove the finalizers of all objects of a kind, when no controller would."""
        for item in self.get(kind, "--all-namespaces").get("items", ()):
            if item["metadata"].get("finalizers"):
                name = ("-n", item["metadata"]["namespace"], kind, item["metadata"]["name"])
                self._run("patch", *name, "--type=merge", "-p", _NO_FINALIZERS)

    def wait(self, *arguments: str) -> None:
        """Wait for a condition."""
        self._run("wait", *arguments)

    def restart(self, *arguments: str) -> None:
        """Replace the pods of an object, as its strategy has it."""
        self._run("rollout", "restart", *arguments)

    def roll_out(self, *arguments: str) -> None:
        """Wait until the rollout of an object is complete."""
        self._run("rollout", "status", *arguments)

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return an object or a list; empty if it does not exist."""
        text = self._run("get", "--ignore-not-found", "-o", "json", *arguments)
        return json.loads(text) if text.strip() else {}

    def count(self, path: str) -> int:
        """Return the number of objects below a path of the API, without reading them all."""
        page = json.loads(self._run("get", "--raw", f"{path}?limit=1"))
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))

    def _run(self, *arguments: str, stdin: str | None = None) -> str:
        done = subprocess.run(
            [*self._command, *arguments], input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout
        problem = done.stderr.strip().splitlines()
        message = problem[-1] if problem else f"kubectl exited with {done.returncode}"
        unknown = [line for line in problem if any(words in line for words in _UNKNOWN)]
        if unknown:
            raise UnsupportedError(unknown[0], hint="`kubectl get crd` lists the kinds")
        if "orbidden" in message:
            raise ForbiddenError(message, hint="use an account with more permissions")
        if "onnection refused" in message or "no such host" in message:
            raise UnavailableError(message, hint="check that the cluster of the kubeconfig is up")
        raise InvalidError(message)


def as_list(objects: list[Manifest]) -> str:
    """Return objects as one JSON List."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
