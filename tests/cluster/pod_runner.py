"""Process 1 of a fake pod: `python -m tests.cluster.pod_runner FILE`.

Runs in its own pid namespace, so that all processes end with it. The main container gets a mount
namespace with its own root (an overlay over the base image) and an unprivileged user; the sidecar
is the real program with the real configuration, and enters it. FILE is JSON, see `Plan`.

A line on standard input names an image: the main container is ended and restarted from it, as a
kubelet does, while the sidecar keeps running. An empty line ends the pod.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

CLONE_NEWNS = 0x00020000
MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Plan(msgspec.Struct, kw_only=True):
    """Configuration of one fake pod."""

    uid: str
    """Uid of the sandbox."""
    rootfs: str
    tools: str
    """Directory mounted as /.paddock in the main container."""
    state: str
    command: list[str]
    env: dict[str, str]
    sidecar: list[str]
    sidecar_env: dict[str, str]
    user_id: int = 1000
    binds: dict[str, str] = {}
    """Volumes: host directories by mount point in the main container."""
    image: str = ""
    """Written to /etc/image in the main container; all images have the same files otherwise."""
    started: str = ""
    """File with the image of the main container that was started last."""


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def _main_container(plan: Plan) -> None:
    """Become the main container's first process; never returns."""
    if _libc.unshare(CLONE_NEWNS) < 0:
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("none", "/", "", (1 << 18) | (1 << 14))  # private, recursively
    place = Path(plan.state) / "root"
    place.mkdir(exist_ok=True)
    _mount("tmpfs", str(place), "tmpfs")
    for name in ("upper", "work", "merged"):
        (place / name).mkdir()
    root = place / "merged"
    layers = f"lowerdir={plan.rootfs},upperdir={place}/upper,workdir={place}/work"
    _mount("overlay", str(root), "overlay", 0, layers)
    (root / "etc/image").write_text(plan.image)
    for source, target in {**plan.binds, plan.tools: "/.paddock"}.items():
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        _mount(source, str(root / target.lstrip("/")), "", 1 << 12)
    for name in ("proc", "dev"):
        _mount(f"/{name}", str(root / name), "", (1 << 12) | (1 << 14))
    (root / ".old").mkdir(exist_ok=True)
    os.chdir(root)
    if _libc.syscall(155, b".", b".old") < 0:  # pivot_root
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    _libc.umount2(b"/.old", MNT_DETACH)
    os.setgroups([])
    os.setresgid(plan.user_id, plan.user_id, plan.user_id)
    os.setresuid(plan.user_id, plan.user_id, plan.user_id)
    os.execve(plan.command[0], plan.command, {"PATH": "/usr/bin:/bin", **plan.env})


def _start_main(plan: Plan) -> int:
    main = os.fork()
    if main == 0:
        try:
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            signal.set_wakeup_fd(-1)
            _main_container(plan)
        except BaseException as error:
            sys.stderr.write(f"main container: {error!r}\n")
        os._exit(128)
    Path(plan.started).write_text(plan.image)
    return main


def _start_sidecar(plan: Plan) -> int:
    environment = {**os.environ, **plan.sidecar_env}
    return subprocess.Popen(plan.sidecar, env=environment, stdin=subprocess.DEVNULL).pid


def run(plan: Plan) -> int:
    """Start both containers; end with the main one, restart the sidecar when it ends."""
    wakeup_reader, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    main, sidecar = _start_main(plan), _start_sidecar(plan)
    listening = [wakeup_reader, 0]
    while True:
        ready, _, _ = select.select(listening, [], [])
        if wakeup_reader in ready:
            os.read(wakeup_reader, 1024)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == main:
                return os.waitstatus_to_exitcode(ended[1]) & 0xFF
            if ended[0] == sidecar:
                time.sleep(0.2)
                sidecar = _start_sidecar(plan)
        if 0 in ready:
            order = os.read(0, 4096)
            if not order:
                listening = [wakeup_reader]
                continue
            os.kill(main, signal.SIGTERM)
            _, status = os.waitpid(main, 0)
            if not (image := order.decode().strip()):
                return os.waitstatus_to_exitcode(status) & 0xFF
            plan.image = image
            main = _start_main(plan)


if __name__ == "__main__":
    sys.exit(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)))
