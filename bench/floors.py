"""Alternatives measured in the same run: the time until a command's output is read.

Each alternative is a context that gives a way to run a command in it; leaving it removes whatever
still runs. Root filesystems are our base image, so that all of them start the same bash.
`measure` takes the starts of all of them into a report, `together` starts many at once, `held`
keeps many running. What is not installed, or does not run here, raises `AbsentError` with the
reason. OpenSandbox's server is in `opensandbox.py`.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reporting import Report

CACHE = Path(os.environ.get("PADDOCK_CACHE", "/var/cache/paddock"))
CRIU = sorted(map(str, CACHE.glob("criu/*/")))
"""Where `scripts/build-criu` installs CRIU: podman checkpoints with it."""
ENVIRONMENT = {
    "PATH": ":".join(("/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", *CRIU)),
    "HOME": "/root",
    "TMPDIR": tempfile.gettempdir(),
}
"""A minimal environment, so that no profile is counted to the floor, with the mark by which leaks
are found; containers have it too.
"""
HIDE_UNIFIED = "mountpoint -q /sys/fs/cgroup/unified && umount /sys/fs/cgroup/unified"
"""crun refuses the hybrid layout of cgroups; hidden, it works without."""
HELLO = ("/bin/bash", "-l", "-c", "echo hello")
SLEEP = ("/bin/sleep", "1000")
LABEL = "paddock-bench"

Command = Callable[..., list[str]]
"""Returns the argv to run a command inside; with `stays=True` in the background."""


class AbsentError(Exception):
    """The alternative is not available, and why."""


def rootfs() -> Path | None:
    """Return our base image: the newest, if recipes have changed."""
    found = CACHE.glob("images/base-*/rootfs")
    return max(found, key=lambda path: path.parent.stat().st_mtime, default=None)


def program(name: str) -> str:
    """Return a program on the path, or from `scripts/install-rivals`."""
    found = shutil.which(name) or shutil.which(name, path=CACHE / "rivals" / "bin")
    if found is None:
        raise AbsentError("not installed: scripts/install-rivals")
    return found


def image(name: str) -> Path:
    """Return our base image, if the program that needs it is installed."""
    found = rootfs()
    if found is None:
        raise AbsentError("there is no base image; `paddock up` makes it")
    program(name)
    return found


def run(command: Sequence[str | Path], **options) -> str:
    """Run a command; `AbsentError` with its last output if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=ENVIRONMENT, **options
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise AbsentError(f"it does not run here: {said[-1]}")
    return done.stdout


# ---- the alternatives ------------------------------------------------------------------------


@contextlib.contextmanager
def bare_exec() -> Generator[Command]:
    """Fork and exec of the image's own shell, with no isolation at all: the floor."""
    with copy_of(image("chroot")) as copy:
        yield lambda inner, stays=False: ["chroot", str(copy), *inner]


@contextlib.contextmanager
def copy_of(root: Path) -> Generator[Path]:
    """Yield a temporary overlay of the image: even a trivial shell writes to it."""
    with tempfile.TemporaryDirectory(prefix="paddock-floor-") as directory:
        home = Path(directory)
        for name in ("upper", "work", "merged"):
            (home / name).mkdir()
        layers = f"lowerdir={root},upperdir={home}/upper,workdir={home}/work"
        merged = home / "merged"
        run(["mount", "-t", "overlay", "overlay", "-o", layers, merged])
        try:
            run(["mount", "--bind", "/dev", merged / "dev"])
            yield merged
        finally:
            subprocess.run(["umount", "-R", merged], check=True)


@contextlib.contextmanager
def bwrap() -> Generator[Command]:
    """bubblewrap with every namespace, the image read-only."""
    root = image("bwrap")
    binds = ["--ro-bind", str(root), "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    yield lambda inner, stays=False: ["bwrap", "--unshare-all", "--die-with-parent", *binds, *inner]


@contextlib.contextmanager
def hidden() -> Generator[list[str]]:
    """Return the command prefix that hides the unified half of cgroups."""
    script = f"{HIDE_UNIFIED}; echo ready; exec sleep infinity"
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as keeper:
        try:
            assert keeper.stdout is not None
            keeper.stdout.readline()
            yield ["nsenter", f"--mount=/proc/{keeper.pid}/ns/mnt"]
        finally:
            keeper.kill()


@contextlib.contextmanager
def crun() -> Generator[Command]:
    """An OCI runtime without an engine; the image read-only, no network, no limits."""
    root = image("crun")
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="paddock-crun-") as directory, hidden() as inside:
        home = Path(directory)
        run(["crun", "spec"], cwd=home)
        spec = json.loads((home / "config.json").read_text())
        spec["root"] = {"path": str(root), "readonly": True}
        spec["linux"].pop("resources", None)
        spec["mounts"] = [item for item in spec["mounts"] if item["type"] != "cgroup"]
        program = [*inside, "crun", "--root", str(home / "state")]

        def command(inner: Sequence[str], *, stays: bool = False) -> list[str]:
            bundle = home / f"bundle-{abs(hash(tuple(inner)))}"
            if not bundle.exists():
                bundle.mkdir()
                spec["process"] |= {"terminal": False, "args": list(inner), "rlimits": []}
                spec["process"]["env"].append(f"TMPDIR={ENVIRONMENT['TMPDIR']}")
                (bundle / "config.json").write_text(json.dumps(spec))
            options = ["--detach"] if stays else []
            # Pausing needs a cgroup; short runs do without.
            manager = "cgroupfs" if stays else "disabled"
            start = [*program, f"--cgroup-manager={manager}", "run", *options, "--bundle"]
            return [*start, str(bundle), f"{LABEL}-{os.getpid()}-{next(numbers)}"]

        try:
            yield command
        finally:
            for name in run([*program, "list", "-q"]).split():
                run([*program, "delete", "--force", name])


@contextlib.contextmanager
def podman(runtime: str = "") -> Generator[Command]:
    """A container engine, one command per container; its own runtime unless another is named."""
    root = image("podman")
    program = ["podman", *(["--runtime", runtime] if runtime else [])]
    mine = f"{LABEL}={os.getpid()}"
    # Its default limits need a capability that not every root has.
    limits = ["--ulimit", "nofile=1024:4096", "--ulimit", "nproc=4096:4096"]
    with hidden() as inside:

        def command(inner: Sequence[str], *, stays: bool = False) -> list[str]:
            options = ["--rm", "--network", "none", "--label", mine, *limits]
            options += ["--env", f"TMPDIR={ENVIRONMENT['TMPDIR']}"]
            start = [*inside, *program, "run", *(["--detach"] if stays else []), *options]
            return [*start, "--rootfs", f"{root}:O", *inner]

        try:
            yield command
        finally:
            listed = [*inside, "podman", "ps", "-aq", "--filter", f"label={mine}"]
            if left := run(listed).split():
                run([*inside, "podman", "rm", "--force", "--time", "0", *left])


ALTERNATIVES: dict[str, tuple[Callable[[], AbstractContextManager[Command]], float]] = {
    "bare_exec": (bare_exec, 1.0),
    "bwrap": (bwrap, 1.0),
    "crun": (crun, 0.5),
    "podman": (podman, 0.2),
}
"""Each with its share of the rounds: slow ones must not take the whole minute."""


# ---- measurements ------------------------------------------------------------------------------


def measure(report: "Report", rounds: int) -> None:
    """Add the starts of every alternative to a report, or why it is absent."""
    for name, (alternative, share) in ALTERNATIVES.items():
        try:
            with alternative() as command:
                hello(command)
                count = max(3, int(rounds * share))
                samples: list[float] = []
                for _ in range(count):
                    with report.trying(name):
                        samples.append(hello(command))
                report.spread(name, samples, failed=count - len(samples), is_ours=False)
        except AbsentError as error:
            report.absent(name, str(error))


def hello(command: Command) -> float:
    """Run one command; return the seconds."""
    began = time.perf_counter()
    said = run(command(HELLO))
    took = time.perf_counter() - began
    if said != "hello\n":
        raise AbsentError(f"it does not run here: it says {said!r}")
    return took


def together(report: "Report", count: int) -> None:
    """Add the cost of each of many concurrent starts, until the last has ended."""
    for name, (alternative, share) in ALTERNATIVES.items():
        number = max(4, int(count * share))
        try:
            with alternative() as command:
                run(command(["/bin/true"]))
                began = time.perf_counter()
                made = [quiet(command(["/bin/true"])) for _ in range(number)]
                codes = [process.wait() for process in made]
                wall = time.perf_counter() - began
        except AbsentError as error:
            report.absent(f"{name}_each_ms", str(error))
            continue
        if well := codes.count(0):
            report.figure(f"{name}_each_ms", wall / well * 1e3, f"mean of {well} at once")
            report.figure(f"{name}_{number}_success", well / number, f"of {number}")
        else:
            report.absent(f"{name}_each_ms", f"all of {number} at once failed")


def quiet(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command without reading its output."""
    silence = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=silence, stdout=silence, stderr=silence, env=ENVIRONMENT)


@contextlib.contextmanager
def held(name: str, count: int) -> Generator[None]:
    """Keep this many sleepers in an alternative for a while."""
    alternative, _ = ALTERNATIVES[name]
    with alternative() as command:
        made = [quiet(command(SLEEP, stays=True)) for _ in range(count)]
        try:
            # These two continue without their parent.
            if name in ("crun", "podman") and any(process.wait() for process in made):
                raise AbsentError("it does not run here")
            yield
        finally:
            for process in made:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it started: bubblewrap's inner half may outlive the outer one."""
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)  # From here it starts no more.
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def children(pid: int) -> list[int]:
    """Return the descendants of a process."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [*children(int(child)), int(child)]
    return found
