"""A private containerd with one pod: its own directories, socket and image, nothing of the host's.

async with Containerd(tmp) as runtime:
    runtime.socket, runtime.pod_uid, runtime.image
"""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Self

from paddock.envd.tasks.cri import CriClient
from paddock.envd.tasks.cri_wire import CriError, get_text, map_entries
from tests.leaks import note_group

PROGRAMS = Path(os.environ.get("PADDOCK_TEST_CONTAINERD", "/var/cache/paddock/containerd/usr/bin"))
IMAGE = "paddock.test/busybox:1"
POD_UID = "9d0c2f4e-0000-4000-8000-000000000001"
START_SECONDS = 60.0
_POD = {1: "pod", 2: POD_UID, 3: "default"}
_HOST_NETWORK = {1: {1: 2}}
"""The pod uses the host's network, so that no CNI plugin is needed."""
_CONFIG = """
version = 2
root = "{home}/root"
state = "{home}/state"
[grpc]
  address = "{home}/containerd.sock"
[ttrpc]
  address = "{home}/ttrpc.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{home}/cni"
    conf_dir = "{home}/cni.d"
"""


def why_not() -> str | None:
    """Return why containerd cannot run here, or `None`."""
    if os.geteuid() != 0:
        return "containerd needs root"
    missing = [
        name for name in ("containerd", "ctr", "runc", "busybox") if not (PROGRAMS / name).is_file()
    ]
    return (
        f"{', '.join(missing)} not in {PROGRAMS}: run scripts/fetch-containerd" if missing else None
    )


class Containerd:
    """A containerd process with one pod."""

    image = IMAGE
    pod_uid = POD_UID

    def __init__(self) -> None:
        # Short, because socket paths of shims start with it.
        self.home = Path(tempfile.mkdtemp(prefix="pdc"))
        self.socket = str(self.home / "containerd.sock")
        self.cgroup = f"/{self.home.name}"
        note_group(self.home.name)
        """The cgroup of the pod, which a kubelet would create."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pod = ""

    async def __aenter__(self) -> Self:
        try:
            (self.home / "config.toml").write_text(_CONFIG.format(home=self.home, image=IMAGE))
            await self.start()
            archive = self.home / "image.tar"
            _write_image(archive)
            self.ctr("image", "import", str(archive))
            linux = {1: self.cgroup, 2: _HOST_NETWORK}
            config = {1: _POD, 6: map_entries({"io.kubernetes.pod.uid": POD_UID}), 8: linux}
            self._pod = get_text(await self.call("RunPodSandbox", {1: config}), 1)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pod:
            await self.call("StopPodSandbox", {1: self._pod})
            await self.call("RemovePodSandbox", {1: self._pod})
        self.stop()
        # Unmount what a failed start has left, so that rmtree does not enter it.
        with Path("/proc/self/mountinfo").open() as file:
            mounts = [
                line.split()[4] for line in file if line.split()[4].startswith(f"{self.home}/")
            ]
        for mount in sorted(mounts, reverse=True):
            subprocess.run(["umount", "-l", mount], check=False)
        groups = list(Path("/sys/fs/cgroup").glob(f"*{self.cgroup}"))
        # Shims exit shortly after their containers.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while self._is_left(groups):
                    await asyncio.sleep(0.1)
        # Remove empty directories only: another containerd may use them.
        for name in ("runc/k8s.io", "runc", "fifo", "s", ""):
            with contextlib.suppress(OSError):
                (Path("/run/containerd") / name).rmdir()

    def _is_left(self, groups: list[Path]) -> bool:
        """Remove unused files and cgroups of this test; return whether any remain."""
        shutil.rmtree(self.home, ignore_errors=True)
        for path in groups:
            with contextlib.suppress(OSError):
                path.rmdir()
        return self.home.exists() or any(path.exists() for path in groups)

    async def start(self) -> None:
        """Start or restart the daemon."""
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(PROGRAMS / "containerd"), "-c", str(self.home / "config.toml")],
                env=os.environ | {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        async with asyncio.timeout(START_SECONDS):
            while True:
                assert self._process.poll() is None, self.log()
                with contextlib.suppress(CriError):
                    await self.call("Version", {1: "v1"})
                    return
                await asyncio.sleep(0.1)

    def stop(self) -> None:
        """Stop the daemon; containers keep running."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)

    def log(self) -> str:
        return (self.home / "log").read_text()[-3000:]

    def ctr(self, *arguments: str) -> str:
        command = [str(PROGRAMS / "ctr"), "-a", self.socket, "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr + self.log()
        return done.stdout

    async def call(self, method: str, fields: dict) -> dict[int, list]:
        """Call a CRI method."""
        client = CriClient(self.socket)
        try:
            return await client.call(method, fields)
        finally:
            await client.close()

    async def containers(self) -> list[str]:
        """Return the names of all containers."""
        return self.ctr("containers", "ls", "-q").split()


def _write_image(path: Path) -> None:
    """Write an OCI archive with one layer: busybox and links for a shell script."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(PROGRAMS / "busybox", "bin/busybox")
        for name in ("sh", "sleep", "cat", "echo", "env"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        for name in ("tmp", "proc", "dev", "sys", "etc"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(directory)
    data = layer.getvalue()
    config = json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {"Entrypoint": ["/bin/sleep", "100000"], "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(data)]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "config": _described("application/vnd.oci.image.config.v1+json", config),
            "layers": [_described("application/vnd.oci.image.layer.v1.tar", data)],
        }
    ).encode()
    named = _described("application/vnd.oci.image.manifest.v1+json", manifest)
    named["annotations"] = {"io.containerd.image.name": IMAGE}
    index = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    with tarfile.open(path, "w") as tar:
        for name, content in (
            ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
            ("index.json", index),
            *((f"blobs/sha256/{_digest(item)[7:]}", item) for item in (data, config, manifest)),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _described(kind: str, data: bytes) -> dict:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}
