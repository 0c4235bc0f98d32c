"""A complete installation on a real API server: roles as processes, pods by the fake kubelet.

async with Installation(cluster) as paddock:
    await paddock.stocked(2)
    paddock.sdk("print(Sandbox.create().sandbox_id)")
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from paddock.adapters.replicas import PATH as WRITTEN
from paddock.app.roles.node import serving
from paddock.cache import states
from paddock.cli.kube.manifests import manifests
from paddock.cli.kube.options import KubeOptions
from paddock.kit.errors import AlreadyExistsError, NotFoundError
from paddock.kit.tasks import background
from paddock.resources import codec
from paddock.resources.kinds.builtin import Lease, LeaseSpec, Namespace
from paddock.resources.kinds.pods import Pod, PodManifest
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import LABEL_POOL, Sandbox
from paddock.resources.kinds.template import (
    PauseStrategy,
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import Key, ObjectMeta, Resource
from paddock.resources.tokens import TokenSeed, node_tokens
from paddock.store.kubernetes import KubernetesStore, load_kubeconfig
from tests.cluster.addresses import fresh_address
from tests.cluster.info import ClusterInfo, RefusedError
from tests.cluster.kubelet import NODE, ROOT, Kubelet
from tests.ports import free_ports
from tests.sdk.clients import LEAVE

API_KEY = "e2b_" + "0123456789abcdef" * 2 + "01234567"
LEASE_SECONDS = 6.0
START_SECONDS = 100.0
END_SECONDS = 60.0
_RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
SDK = Path("/var/cache/paddock/sdk/e2b-2.63.0/bin/python")
PREAMBLE = """
import json, os, time
from e2b import Sandbox

def patiently(act, seconds=60):
    # The cause of the failure is temporary.
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)

def pause(box):
    box.pause() if hasattr(box, "pause") else box.beta_pause()

def pause_by_agent(box):
    # The controllers may not have seen the node's agent yet.
    patiently(lambda: pause(box))
"""
"""Helpers for client scripts."""


class Installation:
    """Two of each role on one cluster."""

    def __init__(
        self,
        info: ClusterInfo,
        kubelet: Callable[[KubernetesStore], Kubelet],
        *,
        replicas: int = 2,
        pool_size: int = 2,
        lease_seconds: float = LEASE_SECONDS,
        server: str = "",
        image: str = "debian:13",
        agent_image: str = "paddock",
    ) -> None:
        self.info = info
        self._make_kubelet = kubelet
        self._server = server or info.server
        """The API server's URL for the roles; a test may insert a proxy."""
        self._image = image
        self._agent_image = agent_image
        self._replicas = replicas
        self._pool_size = pool_size
        self._lease_seconds = lease_seconds
        self.directory = Path(tempfile.mkdtemp(prefix="paddock-roles."))
        ports = free_ports(4 * replicas)
        self.api_ports = ports[:replicas]
        self.gateway_ports = ports[replicas : 2 * replicas]
        self.controller_ports = ports[2 * replicas : 3 * replicas]
        self._admin_ports = ports[3 * replicas :]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.client_seconds = 120.0
        """Timeout of a client script."""
        self.restarts: list[str] = []
        """Processes that ended by themselves and were restarted."""
        self.store: KubernetesStore
        self.kubelet: Kubelet

    async def __aenter__(self) -> "Installation":
        self._stack = contextlib.AsyncExitStack()
        try:
            await self._begin()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _begin(self) -> None:
        access = load_kubeconfig([Path(self.info.kubeconfig)], context="admin")
        self.store = KubernetesStore.open(access)
        self._stack.push_async_callback(self.store.close)
        self._stack.callback(self._stop_all)
        await self._default_content()
        self._identities()
        self.kubelet = await self._stack.enter_async_context(self._make_kubelet(self.store))
        await self._stack.enter_async_context(background(self._keep_running(), name="restarts"))
        for number in range(self._replicas):
            self.start("controllers", number)
            self.start("api", number)
        for number in range(self._replicas):
            await self.serving(f"api-{number}")
        for number in range(self._replicas):
            self.start("gateway", number)
        for number in range(self._replicas):
            await self.serving(f"gateway-{number}")

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # ---- processes -----------------------------------------------------------------------

    def start(self, role: str, number: int) -> None:
        """Start one process."""
        api = self.controller_ports if role == "controllers" else self.api_ports
        peers = [f"http://127.0.0.1:{port}" for port in self.api_ports]
        settings = {
            "STORE": "kubernetes",
            "RUNTIME": "kubernetes",
            "KUBECONFIG": str(self.directory / f"{role}.kubeconfig"),
            "STATE_DIR": str(self.directory),
            "SEED": "seed",
            "TOKEN": "token",
            "API_KEY": API_KEY,
            "AGENT_IMAGE": self._agent_image,
            "API_PORT": str(api[number]),
            "PORT": str(self.gateway_ports[number]),
            "ADMIN_PORT": str(self._admin_ports[number]),
            "API_PEERS": ",".join(peers),
            "PEERS": ",".join(f"http://127.0.0.1:{port}" for port in self._admin_ports),
            "CLAIM_IMAGES": "other:*,missing:*,localhost/*",
            "CLAIM_MEMORY": "1Gi",
            "LEASE_SECONDS": str(self._lease_seconds),
            "IDENTITY": f"{role}-{number}",
        }
        name = f"{role}-{number}"
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "paddock.app", role],
                cwd=ROOT,
                env={**os.environ, **{f"PADDOCK_{key}": text for key, text in settings.items()}},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _keep_running(self) -> None:
        """Restart processes that end by themselves, as a kubelet would."""
        while True:
            await asyncio.sleep(0.3)
            for name, process in list(self.processes.items()):
                if process.poll() is not None:
                    role, _, number = name.rpartition("-")
                    self.restarts.append(name)
                    self.start(role, int(number))

    async def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End one process and wait for it, without blocking this event loop, which may proxy it."""
        process = self.processes.pop(name)
        process.send_signal(how)
        try:
            await asyncio.to_thread(process.wait, END_SECONDS)
        except BaseException:
            process.kill()
            process.wait()
            raise

    def _stop_all(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self, name: str) -> str:
        """Return the end of a process's log."""
        text = (self.directory / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-30:])

    @property
    def admin_urls(self) -> list[str]:
        """The admin URLs of the gateways."""
        return [f"http://127.0.0.1:{port}" for port in self._admin_ports]

    async def serving(self, name: str) -> None:
        """Wait until a process is ready."""
        role, _, number = name.rpartition("-")
        ports = {
            "api": self.api_ports,
            "controllers": self.controller_ports,
            "gateway": self._admin_ports,
        }
        url = f"http://127.0.0.1:{ports[role][int(number)]}/readyz"
        before = self.restarts.count(name)

        def serves() -> bool:
            ended = self.restarts.count(name) - before
            assert ended < 3, f"{name} ends again and again:\n{self.log(name)}"
            return self._answers(url)

        await self.until(serves)

    def _answers(self, url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _identities(self) -> None:
        """Create the service account and rights of each role."""
        for manifest in manifests(KubeOptions()):
            if manifest["kind"] in _RIGHTS:
                self.post(manifest)
        for role in ("api", "controllers", "gateway"):
            account = f"/api/v1/namespaces/paddock-system/serviceaccounts/paddock-{role}"
            request = {"spec": {"expirationSeconds": 3600}}
            token = self.info.request("POST", f"{account}/token", request)["status"]["token"]
            cluster = {"server": self._server, "certificate-authority": self.info.ca_file}
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
            (self.directory / f"{role}.kubeconfig").write_text(json.dumps(config))

    def post(self, manifest: dict[str, Any]) -> None:
        """Create an object unless it exists."""
        group, kind = manifest["apiVersion"], manifest["kind"].lower() + "s"
        base = f"/apis/{group}" if "/" in group else f"/api/{group}"
        namespace = manifest["metadata"].get("namespace")
        place = f"{base}/namespaces/{namespace}/{kind}" if namespace else f"{base}/{kind}"
        try:
            self.info.request("POST", place, manifest)
        except RefusedError as error:
            if error.code != 409:
                raise

    # ---- objects --------------------------------------------------------------------------

    async def _default_content(self) -> None:
        for name in ("default", "paddock-system"):
            await self._create(Namespace(metadata=ObjectMeta(name=name)))
            # Pods are rejected before.
            await self.until(lambda name=name: self._has_account(name))
        volume = {
            "metadata": {"name": "home"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        await self.template("base")
        await self.template(
            "kept", volume_claim_templates=(volume,), pause_strategy=PauseStrategy.STOP
        )
        await self.pool("base", self._pool_size)

    def _has_account(self, namespace: str) -> bool:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        try:
            self.info.request("GET", path)
        except RefusedError as error:
            if error.code != 404:
                raise
            return False
        return True

    async def template(self, name: str, *, image: str = "", **spec: Any) -> None:
        """Create a template in the default team's namespace."""
        await self._create(
            SandboxTemplate(
                metadata=ObjectMeta(name=name, namespace="default"),
                spec=SandboxTemplateSpec(
                    image=image or self._image,
                    resources=Resources(cpu="1", memory="256Mi"),
                    **spec,
                ),
            )
        )

    async def pool(self, name: str, replicas: int) -> None:
        """Create a pool of a template."""
        await self._create(
            SandboxPool(
                metadata=ObjectMeta(name=name, namespace="default"),
                spec=SandboxPoolSpec(template_ref=TemplateRef(name=name), replicas=replicas),
            )
        )

    async def _create(self, obj: Any) -> None:
        with contextlib.suppress(AlreadyExistsError):
            made = await self.store.create(obj)
            if self.processes:
                await self.eventually(lambda: self._are_known([made]))

    async def _are_known(self, items: Sequence[Resource]) -> bool:
        """Send objects to every replica of the API, whose watch may lag behind."""
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer token"}) as http:
            for port, item in itertools.product(self.api_ports, items):
                url = f"http://127.0.0.1:{port}{WRITTEN}"
                headers = {"x-paddock-kind": item.KIND}
                try:
                    async with http.post(url, data=codec.encode(item), headers=headers) as answer:
                        if answer.status != 204:
                            return False
                except aiohttp.ClientError:
                    return False
        return True

    async def sandboxes(self) -> tuple[Sandbox, ...]:
        """Return all sandboxes."""
        return (await self.store.list(Sandbox, namespace="default")).items

    async def idle(self, pool: str = "base") -> list[Sandbox]:
        """Return the unclaimed running sandboxes of a pool that are not being deleted."""
        return [
            item
            for item in await self.sandboxes()
            if item.metadata.labels.get(LABEL_POOL) == pool
            and item.spec.claim is None
            and states.is_ready(item)
            and not item.is_deleting
        ]

    async def stocked(self, count: int, pool: str = "base") -> None:
        """Wait until a pool has this many warm sandboxes and all replicas know them."""

        async def enough() -> bool:
            found = await self.idle(pool)
            return len(found) >= count and await self._are_known(found)

        await self.eventually(enough)

    async def sandbox(self, sandbox_id: str) -> Sandbox:
        """Find a claimed sandbox by its id."""
        for found in await self.sandboxes():
            if found.spec.claim is not None and found.spec.claim.sandbox_id == sandbox_id:
                return found
        raise AssertionError(f"no sandbox {sandbox_id}")

    async def is_gone(self, key: Key) -> bool:
        """Whether there is no pod of that name."""
        try:
            await self.store.get(Pod, key)
        except NotFoundError:
            return True
        return False

    async def lease(self) -> LeaseSpec:
        """Return the lease of the leader."""
        found = await self.store.get(Lease, Key("paddock-system", "paddock-controllers"))
        return found.spec

    # ---- waiting -------------------------------------------------------------------------

    async def until(self, check: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait until a condition holds."""

        async def holds() -> bool:
            return await asyncio.to_thread(check)

        await self.eventually(holds, seconds)

    async def eventually(self, check: Callable[[], Any], seconds: float = START_SECONDS) -> None:
        """Wait until a condition holds; on timeout show the logs of the processes."""
        try:
            async with asyncio.timeout(seconds):
                while not await check():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self.processes)
            raise AssertionError(f"it did not happen in {seconds:g} s\n{logs}") from None

    @contextlib.asynccontextmanager
    async def node_agent(self) -> AsyncGenerator[None]:
        """Run the node's agent, as the DaemonSet would."""
        # A separate address: on 127.0.0.1 a client connection may use its port.
        address = fresh_address()
        labels = {"app.kubernetes.io/name": "paddock", "app.kubernetes.io/component": "node"}
        agent = PodManifest(
            metadata=ObjectMeta(name="paddock-node", namespace="paddock-system", labels=labels),
            spec={"nodeName": NODE, "containers": [{"name": "node", "image": "paddock"}]},
        )
        path = "/api/v1/namespaces/paddock-system/pods/paddock-node"
        await self.store.create(agent)
        status = {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}
        try:
            await self.store.client.request(
                "PATCH",
                f"{path}/status",
                body=json.dumps(status).encode(),
                content_type="application/merge-patch+json",
            )
            async with serving(node_tokens(TokenSeed(b"seed")), address):
                yield
        finally:
            await self.store.delete(PodManifest, agent.key)
            await self.eventually(lambda: self.is_gone(agent.key))

    # ---- clients -------------------------------------------------------------------------

    async def command(self, *words: str) -> tuple[int, str, str]:
        """Run `paddock` against this installation; return its exit code, output and messages."""
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("paddock")),
            *words,
            env={
                **os.environ,
                "PADDOCK_URL": f"http://127.0.0.1:{self.gateway_ports[0]}",
                "PADDOCK_KUBECONFIG": self.info.kubeconfig,
                "E2B_API_KEY": API_KEY,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, problem = await asyncio.wait_for(process.communicate(), self.client_seconds)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return process.returncode or 0, out.decode(), problem.decode()

    async def sdk(self, script: str, *, gateway: int = 0, **values: str) -> Any:
        """Run a script with the unmodified client; its last line of output is JSON."""
        url = f"http://127.0.0.1:{self.gateway_ports[gateway]}"
        environment = {
            **os.environ,
            "E2B_API_KEY": API_KEY,
            "E2B_API_URL": url,
            "E2B_SANDBOX_URL": url,
            **values,
        }
        process = await asyncio.create_subprocess_exec(
            str(SDK),
            "-c",
            PREAMBLE + script + LEAVE,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, problem = await asyncio.wait_for(process.communicate(), self.client_seconds)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self.processes)
        assert process.returncode == 0, f"{problem.decode()}\n{logs}"
        return json.loads(out.decode().splitlines()[-1])
