"""A real node for a test cluster: kubelet, containerd and runc, in namespaces of their own.

async with RealNode(cluster, archives, pause="localhost/pause:1") as node:
    ...  # pods are scheduled, run, and are reached by their addresses

The node has its own processes, mounts and network: one link joins it to this machine, a route
leads to its pods, and a forwarder at the link's near end leads to the API server on loopback.
What its kernel objects do not take with them are control groups; those are removed here.
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
from tests.on_cluster.world.proxy import Road

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


def look() -> None:
    """Raise `BinariesMissingError` where a node cannot run."""
    directory_with(["kubelet"], build=False)
    missing = [
        str(path)
        for path in (PROGRAMS / "containerd", PROGRAMS / "runc", PLUGINS / "ptp")
        if not path.is_file()
    ]
    if missing:
        raise BinariesMissingError(f"no {missing[0]}: run scripts/fetch-containerd")


class NodeError(Exception):
    """The node did not come up; the message ends with what its daemons said."""


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
        """Whether pods reach Services, by name too, and policies are enforced."""
        self._archives = archives
        self._pause = pause
        self.home = Path(tempfile.mkdtemp(prefix="pdn"))
        mark = random.Random().randrange(64 * 256)
        self._net = f"100.{64 + mark // 256}.{mark % 256}"
        """Three numbers of carriers' addresses: .0/25 are pods, .128/30 is the link."""
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
            road = Road(int(self._cluster.info.server.rpartition(":")[2]))
            await self._stack.enter_async_context(road.run(f"{self._net}.129"))
            self._write_access(f"https://{self._net}.129:{road.port}")
            self._begin()
            if self._has_services:
                await self._stack.enter_async_context(self._services(road.port).run())
            await self._until_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # and with it, by the kernel, everything of the node
            await asyncio.to_thread(self._process.wait)
        await self._stack.aclose()
        subprocess.run(["ip", "link", "delete", self._link], check=False, capture_output=True)
        await self._remove_groups()
        with contextlib.suppress(RefusedError, OSError):
            self._cluster.info.request("DELETE", f"/api/v1/nodes/{NAME}")
        await asyncio.to_thread(shutil.rmtree, self.home, ignore_errors=True)

    # ---- its world -----------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the node's first process and give it its link."""
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
        # Should this process be killed, the kernel ends the node too.
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
        """Of a process that is in the node's network."""
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
        """Give the ends of what its processes said."""
        tails = []
        for name in ("node", "containerd", "kubelet"):
            with contextlib.suppress(OSError):
                text = (self.home / f"{name}.log").read_text(errors="replace")
                tails.append(f"--- {name}\n" + "\n".join(text.splitlines()[-25:]))
        return "\n".join(tails)

    # ---- its pods ------------------------------------------------------------------------

    def processes(self, pod_uid: str) -> list[Path]:
        """Give the processes of a pod, as directories of /proc."""
        pids: set[str] = set()
        for place, _, _ in os.walk(find_cgroup(pod_uid)):  # which passes over what is just going
            with contextlib.suppress(OSError):
                pids |= set((Path(place) / "cgroup.procs").read_text().split())
        return [Path("/proc") / pid for pid in pids]

    def process_states(self, pod_uid: str) -> list[str]:
        """Give the state of each process of a pod, as the kernel names it."""
        states: list[str] = []
        for place in self.processes(pod_uid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                states.append((place / "stat").read_text().rpartition(")")[2].split()[0])
        return states

    def processes_of(self, pod_uid: str, word: bytes) -> list[Path]:
        """Give the processes of a pod that have a word in what they were started with."""
        try:
            found = self.processes(pod_uid)
        except NotFoundError:
            return []
        return [place for place in found if word in b" ".join(_command(place))]

    def end_main_container(self, pod_uid: str) -> None:
        """Kill the process that is a pod's main container."""
        [main] = [
            place for place in self.processes(pod_uid) if _command(place)[0] == names.HOLD.encode()
        ]
        os.kill(int(main.name), signal.SIGKILL)

    def granted(self, pod_uid: str) -> tuple[float, int]:
        """Say how many processors and how much memory the kernel lets a pod have."""
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
        """Give a volume on this node, which any claim may have."""
        place = self.home / "volumes" / name
        place.mkdir(parents=True)
        os.chown(place, 1000, 1000)  # nobody sets the owner of what is the node's
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

    # ---- its settings --------------------------------------------------------------------

    def _write_settings(self) -> None:
        known = {"home": self.home, "pause": self._pause, "plugins": PLUGINS}
        (self.home / "containerd.toml").write_text(_CONTAINERD.format(**known))
        (self.home / "cni").mkdir()
        # A link for each pod: what goes from one to another passes the node's packet filter.
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
            # The disk is the machine's, and full or not is no business of this node's.
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

    # ---- its control groups --------------------------------------------------------------

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
                file.write_text("THAWED")  # or those in it would not end
        left = [place for place in self._roots() if place.exists()]
        while left and time.monotonic() < deadline:
            for root in left:
                for place in (*sorted(root.rglob("*/"), reverse=True), root):
                    with contextlib.suppress(OSError):
                        place.rmdir()
            left = [place for place in left if place.exists()]
            await asyncio.sleep(0.02)


def _command(process: Path) -> list[bytes]:
    """Give what a process was started with; of one that is gone, nothing."""
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)
