"""The speed of the local runtime, beside its floor.

    python bench/runtime.py [--quick] [--rounds 40] [--many 200] [--first]

Starts a node of its own, measures, removes everything. The last line is one JSON object. The floor
(bare fork+exec, and bwrap, crun, podman where they are installed) is measured in the same run.
`cold` is without any parked sandbox; the node's spare envds are there in both cases.

`--first` is for machines on which others work as well: it puts this and the node's processes before
theirs. `nice` alone does not, where the kernel groups processes by session (`sched_autogroup`).
"""

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import floors
from floors import Command
from reporting import ROOT, Report

sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.runtime.local.inside import run  # noqa: E402
from tests.runtime.local.nodes import TestNode, eventually  # noqa: E402

from paddock.runtime.port import AgentConfig, Blueprint, Instance, Limits  # noqa: E402


class Reach:
    """A kept connection costs a client nothing; a first caller opens a new one."""

    @staticmethod
    async def health(instance: Instance) -> None:
        assert instance.address.envd is not None
        reader, writer = await asyncio.open_unix_connection(instance.address.envd[5:])
        writer.write(b"GET /health HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n")
        line = await reader.readline()
        writer.close()
        assert b"204" in line, line


def floor(report: Report, rounds: int) -> None:
    """Measure the time of alternatives for `true`."""

    def measure(name: str, alternative: AbstractContextManager[Command], count: int) -> None:
        samples = []
        try:
            with alternative as command:
                for _ in range(count):
                    began = time.perf_counter()
                    floors.run(command(["/bin/true"]))
                    samples.append(time.perf_counter() - began)
        except floors.AbsentError as error:
            report.absent(f"floor_{name}", str(error))
        else:
            report.spread(f"floor_{name}", samples)

    measure("fork_exec", started_by(), rounds)
    bwrap = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    measure("bwrap", started_by(*bwrap), rounds)
    measure("unshare", started_by("unshare", "-Urmpnuif", "--mount-proc"), rounds)
    measure("podman_run", floors.podman(), max(3, rounds // 10))
    measure("crun", floors.crun(), max(5, rounds // 4))


@contextlib.contextmanager
def started_by(*words: str) -> Generator[Command]:
    """Commands that follow the words of a program, on the files of this machine."""
    if words:
        floors.program(words[0])
    yield lambda inner, stays=False: [*words, *inner]


async def started(*arguments: str) -> TestNode:
    """Start a node, with priority if requested."""
    node = TestNode(*arguments)
    await node.start()
    if "--first" in sys.argv:
        facts = await node.facts()
        for pid in (os.getpid(), facts["pid"], facts["launcher"], facts["zygote"]):
            os.setpriority(os.PRIO_PROCESS, pid, -20)
            with contextlib.suppress(FileNotFoundError):
                Path(f"/proc/{pid}/autogroup").write_text("-20")
        with contextlib.suppress(FileNotFoundError):
            group = Path(f"/sys/fs/cgroup/cpu/paddock-{facts['node_id']}")
            (group / "cpu.shares").write_text("200000")
    return node


async def creation(node: TestNode, name: str, rounds: int, *, parked: int) -> list[float]:
    """Create and reach one after the other; each waits until the stock is full again."""
    samples = []

    async def is_stocked() -> bool:
        facts = await node.facts()
        return facts["warm_sandboxes"] >= parked // 2

    for number in range(rounds):
        await asyncio.sleep(0.05)
        if number:
            await eventually(is_stocked, pause=0.05)
        # With an owner, like every sandbox that is created on demand.
        wanted = blueprint(f"{name}{number}", agent=AgentConfig(sandbox_id=f"{name}{number}"))
        began = time.perf_counter()
        instance = await node.runtime.create(wanted)
        await Reach.health(instance)
        samples.append(time.perf_counter() - began)
        await node.runtime.destroy(instance.uid)
    return samples


def blueprint(uid: str, **changes: Any) -> Blueprint:
    return Blueprint(uid=uid, image="host", **changes)


async def cold_and_parked(report: Report, rounds: int) -> None:
    for name, parked in (("cold", 0), ("parked", 8)):
        node = await started("--warm-count", str(parked))
        try:
            await creation(node, "warm", 3, parked=parked)
            samples = await creation(node, name, rounds, parked=parked)
            report.spread(f"create_to_envd_{name}", samples)
        finally:
            await node.stop()


async def commands(report: Report, node: TestNode, rounds: int) -> None:
    instance = await node.runtime.create(blueprint("cmd"))
    pid = (await node.facts())["inits"]["cmd"]
    await run(instance, "true")
    ours, bare = [], []
    enter = [
        "nsenter",
        "-t",
        str(pid),
        "-U",
        "-m",
        "-n",
        "-p",
        "-i",
        "-u",
        "/bin/bash",
        "-c",
        "true",
    ]
    for _ in range(rounds):
        began = time.perf_counter()
        await run(instance, "true")
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        subprocess.run(enter, check=True)
        bare.append(time.perf_counter() - began)
    await node.runtime.destroy("cmd")
    report.spread("command_through_envd", ours)
    report.spread("command_by_nsenter", bare)


async def pauses(report: Report, node: TestNode, rounds: int) -> None:
    instance = await node.runtime.create(blueprint("pause"))
    await run(instance, "sleep 1000 >/dev/null 2>&1 & sleep 1000 >/dev/null 2>&1 &")
    freeze, thaw = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        await node.runtime.freeze("pause")
        middle = time.perf_counter()
        await node.runtime.thaw("pause")
        thaw.append(time.perf_counter() - middle)
        freeze.append(middle - began)
    await node.runtime.destroy("pause")
    report.spread("freeze", freeze)
    report.spread("thaw", thaw)


async def keeping(report: Report, node: TestNode, rounds: int) -> None:
    able = await node.runtime.capabilities()
    if not able.can_checkpoint:
        report.absent("hibernate_30mb", able.reasons.get("can_checkpoint", "there is no CRIU"))
        return
    instance = await node.runtime.create(blueprint("keep", limits=Limits(memory_bytes=1 << 30)))
    hog = 'import time; x = bytearray(b"x" * (30 << 20)); time.sleep(1e6)'
    await run(instance, f"/usr/bin/python3 -c '{hog}' >/dev/null 2>&1 & sleep 1")
    down, up = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        await node.runtime.hibernate("keep")
        middle = time.perf_counter()
        await node.runtime.restore("keep")
        up.append(time.perf_counter() - middle)
        down.append(middle - began)
    report.spread("hibernate_30mb", down)
    report.spread("restore_30mb", up)
    began = time.perf_counter()
    made = await node.runtime.fork("keep", tuple(blueprint(f"fork{n}") for n in range(20)))
    report.figure("fork_20_wall_s", time.perf_counter() - began)
    for one in made:
        assert isinstance(one, Instance), made
        await node.runtime.destroy(one.uid)
    await node.runtime.destroy("keep")


def kernel_bytes() -> int:
    """Kernel memory: slabs, page tables, stacks, per-CPU memory."""
    text = Path("/proc/meminfo").read_text()
    names = ("Slab:", "PageTables:", "KernelStack:", "Percpu:")
    return sum(int(text.split(name)[1].split()[0]) * 1024 for name in names)


def pss(pids: Iterable[int]) -> int:
    """Memory of processes: private and their share of common pages."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(text.split("Pss:")[1].split()[0]) * 1024
    return total


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


async def many(report: Report, node: TestNode, count: int) -> None:
    facts = await node.facts()
    workers = {"node": facts["pid"], "launcher": facts["launcher"]}
    await asyncio.sleep(1)
    before = kernel_bytes()
    used = {name: cpu_seconds(pid) for name, pid in workers.items()}
    some = asyncio.Semaphore(8)

    async def make(number: int) -> Instance:
        async with some:
            return await node.runtime.create(blueprint(f"many{number}"))

    began = time.perf_counter()
    made = await asyncio.gather(*(make(n) for n in range(count)))
    wall = time.perf_counter() - began
    cpu = {
        f"cpu_ms_per_creation_{name}": 1e3 * (cpu_seconds(pid) - used[name]) / count
        for name, pid in workers.items()
    }
    await asyncio.sleep(2)
    kernel = (kernel_bytes() - before) / count
    uids = {instance.uid for instance in made}

    async def processes(kind: str) -> list[int]:
        found = (await node.facts())[kind]
        return [pid for uid, pid in found.items() if uid in uids]

    inits = pss(await processes("inits")) / count
    for instance in made:
        await Reach.health(instance)
    await asyncio.sleep(2)
    kernel_served = (kernel_bytes() - before) / count
    envds = pss(await processes("envds")) / count
    began = time.perf_counter()
    await asyncio.gather(*(node.runtime.destroy(i.uid) for i in made))
    ended = time.perf_counter() - began
    figures = {
        "up_at_once": count,
        "creations_per_second": count / wall,
        **cpu,
        "idle_mb_without_envd": (inits + kernel) / 1e6,
        "idle_mb_with_envd": (inits + envds + kernel_served) / 1e6,
        "idle_mb_init_pss": inits / 1e6,
        "idle_mb_envd_pss": envds / 1e6,
        "idle_mb_kernel": kernel / 1e6,
        "idle_mb_kernel_with_envd": kernel_served / 1e6,
        "destructions_per_second": count / ended,
    }
    for name, value in figures.items():
        report.figure(name, value)


def post(path: str, head: bytes, payload: bytes) -> bytes:
    """Send a request at full speed: no event loop, no copies."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(head)
        client.sendall(payload)
        answer = b""
        while chunk := client.recv(1 << 16):
            answer += chunk
        return answer


def get(path: str, head: bytes) -> int:
    """Read an answer at full speed; return its size."""
    room = bytearray(1 << 20)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(head)
        size = 0
        while got := client.recv_into(room):
            size += got
        return size


async def transfer(report: Report, node: TestNode, times: int = 3) -> None:
    """Upload and download 128 MiB, each a few times; dd in the sandbox is the floor of a write."""
    instance = await node.runtime.create(blueprint("files", limits=Limits(disk_bytes=0)))
    payload = b"x" * (128 << 20)
    assert instance.address.envd is not None
    envd = instance.address.envd[5:]
    upload = (
        "POST /files?path=/tmp/big&username=root HTTP/1.1\r\nHost: s\r\n"
        "Content-Type: application/octet-stream\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    ).encode()
    download = (
        b"GET /files?path=/tmp/big&username=root HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n"
    )
    rates: dict[str, list[float]] = {"floor_dd": [], "upload": [], "download": []}

    def note(name: str, began: float) -> None:
        rates[name].append(len(payload) / 1e6 / (time.perf_counter() - began))

    for _ in range(times):
        began = time.perf_counter()
        await run(instance, "dd if=/dev/zero of=/tmp/floor bs=1M count=128 2>/dev/null")
        note("floor_dd", began)
        began = time.perf_counter()
        answer = await asyncio.to_thread(post, envd, upload, payload)
        note("upload", began)
        assert b" 200 " in answer.split(b"\r\n")[0], answer[:300]
        began = time.perf_counter()
        size = await asyncio.to_thread(get, envd, download)
        note("download", began)
        assert size > len(payload), size
        await run(instance, "rm /tmp/floor /tmp/big; sync -f /tmp")
    await node.runtime.destroy("files")
    for name, them in rates.items():
        report.figure(f"{name}_mb_per_s", statistics.median(them), f"median of {len(them)}")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="40, or 15 for a look")
    parser.add_argument("--many", type=int, help="how many at once; 200, or 40 for a look")
    parser.add_argument("--first", action="store_true", help="before all others on this machine")


async def main() -> None:
    if os.geteuid() != 0:
        sys.exit("bench/runtime.py needs root")
    report = Report("runtime", __doc__, options)
    rounds = report.given.rounds or (15 if report.is_quick else 40)
    floor(report, rounds)
    await cold_and_parked(report, rounds)
    node = await started()
    try:
        await commands(report, node, rounds)
        await pauses(report, node, rounds)
        await transfer(report, node)
        await keeping(report, node, max(5, rounds // 2))
        await many(report, node, report.given.many or (40 if report.is_quick else 200))
    finally:
        await node.stop()
    report.ratio("command_envd_to_nsenter", "command_through_envd", "command_by_nsenter")
    report.against("create_to_envd_parked", ["floor_fork_exec"])
    report.against("create_to_envd_cold", ["floor_bwrap", "floor_crun", "floor_podman_run"])
    report.finish()


asyncio.run(main())
