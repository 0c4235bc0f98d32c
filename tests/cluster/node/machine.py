"""A real node for a test cluster: kubelet, containerd and runc, in separate namespaces.

async with RealNode(cluster, archives, pause="localhost/pause:1") as node:
    ...  # pods are scheduled and run, and their addresses are reachable

The node has its own processes, mounts and network: one link connects it to this machine, a route
leads to its pods, and a forwarder on the host end of the link leads to the API server on loopback.
Control groups are not removed with the node's namespaces; they are removed here.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import msgspec

from paddock.kit.errors import NotFoundError
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.freezer import find_cgroup
from tests.cluster.binaries import ROOT, BinariesMissingError, directory_with
from tests.cluster.control_plane import KubeCluster
from tests.cluster.info import RefusedError
from tests.cluster.node.init import Plan
from tests.cluster.node.services import DNS_ADDRESS, DOMAIN, Services
from tests.leaks import note_group
from tests.on_cluster.world.proxy import TcpProxy

NAME = "real-node"
PROGRAMS = Path(os.environ.get("PADDOCK_TEST_CONTAINERD", "/var/cache/paddock/containerd/usr/bin"))
PLUGINS = PROGRAMS.parent / "lib" / "cni"
CGROUPS = Path("/sys/fs/cgroup")
START_SECONDS = 400.0
END_SECONDS = 60.0
_CONTAINERD = """
version = 2
root = "{home}/containerd"
state = "/run/containerd"
[grpc]
  address = "{home}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{home}/cni"
"""


def check_programs() -> None:
    """Raise `BinariesMissingError` if a node cannot run here."""
    directory_with(["kubelet"], build=False)
    missing = [
        str(path)
        for path in (PROGRAMS / "containerd", PROGRAMS / "runc", PLUGINS / "ptp")
        if not path.is_file()
    ]
    if missing:
        raise BinariesMissingError(f"no {missing[0]}: run scripts/fetch-containerd")


class NodeError(Exception):
    """The node did not start; the message ends with the logs of its daemons."""


class RealNode:
    """One node; an async context manager that waits until the node is ready."""

    def __init__(
        self,
        cluster: KubeCluster,
        archives: list[Path],
        *,
        pause: str,
        has_services: bool = False,
    ) -> None:
        self._cluster = cluster
        self._has_services = has_services
        """Whether Services, cluster DNS and NetworkPolicies work."""
        self._archives = archives
        self._pause = pause
        self.home = Path(tempfile.mkdtemp(prefix="pdn"))
        mark = random.Random().randrange(64 * 256)
        self._net = f"100.{64 + mark // 256}.{mark % 256}"
        """First three octets of a carrier-grade range: .0/25 are pods, .128/30 is the link."""
        self._link = f"pdn{mark}"
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            self._make_groups()
            self._write_settings()
            _ip("link", "add", self._link, "type", "veth", "peer", "name", f"{self._link}n")
            _ip("address", "add", f"{self._net}.129/30", "dev", self._link)
            _ip("link", "set", self._link, "up")
            proxy = TcpProxy(int(self._cluster.info.server.rpartition(":")[2]))
            await self._stack.enter_async_context(proxy.run(f"{self._net}.129"))
            self._write_access(f"https://{self._net}.129:{proxy.port}")
            self._start()
            if self._has_services:
                await self._stack.enter_async_context(self._services(proxy.port).run())
            await self._until_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # the kernel kills all processes of the node
            await asyncio.to_thread(self._process.wait)
        await self._stack.aclose()
        subprocess.run(["ip", "link", "delete", self._link], check=False, capture_output=True)
        await self._remove_groups()
        with contextlib.suppress(RefusedError, OSError):
            self._cluster.info.request("DELETE", f"/api/v1/nodes/{NAME}")
        await asyncio.to_thread(shutil.rmtree, self.home, ignore_errors=True)

    # ---- start ---------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the node's first process and set up its link."""
        plan = Plan(
            home=str(self.home),
            programs=[str(PROGRAMS), self._cluster.info.binaries],
            images=[str(path) for path in self._archives],
            link=f"{self._link}n",
            address=f"{self._net}.130/30",
            gateway=f"{self._net}.129",
            kubelet=[
                f"--config={self.home}/kubelet.yaml",
                f"--kubeconfig={self.home}/kubeconfig",
                f"--root-dir={self.home}/kubelet",
                f"--cert-dir={self.home}/pki",
                f"--hostname-override={NAME}",
                f"--node-ip={self._net}.130",
            ],
        )
        file = self.home / "plan.json"
        file.write_bytes(msgspec.json.encode(plan))
        # If this process is killed, the kernel ends the node too.
        tied = ["setpriv", "--pdeathsig", "KILL", "--"]
        apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        first = [sys.executable, "-m", "tests.cluster.node.init", str(file)]
        with (self.home / "node.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*tied, *apart, "--mount-proc", *first],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ours = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self._process.pid}/ns/net").readlink() == ours:
            time.sleep(0.01)
        _ip("link", "set", f"{self._link}n", "netns", str(self._process.pid))
        _ip("route", "add", f"{self._net}.0/25", "via", f"{self._net}.130")

    def _services(self, api_port: int) -> Services:
        return Services(
            self._cluster.info,
            pid=self.pid,
            link=f"{self._link}n",
            gateway=f"{self._net}.129",
            api_port=api_port,
        )

    @property
    def pid(self) -> int:
        """Pid of a process in the node's network namespace."""
        assert self._process is not None
        return self._process.pid

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(self._is_ready):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NodeError(f"the node did not get ready\n{self.logs()}")
            await asyncio.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            node = self._cluster.info.request("GET", f"/api/v1/nodes/{NAME}")
        except RefusedError:
            return False
        states = {item["type"]: item["status"] for item in node["status"].get("conditions", ())}
        return states.get("Ready") == "True"

    def logs(self) -> str:
        """Return the ends of the logs of its processes."""
        tails = []
        for name in ("node", "containerd", "kubelet"):
            with contextlib.suppress(OSError):
                text = (self.home / f"{name}.log").read_text(errors="replace")
                tails.append(f"--- {name}\n" + "\n".join(text.splitlines()[-25:]))
        return "\n".join(tails)

    # ---- pods ----------------------------------------------------------------------------

    def processes(self, pod_uid: str) -> list[Path]:
        """Return the /proc directories of a pod's processes."""
        pids: set[str] = set()
        for place, _, _ in os.walk(find_cgroup(pod_uid)):  # skips removed directories
            with contextlib.suppress(OSError):
                pids |= set((Path(place) / "cgroup.procs").read_text().split())
        return [Path("/proc") / pid for pid in pids]

    def process_states(self, pod_uid: str) -> list[str]:
        """Return the kernel state of each process of a pod."""
        states: list[str] = []
        for place in self.processes(pod_uid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                states.append((place / "stat").read_text().rpartition(")")[2].split()[0])
        return states

    def processes_of(self, pod_uid: str, word: bytes) -> list[Path]:
        """Return the processes of a pod that have a word in their command line."""
        try:
            found = self.processes(pod_uid)
        except NotFoundError:
            return []
        return [place for place in found if word in b" ".join(_command(place))]

    def end_main_container(self, pod_uid: str) -> None:
        """Kill the main container of a pod."""
        [main] = [
            place for place in self.processes(pod_uid) if _command(place)[0] == names.HOLD.encode()
        ]
        os.kill(int(main.name), signal.SIGKILL)

    def granted(self, pod_uid: str) -> tuple[float, int]:
        """Return the CPU and memory limits of a pod in the kernel."""
        place = find_cgroup(pod_uid)
        if (CGROUPS / "cgroup.controllers").exists():
            quota, period = (place / "cpu.max").read_text().split()
            memory = (place / "memory.max").read_text()
        else:
            path = place.relative_to(CGROUPS / "freezer")
            files = [CGROUPS / "cpu" / path / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
            quota, period = (file.read_text() for file in files)
            memory = (CGROUPS / "memory" / path / "memory.limit_in_bytes").read_text()
        return float(quota) / float(period), int(memory)

    def volume(self, name: str) -> dict[str, Any]:
        """Return a volume on this node that any claim can bind."""
        place = self.home / "volumes" / name
        place.mkdir(parents=True)
        os.chown(place, 1000, 1000)  # the kubelet does not set its owner
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": str(place)},
            },
        }

    # ---- settings ------------------------------------------------------------------------

    def _write_settings(self) -> None:
        known = {"home": self.home, "pause": self._pause, "plugins": PLUGINS}
        (self.home / "containerd.toml").write_text(_CONTAINERD.format(**known))
        (self.home / "cni").mkdir()
        # One link per pod: traffic between pods passes the node's packet filter.
        links = {
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": f"{self._net}.0/25"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": str(self.home / "addresses"),
            },
        }
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [links]}
        (self.home / "cni" / "pods.conflist").write_text(json.dumps(network))
        (self.home / "resolv.conf").touch()
        (self.home / "kubelet.yaml").write_text(json.dumps(self._kubelet()))

    def _kubelet(self) -> dict[str, Any]:
        names = {"clusterDNS": [DNS_ADDRESS], "clusterDomain": DOMAIN}
        return {
            **(names if self._has_services else {}),
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.home}/containerd.sock",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": self._cluster.info.ca_file},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.home.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            # The disk belongs to the machine: disable eviction by disk use.
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": f"{self.home}/logs",
            "resolvConf": f"{self.home}/resolv.conf",
            "makeIPTablesUtilChains": False,
            "maxPods": 60,
        }

    def _write_access(self, server: str) -> None:
        certificate, key = self._cluster.authority.client(f"system:node:{NAME}", "system:nodes")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "c",
                    "cluster": {
                        "server": server,
                        "certificate-authority": self._cluster.info.ca_file,
                        "tls-server-name": "127.0.0.1",
                    },
                }
            ],
            "users": [
                {
                    "name": "u",
                    "user": {"client-certificate": str(certificate), "client-key": str(key)},
                }
            ],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (self.home / "kubeconfig").write_text(json.dumps(config))

    # ---- control groups ------------------------------------------------------------------

    def _roots(self) -> list[Path]:
        if (CGROUPS / "cgroup.controllers").exists():
            return [CGROUPS / self.home.name]
        found = [place for place in CGROUPS.iterdir() if (place / "cgroup.procs").exists()]
        return [place / self.home.name for place in found]

    def _make_groups(self) -> None:
        note_group(self.home.name)
        for place in self._roots():
            place.mkdir()

    async def _remove_groups(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for file in (CGROUPS / "freezer" / self.home.name).rglob("freezer.state"):
            with contextlib.suppress(OSError):
                file.write_text("THAWED")  # frozen processes would not end
        left = [place for place in self._roots() if place.exists()]
        while left and time.monotonic() < deadline:
            for root in left:
                for place in (*sorted(root.rglob("*/"), reverse=True), root):
                    with contextlib.suppress(OSError):
                        place.rmdir()
            left = [place for place in left if place.exists()]
            await asyncio.sleep(0.02)


def _command(process: Path) -> list[bytes]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)
