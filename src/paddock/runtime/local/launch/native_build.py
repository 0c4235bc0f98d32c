"""Builds the native programs (init, launcher, view server); cached by hash of source.

Init is a layer of its own on top of every image. The layer also holds what every root needs and
some images lack: mount points, and the files that device nodes are bind-mounted on. It is shared,
read-only, and the highest lower layer, so that no image can replace init. Its /dev is opaque, so
that device files of images are hidden.
"""

import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from paddock.kit.errors import UnavailableError
from paddock.runtime.local.launch.devices import DEVICES

INIT_PATH = "/.paddock/init"
"""The path is also in `launcher.c`."""
PREFIX = "init-"
_EMPTY, _VMSTAT = ".paddock/empty", ".paddock/vmstat"
"""The files that cover hidden files of /proc; the paths are also in `launcher.c`."""
_SYS = ".paddock/sys"
"""The directory that replaces /sys; the path is also in `launcher.c`."""
_SYS_DIRECTORIES = (
    *("block", "bus", "class/net", "dev/block", "dev/char", "devices/system/cpu"),
    *("devices/system/node", "devices/virtual/net", "firmware", "fs/cgroup", "kernel/mm"),
    *("module", "power"),
)
"""Mount points of what is shown (`protocol.py`), and directories that programs expect, empty."""

LAUNCHER_PREFIX = "launcher-"
VIEWS_PREFIX = "views-"
CACHE = Path("/var/cache/paddock/init")
"""The cache of a node that runs as root."""

_SOURCES = Path(__file__).parent / "native" / "init"
_LAUNCHER_SOURCES = Path(__file__).parent / "native" / "launcher"
_VIEWS_SOURCES = Path(__file__).parent / "native" / "views"
_DIRECTORIES = {
    "proc": 0o555, "sys": 0o555, "tmp": 0o1777, "run": 0o755, ".paddock": 0o755,
    "dev": 0o755, "dev/pts": 0o755, "dev/shm": 0o1777,
}  # fmt: skip
_LINKS = {
    "dev/ptmx": "pts/ptmx", "dev/fd": "/proc/self/fd", "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1", "dev/stderr": "/proc/self/fd/2", "dev/core": "/proc/kcore",
}  # fmt: skip


def ensure_layer(layers: Path, cache: Path | None = None) -> Path:
    """Return the directory of init's layer, building it if needed.

    Layers are on a tmpfs and lost at a reboot; the cache is on a disk and keeps every version,
    because a hibernated sandbox needs exactly the init it had.
    """
    name = f"{PREFIX}{_digest(_SOURCES)}"
    cache = cache or layers / ".cache"
    _ensure(cache / name, compile_init)
    for layer in layers.glob(f"{PREFIX}*/.paddock"):  # of an older version
        _create_covers(layer.parent)
    return restore_layer(layers, cache, name)


def ensure_launcher(cache: Path = CACHE) -> Path:
    """Return the path of the launcher, building it if needed."""
    program = cache / f"{LAUNCHER_PREFIX}{_digest(_LAUNCHER_SOURCES)}"
    _ensure(program, functools.partial(_compile, _LAUNCHER_SOURCES / "launcher.c"))
    return program


def ensure_views(cache: Path = CACHE) -> Path:
    """Return the path of the view server, building it if needed."""
    program = cache / f"{VIEWS_PREFIX}{_digest(_VIEWS_SOURCES)}"
    _ensure(program, functools.partial(_compile, _VIEWS_SOURCES / "views.c"))
    return program


def restore_layer(layers: Path, cache: Path, name: str) -> Path:
    """Return the layer of a cached version of init, creating it if needed."""
    layer = layers / name
    if layer.exists():
        return layer
    if not (cache / name).exists():
        raise UnavailableError(f"the sandbox's version of init ({name}) is not in the cache")
    staging = layers / f"{name}.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o755)
    create_mount_points(staging)
    shutil.copyfile(cache / name, staging / INIT_PATH.lstrip("/"))
    (staging / INIT_PATH.lstrip("/")).chmod(0o755)
    try:
        staging.rename(layer)
    except OSError:  # another process has created the same content
        shutil.rmtree(staging)
    return layer


def create_mount_points(root: Path) -> None:
    """Create mount points, links, and files to bind-mount devices on."""
    for name, mode in _DIRECTORIES.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    for name, target in _LINKS.items():
        (root / name).symlink_to(target)
    for name in DEVICES:
        (root / "dev" / name).touch(mode=0o666)
        (root / "dev" / name).chmod(0o666)
    _create_covers(root)
    mark_opaque(root / "dev")


def _create_covers(root: Path) -> None:
    """Create what is mounted over files about the machine and over /sys, unless it exists."""
    _create_sys(root / _SYS)
    counters = Path("/proc/vmstat").read_text().splitlines()
    zeros = "".join(f"{line.split()[0]} 0\n" for line in counters)
    for name, content in ((_EMPTY, ""), (_VMSTAT, zeros)):
        if not (root / name).exists():
            (root / name).write_text(content)
            (root / name).chmod(0o444)


def _create_sys(top: Path) -> None:
    """Create the directory that replaces /sys, unless it is complete."""
    if top.exists():
        return
    building = top.with_name(f"{top.name}.{os.getpid()}")
    for name in _SYS_DIRECTORIES:
        (building / name).mkdir(parents=True, exist_ok=True)
    for directory in (building, *building.rglob("*")):
        directory.chmod(0o755)
    building.rename(top)


def mark_opaque(directory: Path) -> None:
    """Hide lower layers in a directory; rootless overlays use another attribute."""
    space = "trusted" if os.geteuid() == 0 else "user"
    os.setxattr(directory, f"{space}.overlay.opaque", b"y")


def compile_init(target: Path) -> None:
    """Compile init into a static program."""
    _compile(_SOURCES / "init.c", target)


def _digest(sources: Path) -> str:
    found = sorted(path for path in sources.iterdir() if path.suffix in {".c", ".h"})
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in found)).hexdigest()[:16]


def _ensure(program: Path, build: Callable[[Path], None]) -> None:
    if program.exists():
        return
    program.parent.mkdir(parents=True, exist_ok=True)
    temporary = program.with_name(f"{program.name}.{os.getpid()}")
    build(temporary)
    temporary.replace(program)


def _compile(source: Path, target: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise UnavailableError(
            f"cannot build {source.stem}: there is no C compiler",
            hint="apt-get install gcc libc6-dev",
        )
    command = [compiler, "-static", "-Os", "-s", "-o", str(target), str(source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(
            f"cannot build {source.stem}: {done.stderr.strip()[-500:]}",
            hint="apt-get install gcc libc6-dev",
        )
    target.chmod(0o755)
