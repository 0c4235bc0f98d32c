"""Test whether a CRIU binary works on this kernel.

The version is not enough: CRIU 4.1 passes its own `check` on kernels where it fails at the first
TCP socket. So a small process with a listening socket, an established connection and a timer is
dumped and restored, and must continue counting. This happens in a separate network namespace:
between dump and restore another process of the machine could take the ports of the connection.

Standard library only, so that it also runs before Paddock is installed:

    python3 probe.py /path/to/criu        # exit status 0 and "ok", or 1 and the reason
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEFAULT_CACHE = Path("/var/cache/paddock/criu")
PATH_VARIABLE = "PADDOCK_CRIU"
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_SUBJECT = """
import os, signal, socket, time
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
count = 0
os.write(1, b"r")
os.close(1)
os.open("/dev/null", os.O_RDWR)
while True:
    client.sendall(b"x")
    assert server.recv(1) == b"x"
    count += 1
    with open("count.tmp", "w") as f:
        f.write(str(count))
    os.rename("count.tmp", "count")
    time.sleep(0.01)
"""


def candidates(cache: Path = DEFAULT_CACHE) -> list[Path]:
    """List CRIU binaries, best first: configured, built by `scripts/build-criu`, installed."""
    found: list[Path] = []
    if named := os.environ.get(PATH_VARIABLE):
        found.append(Path(named))
    with contextlib.suppress(OSError):
        found += sorted(cache.glob("*/criu"), key=_version_of, reverse=True)
    if installed := shutil.which("criu", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"):
        found.append(Path(installed))
    return [path for path in found if os.access(path, os.X_OK)]


def find_criu(cache: Path = DEFAULT_CACHE) -> tuple[Path | None, str]:
    """Return the first CRIU that works, or `None` and the reason."""
    if os.geteuid() != 0:
        return None, "checkpoints need root"
    reasons: list[str] = []
    for path in candidates(cache):
        reason = probe(path)
        if reason is None:
            return path, "ok"
        reasons.append(f"{path}: {reason}")
    return None, "; ".join(reasons) or "CRIU is not installed"


def probe(criu: Path, *, seconds: float = 20.0) -> str | None:
    """Dump and restore a process with a TCP connection to itself; return the error, if any."""
    # In a thread: it and its children stay in the new network namespace.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="criu-probe") as apart:
        return apart.submit(_probe_in_netns, criu, seconds).result()


def _probe_in_netns(criu: Path, seconds: float) -> str | None:
    try:
        _enter_new_netns()
    except OSError as error:
        return f"cannot create a network namespace for the probe: {error}"
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="paddock-criu-probe-") as name:
        work = Path(name)
        images = work / "images"
        images.mkdir()
        subject = _start_subject(work, deadline)
        if subject is None:
            return "the process to dump did not start"
        restored = 0
        try:
            if failure := _run(criu, "dump", ["-t", str(subject.pid)], images, deadline):
                return failure
            subject.wait(timeout=max(0.1, deadline - time.monotonic()))
            before = _count(work)
            pidfile = work / "pid"
            options = ["--restore-detached", "--pidfile", str(pidfile)]
            if failure := _run(criu, "restore", options, images, deadline):
                return failure
            restored = int(pidfile.read_text())
            return _wait_for_progress(work, before, deadline)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for pid in {subject.pid if subject.poll() is None else 0, restored} - {0}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if subject.poll() is None:
                subject.wait(timeout=5)


def _enter_new_netns() -> None:
    """Move the calling thread to a new network namespace and bring up loopback."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _start_subject(work: Path, deadline: float) -> subprocess.Popen[bytes] | None:
    # CRIU requires that the root of a tree is a session leader without files outside.
    subject = subprocess.Popen(
        [sys.executable or "python3", "-I", "-S", "-c", _SUBJECT],
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    out = subject.stdout
    if out is None:
        return None
    ready, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
    started = bool(ready) and os.read(out.fileno(), 1) == b"r"
    out.close()
    if not started:
        subject.kill()
        subject.wait(timeout=5)
        return None
    return subject


def _run(criu: Path, verb: str, extra: list[str], images: Path, deadline: float) -> str | None:
    log = f"{verb}.log"
    try:
        done = subprocess.run(
            [
                str(criu),
                verb,
                "-D",
                str(images),
                "--shell-job",
                "--tcp-established",
                "--network-lock",
                "skip",
                "--manage-cgroups=ignore",
                "-v1",
                "-o",
                log,
                *extra,
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(1.0, deadline - time.monotonic()),
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{verb}: {error}"
    if done.returncode == 0:
        return None
    return f"{verb} failed: {_last_errors(images / log, done.stderr)}"


def _last_errors(log: Path, stderr: bytes) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return (
        " | ".join(lines[:3]) or stderr.decode(errors="replace").strip()[-300:] or "no reason given"
    )


def _count(work: Path) -> int:
    try:
        return int((work / "count").read_text())
    except (OSError, ValueError):
        return 0


def _wait_for_progress(work: Path, before: int, deadline: float) -> str | None:
    while time.monotonic() < deadline:
        if _count(work) > before + 2:
            return None
        time.sleep(0.005)
    return "the restored process does not continue"


def _version_of(path: Path) -> tuple[int, ...]:
    parts = path.parent.name.replace("-", ".").split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def main(arguments: list[str]) -> int:
    """Probe the given CRIU, or find one."""
    if arguments:
        reason = probe(Path(arguments[0]))
        sys.stdout.write(f"{reason or 'ok'}\n")
        return 1 if reason else 0
    path, reason = find_criu()
    sys.stdout.write(f"{path or reason}\n")
    return 0 if path else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
