"""Paddock installed on a cluster, with helpers for tests: `Deployed`.

Its roles run as pods on the node with their own service accounts; only the command line runs
outside the cluster.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.cluster.info import ClusterInfo, RefusedError
from tests.cluster.node.machine import RealNode
from tests.gateway.certificates import issue
from tests.on_cluster.world.installation import SDK
from tests.sdk.clients import LEAVE

PATIENCE_SECONDS = 400.0
_PADDOCK = str(Path(sys.executable).parent / "paddock")
_SAID = 25


class Deployed:
    """An installation in a namespace of a cluster with one real node."""

    def __init__(self, info: ClusterInfo, node: RealNode, namespace: str) -> None:
        self.info = info
        self.node = node
        self.namespace = namespace
        self.api_key = ""
        self.authority: Path | None = None
        """The certificate authority of the gateways, if they serve TLS."""

    async def certify(self, directory: Path, secret: str) -> None:
        """Create a Secret with a certificate for the address of the Service, which is reserved."""
        place = ("-n", self.namespace)
        await self.kubectl("create", "namespace", self.namespace)
        await self.kubectl("create", "service", "clusterip", "paddock", "--tcp=443:3443", *place)
        address = self.service("paddock")["spec"]["clusterIP"]
        self.authority, certificate, key = issue(directory, address, "*.sandboxes.test")
        files = (f"--cert={certificate}", f"--key={key}")
        await self.kubectl("create", "secret", "tls", secret, *files, *place)

    # ---- commands ------------------------------------------------------------------------

    async def paddock(self, *arguments: str) -> dict[str, Any]:
        """Run `paddock kube …`; return its JSON output."""
        command = [_PADDOCK, "-o", "json", "kube", *arguments, "--namespace", self.namespace]
        return json.loads(await self._run(command))

    async def kubectl(self, *arguments: str) -> str:
        """Run `kubectl`; return its output."""
        return await self._run([self.info.kubectl, *arguments])

    async def sdk(self, script: str, *, url: str = "", **values: str) -> Any:
        """Run a script with the unmodified client; its last line of output is JSON.

        It runs in the node's network namespace, where Services are reachable.
        """
        scheme = "http" if self.authority is None else "https"
        url = url or f"{scheme}://{self.service('paddock')['spec']['clusterIP']}"
        environment = {"E2B_API_KEY": self.api_key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}
        if self.authority is not None:
            environment["SSL_CERT_FILE"] = str(self.authority)
        inside = ["nsenter", f"--target={self.node.pid}", "--net", "--"]
        near = [] if url.startswith("http://127.") else inside
        head = "import json, os\nfrom e2b import Sandbox\n"
        command = [*near, str(SDK), "-c", head + script + LEAVE]
        said = await self._run(command, **environment, **values)
        return json.loads(said.splitlines()[-1])

    async def _run(self, command: list[str], **values: str) -> str:
        environment = {
            **os.environ,
            "PATH": f"{self.info.binaries}:{os.environ['PATH']}",
            "KUBECONFIG": self.info.kubeconfig,
            **values,
        }
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, problem = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        assert process.returncode == 0, f"{problem.decode()}\n{self.told()}"
        return out.decode()

    @contextlib.asynccontextmanager
    async def forwarded(self, port: int) -> AsyncGenerator[str]:
        """Forward a port to the gateways, as documented."""
        place = f"{port}:3000"
        process = await asyncio.create_subprocess_exec(
            *(self.info.kubectl, f"--kubeconfig={self.info.kubeconfig}", "-n", self.namespace),
            *("port-forward", "deployment/paddock-gateway", place),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            assert process.stdout is not None
            said = await asyncio.wait_for(process.stdout.readline(), PATIENCE_SECONDS)
            assert said.startswith(b"Forwarding from 127.0.0.1"), said
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    # ---- objects --------------------------------------------------------------------------

    def items(self, path: str) -> list[dict[str, Any]]:
        """List objects."""
        return self.info.request("GET", path)["items"]

    def service(self, name: str) -> dict[str, Any]:
        """Return a Service of the installation."""
        return self.info.request("GET", f"/api/v1/namespaces/{self.namespace}/services/{name}")

    def pods(self, role: str) -> list[dict[str, Any]]:
        """List the pods of a role."""
        found = self.items(f"/api/v1/namespaces/{self.namespace}/pods")
        wanted = ("app.kubernetes.io/component", role)
        return [pod for pod in found if wanted in pod["metadata"]["labels"].items()]

    def sandboxes(self) -> list[dict[str, Any]]:
        """List all sandboxes."""
        return self.items("/apis/paddock.dev/v1alpha1/sandboxes")

    def sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """Find a claimed sandbox by its id."""
        claims = [(box["spec"].get("claim", {}), box) for box in self.sandboxes()]
        return next(box for claim, box in claims if claim.get("sandboxId") == sandbox_id)

    def availability(self) -> list[str]:
        """Return the Available condition of every Deployment."""
        found = self.items(f"/apis/apps/v1/namespaces/{self.namespace}/deployments")
        conditions = [each for item in found for each in item["status"].get("conditions", ())]
        return [each["status"] for each in conditions if each["type"] == "Available"]

    def running(self) -> list[dict[str, Any]]:
        """List running sandboxes."""
        return [box for box in self.sandboxes() if box.get("status", {}).get("phase") == "Running"]

    def is_stocked(self, count: int) -> bool:
        """Whether this many sandboxes run unclaimed."""
        return sum("claim" not in box["spec"] for box in self.running()) >= count

    async def reaches(self, address: str, port: int) -> bool:
        """Whether the machine, which is not a pod of Paddock, can connect to a pod's port."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 30)
        except ConnectionRefusedError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    # ---- waiting -------------------------------------------------------------------------

    async def until(self, check: Callable[[], bool]) -> None:
        """Wait until a condition holds; on timeout show the logs of the pods."""
        await self.eventually(lambda: asyncio.to_thread(check))

    async def eventually(self, check: Callable[[], Awaitable[bool]]) -> None:
        """Wait until a condition holds; on timeout show the logs of the pods."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await check():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            message = f"it did not happen in {PATIENCE_SECONDS:g} s\n{self.told()}"
            raise AssertionError(message) from None

    def told(self) -> str:
        """Return the states of all pods, and the ends of their logs and of the node's."""
        parts = [self.node.logs()]
        for log in sorted((self.node.home / "logs").rglob("*.log")):
            with contextlib.suppress(OSError):
                lines = log.read_text(errors="replace").splitlines()[-_SAID:]
                parts.append(f"--- {log.parent.parent.name}\n" + "\n".join(lines))
        with contextlib.suppress(OSError, RefusedError):
            for pod in self.items("/api/v1/pods"):
                states = pod["status"].get("containerStatuses", pod["status"])
                parts.append(f"--- {pod['metadata']['name']}: {json.dumps(states)}")
        return "\n".join(parts)
