"""The cost of an envd: start, commands beside bare exec, throughput, memory of many.

    python bench/envd.py [--quick] [--envds 50] [--megabytes 512]

Real processes: a zygote, envds forked from it, commands through a real init where one can be built.
The floor is fork and exec of the same command, and `cp` for bytes.
"""

import argparse
import array
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import paddock
from paddock.envd.process.init_client import take_channel
from reporting import Report

START = {"process": {"cmd": "/bin/true"}, "stdin": False}


class Zygote:
    def __init__(self) -> None:
        self.peer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paddock.envd.zygote.start", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self.pidfds: list[int] = []
        self.peer.sendall(b'{"op":"ping"}')
        self.peer.recv(999)

    def fork(self, directory: Path, name: str, init: socket.socket | None = None) -> int:
        config = {
            "sandbox_id": name,
            "identity_dir": None,
            "passwd_path": str(directory / "passwd"),
            "group_path": str(directory / "passwd"),
        }
        path = directory / f"{name}.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        fds = {"listener": listener.fileno()}
        if init is not None:
            fds["init"] = init.fileno()
        message = {"op": "start", "id": name, "config": config, "fds": list(fds)}
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))]
        self.peer.sendmsg([json.dumps(message).encode()], rights)
        listener.close()
        return 0

    def reply(self) -> int:
        data, fds, _, _ = socket.recv_fds(self.peer, 65536, 4)
        message = json.loads(data)
        if message["op"] != "started":
            raise SystemExit(f"envd did not start: {message}")
        self.pidfds += fds
        return int(message["pid"])

    def close(self) -> None:
        for pidfd in self.pidfds:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self.peer.close()
        self.process.wait()


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return sock


def health(path: Path) -> None:
    with connect(path) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        if not sock.recv(4096).startswith(b"HTTP/1.1 204"):
            raise SystemExit("envd is not well")


def run_command(sock: socket.socket) -> None:
    payload = json.dumps(START).encode()
    body = b"\0" + len(payload).to_bytes(4, "big") + payload
    sock.sendall(
        b"POST /process.Process/Start HTTP/1.1\r\nContent-Type: application/connect+json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    got = b""
    while not got.endswith(b"0\r\n\r\n"):
        got += sock.recv(65536)
    if b"exit status 0" not in got:
        raise SystemExit(f"the command failed: {got!r}")


def times(action: Callable[[], object], count: int) -> list[float]:
    taken: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return taken


def upload(path: Path, megabytes: int) -> float:
    block = os.urandom(1 << 20)
    with connect(path) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        began = time.perf_counter()
        sock.sendall(
            b"POST /files?path=big HTTP/1.1\r\nContent-Type: application/octet-stream\r\n"
            b"Content-Length: %d\r\n\r\n" % (megabytes << 20)
        )
        for _ in range(megabytes):
            sock.sendall(block)
        answer = sock.recv(4096)
        if b" 200 " not in answer:
            raise SystemExit(f"upload failed: {answer!r}")
        return megabytes / (time.perf_counter() - began)


def upload_form(path: Path, megabytes: int) -> float:
    block = os.urandom(1 << 20)
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="big"\r\n\r\n'
    tail = b"\r\n--b--\r\n"
    with connect(path) as sock:
        began = time.perf_counter()
        sock.sendall(
            b"POST /files HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: %d\r\n\r\n%b" % ((megabytes << 20) + len(head) + len(tail), head)
        )
        for _ in range(megabytes):
            sock.sendall(block)
        sock.sendall(tail)
        answer = sock.recv(4096)
        if b" 200 " not in answer:
            raise SystemExit(f"upload failed: {answer!r}")
        return megabytes / (time.perf_counter() - began)


def download(path: Path, megabytes: int) -> float:
    buffer = bytearray(1 << 20)
    with connect(path) as sock:
        began = time.perf_counter()
        sock.sendall(b"GET /files?path=big HTTP/1.1\r\n\r\n")
        left = megabytes << 20
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(65536)
        left -= len(head.partition(b"\r\n\r\n")[2])
        while left:
            left -= sock.recv_into(buffer)
        return megabytes / (time.perf_counter() - began)


def copy_speed(directory: Path) -> float:
    """The floor: cp of the same file, through the page cache."""
    size = (directory / "home/big").stat().st_size
    began = time.perf_counter()
    subprocess.run(["cp", directory / "home/big", directory / "home/copy"], check=True)
    took = time.perf_counter() - began
    (directory / "home/copy").unlink()
    return size / (1 << 20) / took


def proportional_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def start_init(directory: Path) -> tuple[subprocess.Popen[bytes], socket.socket] | None:
    source = Path(paddock.__file__).parent / "runtime/local/launch/native/init/init.c"
    program = directory / "init"
    if os.geteuid() != 0 or not source.exists():
        return None
    subprocess.run(["gcc", "-static", "-Os", "-o", program, source], check=True)
    process = subprocess.Popen([program, "sudo"])
    pidfd = os.pidfd_open(process.pid)
    for _ in range(500):
        try:
            return process, take_channel(pidfd)
        except OSError:
            time.sleep(0.005)
    raise SystemExit("init did not come up")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--envds", type=int, default=50)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--commands", type=int)
    parser.add_argument("--directory", default=None)


def main() -> None:
    report = Report("envd", __doc__, options)
    given = report.given
    with tempfile.TemporaryDirectory(dir=given.directory) as scratch:
        directory = Path(scratch)
        (directory / "home").mkdir()
        uid, gid = os.geteuid(), os.getegid()
        (directory / "passwd").write_text(f"user:x:{uid}:{gid}::{directory}/home:/bin/sh\n")
        began = time.perf_counter()
        zygote = Zygote()
        report.figure("zygote_start_ms", (time.perf_counter() - began) * 1000)
        try:
            forks(report, zygote, directory, given.envds)
            init = start_init(directory)
            if init is None:
                report.absent("init", "commands are started by envd itself: no root, or no source")
            zygote.fork(directory, "commands", init[1] if init else None)
            zygote.reply()
            target = directory / "commands.sock"
            commands(report, target, given.commands or (100 if report.is_quick else 500))
            throughput(report, target, given.megabytes or (128 if report.is_quick else 512))
        finally:
            zygote.close()
        if init is not None:
            init[1].close()
            init[0].kill()
            init[0].wait()
    report.finish()


def forks(report: Report, zygote: Zygote, directory: Path, count: int) -> None:
    number = iter(range(10_000))

    def fork_and_answer() -> None:
        name = f"e{next(number)}"
        zygote.fork(directory, name)
        health(directory / f"{name}.sock")

    report.spread("fork_to_answer", times(fork_and_answer, count))
    pids = [zygote.reply() for _ in range(count)]
    pss = [proportional_kib(pid) for pid in pids]
    report.figure("pss_per_envd_mb", statistics.mean(pss) / 1024, f"mean of {len(pss)}")
    report.figure("zygote_pss_mb", proportional_kib(zygote.process.pid) / 1024)


def commands(report: Report, target: Path, count: int) -> None:
    with connect(target) as sock:
        run_command(sock)
        report.spread("command", times(lambda: run_command(sock), count))
    bare = times(lambda: subprocess.run(["/bin/true"], check=True, capture_output=True), count)
    report.spread("bare_exec", bare)
    report.against("command", ["bare_exec"])
    report.against("fork_to_answer", ["bare_exec"])


def throughput(report: Report, target: Path, megabytes: int) -> None:
    for name, move in (("upload", upload), ("upload_form", upload_form), ("download", download)):
        report.figure(f"{name}_mb_s", max(move(target, megabytes) for _ in range(3)), "best of 3")
    report.figure("copy_mb_s", max(copy_speed(target.parent) for _ in range(3)), "best of 3")
    for name in ("upload", "upload_form", "download"):
        report.ratio(f"{name}_to_copy", f"{name}_mb_s", "copy_mb_s")


if __name__ == "__main__":
    main()
