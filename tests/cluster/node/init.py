"""Process 1 of a real node, in its own namespaces: `python -m tests.cluster.node.init FILE`.

It hides the machine (run directory, kubelet directory, sysctls that a kubelet writes), waits for
its network, starts containerd, imports the images, starts the kubelet, and reaps orphans. All
processes, mounts and links of the node end with it; `machine` removes the control groups. FILE is
JSON, see `Plan`.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

MS_BIND = 4096
START_SECONDS = 120.0
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Sysctls that a kubelet sets machine-wide; here it finds them set already."""
_libc = ctypes.CDLL(None, use_errno=True)


class Plan(msgspec.Struct, kw_only=True):
    """Configuration of the node."""

    home: str
    """Its directory on a disk, with `containerd.toml` and `kubelet.yaml`."""
    programs: list[str]
    """Directories with containerd, runc, the kubelet."""
    images: list[str]
    """Image archives to import into containerd."""
    link: str
    """Name of its network link, which is moved here after this process has started."""
    address: str
    """Address of the node, with prefix length."""
    gateway: str
    kubelet: list[str]
    """The kubelet's arguments."""


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {target}: {os.strerror(number)}")


def _hide(home: Path) -> None:
    # Some paths of kubelet and runtime are fixed and not configurable.
    _mount("tmpfs", "/run", "tmpfs")
    upper, work, settings = (home / name for name in ("var", "var.work", "kernel"))
    for place in (upper, work, settings):
        place.mkdir()
    _mount("overlay", "/var", "overlay", 0, f"lowerdir=/var,upperdir={upper},workdir={work}")
    for name, text in KERNEL.items():
        file = settings / name.replace("/", ".")
        file.write_text(text + "\n")
        _mount(str(file), f"/proc/sys/{name}", "", MS_BIND)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _connect(plan: Plan) -> None:
    deadline = time.monotonic() + START_SECONDS
    while plan.link not in (name for _, name in socket.if_nameindex()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"link {plan.link} did not appear")
        time.sleep(0.02)
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", plan.address, "dev", plan.link)
    _run("ip", "link", "set", plan.link, "up")
    _run("ip", "route", "add", "default", "via", plan.gateway)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _start(plan: Plan, name: str, *command: str) -> int:
    with (Path(plan.home) / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            env={"PATH": os.environ["PATH"], "HOME": plan.home},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ).pid


def _import_images(plan: Plan) -> None:
    daemon = f"{plan.home}/containerd.sock"
    deadline = time.monotonic() + START_SECONDS
    while not Path(daemon).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("containerd did not start")
        time.sleep(0.05)
    for archive in plan.images:
        _run("ctr", "-a", daemon, "-n", "k8s.io", "images", "import", archive)


def main() -> int:
    """Run the node until one of its daemons ends."""
    plan = msgspec.convert(json.loads(Path(sys.argv[1]).read_text()), Plan)
    os.environ["PATH"] = ":".join([*plan.programs, os.environ["PATH"]])
    _hide(Path(plan.home))
    _connect(plan)
    config = f"{plan.home}/containerd.toml"
    daemons = {_start(plan, "containerd", "containerd", "-c", config): "containerd"}
    _import_images(plan)
    daemons[_start(plan, "kubelet", "kubelet", *plan.kubelet)] = "kubelet"
    while True:
        pid, status = os.wait()
        if pid in daemons:
            code = os.waitstatus_to_exitcode(status)
            print(f"{daemons[pid]} ended with code {code}", flush=True)
            return 1


if __name__ == "__main__":
    sys.exit(main())
