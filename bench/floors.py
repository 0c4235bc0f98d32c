"""Alternatives measured in the same run: the time until a command's output is read.

Each alternative is a context that gives a way to run a command in it; leaving it removes whatever
still runs. Root filesystems are our base image, so that all of them start the same bash.
`measure` takes the starts of all of them into a report, `together` starts many at once, `held`
keeps many running. What is not installed, or does not run here, raises `AbsentError` with the
reason. OpenSandbox's server is in `opensandbox.py`.
"""

import contextlib
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

from rivals import control_group, note_group, private_mounts, unique_name

if TYPE_CHECKING:
    from reporting import Report

CACHE = Path(os.environ.get("PADDOCK_CACHE", "/var/cache/paddock"))
CRIU = sorted(map(str, CACHE.glob("criu/*/")))
"""Where `scripts/build-criu` installs CRIU: podman checkpoints with it."""
ENVIRONMENT = {
    "PATH": ":".join(("/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", *CRIU)),
    "HOME": "/root",
    "TMPDIR": tempfile.gettempdir(),
    "CONTAINERS_CONF": str(Path(__file__).with_name("containers.conf")),
}
"""A minimal environment, so that no profile is counted to the floor, with the mark by which leaks
are found, which containers have too, and our settings of podman in place of the machine's.
"""
HELLO = ("/bin/bash", "-l", "-c", "echo hello")
SLEEP = ("/bin/sleep", "1000")

Command = Callable[..., list[str]]
"""Returns the argv to run a command inside; with `stays=True` in the background."""


class AbsentError(Exception):
    """The alternative is not available, and why."""


def rootfs() -> Path | None:
    """Return our image `minimal`: the newest, if recipes have changed."""
    found = CACHE.glob("images/minimal-*/rootfs")
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


def run(command: Sequence[str | Path], environment: dict[str, str] = ENVIRONMENT, **options) -> str:
    """Run a command; `AbsentError` with its last output if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, **options
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
def crun() -> Generator[Command]:
    """An OCI runtime without an engine; the image read-only, no network, no limits."""
    root = image("crun")
    with (
        tempfile.TemporaryDirectory(prefix="paddock-crun-") as directory,
        private_mounts() as inside,
    ):
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
            name = unique_name()
            # Pausing needs a cgroup; short runs do without.
            manager = "cgroupfs" if stays else "disabled"
            if stays:
                note_group(name)
            start = [*program, f"--cgroup-manager={manager}", "run", *options, "--bundle"]
            return [*start, str(bundle), name]

        try:
            yield command
        finally:
            for name in run([*program, "list", "-q"]).split():
                run([*program, "delete", "--force", name])


@contextlib.contextmanager
def podman(runtime: str = "") -> Generator[Command]:
    """A container engine, one command per container; its own runtime unless another is named.

    Its storage, state and control groups are its own and are removed at the end: the machine's are
    not touched. Words before `run` start podman with these, for other commands too.
    """
    root = image("podman")
    with (
        control_group() as group,
        # podman accepts at most 50 characters for its runroot.
        tempfile.TemporaryDirectory(prefix="pp-") as home,
        private_mounts(checkpoints=True) as inside,
    ):
        places = (("--root", "storage"), ("--runroot", "run"), ("--tmpdir", "state"))
        program = [*inside, "podman", "--cgroup-manager", "cgroupfs"]
        program += [word for flag, name in places for word in (flag, f"{home}/{name}")]
        program += ["--runtime", runtime] if runtime else []

        def command(inner: Sequence[str], *, stays: bool = False) -> list[str]:
            options = ["--rm", "--network", "none", "--cgroup-parent", group]
            options += ["--env", f"TMPDIR={ENVIRONMENT['TMPDIR']}"]
            start = [*program, "run", *(["--detach"] if stays else []), *options]
            return [*start, "--rootfs", f"{root}:O", *inner]

        try:
            yield command
        finally:
            run([*program, "rm", "--all", "--force", "--time", "0"])


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
    is_detached = name in ("crun", "podman")
    with alternative() as command:
        made = [quiet(command(SLEEP, stays=True)) for _ in range(count)]
        try:
            if is_detached and any(process.wait() for process in made):
                raise AbsentError("it does not run here")
            yield
        finally:
            for process in made:
                if is_detached:
                    # Killed during a start, it would leave a container that the engine cannot list.
                    process.wait()
                else:
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
