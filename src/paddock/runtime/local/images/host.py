"""The image `host`: the masked root of this machine, available without a build.

A layer over `/` hides everything but software: homes, mounts, data, the state of services, Paddock
itself, and every file below /etc, /usr and /opt that is not world-readable on this machine (root of
a sandbox could read it otherwise). The layer adds a user `user` (1000) and root, both without a
password, and `sudo` for `user` if it is installed.

World-readable files of the machine are readable inside: use another image to run sandboxes of
untrusted users.
"""

import contextlib
import functools
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.envd.process.shells import find_shell, is_program_here
from paddock.kit import clock
from paddock.runtime.local.images.model import ImageFacts
from paddock.runtime.local.launch.native_build import mark_opaque

_SOFTWARE = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "var", "opt"}
_PROVIDED = {"proc", "sys", "dev", ".paddock"}
_EMPTY = {
    "tmp": 0o1777, "run": 0o755, "mnt": 0o755, "media": 0o755, "srv": 0o755, "boot": 0o755,
    "var/tmp": 0o1777, "var/log": 0o755, "var/cache": 0o755, "var/cache/apt": 0o755,
    "var/cache/apt/archives": 0o755, "var/cache/apt/archives/partial": 0o700,
    "var/spool": 0o755, "var/mail": 0o775,
}  # fmt: skip
_VAR = {"tmp", "log", "cache", "spool", "mail", "lib", "lock", "run"}
_VAR_LIB = {"dpkg", "apt", "pam", "ucf", "python", "xml-core", "sgml-base", "dictionaries-common"}
_SECRET_NAMES = {
    "shadow", "shadow-", "gshadow", "gshadow-", "passwd-", "group-", "subuid", "subgid", "ssh",
    "machine-id", "sudoers.d", "krb5.keytab", "fstab", "crypttab", "mtab",
}  # fmt: skip
_SCAN_CACHE = Path("/var/cache/paddock/closed-software.json")
_SCAN_CACHE_SECONDS = 900
_PROFILE = 'export PS1="\\u@\\h:\\w\\$ "\n'


class _ScanResult(Struct, frozen=True):
    """Unreadable files below /usr and /opt, and the time of the scan."""

    at: float
    newest: float
    paths: tuple[str, ...]


# Made at import, not by the first use: see docs/decisions/0080.
_decoder = msgspec.json.Decoder(_ScanResult)


def ensure_layer(layers: Path, *, hidden: tuple[Path, ...] = ()) -> Path:
    """Return the directory of the layer; create it if missing."""
    layer = layers / "host"
    if layer.exists():
        return layer
    staging = layers / f"host.{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o755)
    _fill(staging, hidden)
    try:
        staging.rename(layer)
    except OSError:  # another process was faster
        shutil.rmtree(staging)
    return layer


@functools.cache
def layer_facts(layer: Path) -> ImageFacts:
    """Return what the image `host` offers: the users of its layer, the shell of the machine."""
    lines = (layer / "etc/passwd").read_text().splitlines()
    names = tuple(line.partition(":")[0] for line in lines)
    return ImageFacts(shell=find_shell(is_program_here), users=names)


def host_trees() -> tuple[str, ...]:
    """Return the host directories that a rootless sandbox mounts. A user namespace cannot mount an
    overlay over `/`, because of the mounts below it."""
    return tuple(path for path in ("/usr", "/opt") if os.path.isdir(path))


def ensure_rootless_layer(layers: Path) -> Path:
    """Return the layer for a rootless sandbox: links, and a copy of the readable part of /etc."""
    layer = layers / "host"
    if layer.exists():
        return layer
    staging = layers / f"host.{os.getpid()}"
    staging.mkdir(mode=0o755)
    for name in sorted(_SOFTWARE - {"etc", "var"}):
        path = Path("/", name)
        if path.is_symlink():
            (staging / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            (staging / name).mkdir(mode=0o755)
    shutil.copytree(
        "/etc", staging / "etc", symlinks=True, ignore=_unreadable_names, dirs_exist_ok=True
    )
    for name, mode in _EMPTY.items():
        _directory(staging, name, mode)
    for name in _SECRET_NAMES:
        (staging / "etc" / name).unlink(missing_ok=True)
    _write_users(staging, user_id=0)
    staging.rename(layer)
    return layer


def _unreadable_names(directory: str, names: list[str]) -> list[str]:
    closed: list[str] = []
    for name in names:
        path = os.path.join(directory, name)
        need = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
        if name in _SECRET_NAMES or not (os.path.islink(path) or os.access(path, need)):
            closed.append(name)
    return closed


def _fill(layer: Path, hidden: tuple[Path, ...]) -> None:
    for name in os.listdir("/"):
        if name not in _SOFTWARE and name not in _PROVIDED and name not in _EMPTY:
            _hide(layer, Path("/", name))
    for name, mode in _EMPTY.items():
        _directory(layer, name, mode)
        mark_opaque(layer / name)
    for name in _entries_except("/var", _VAR):
        _hide(layer, name)
    for name in _entries_except("/var/lib", _VAR_LIB):
        _hide(layer, name)
    own = (Path(sys.prefix), Path(__file__).resolve().parents[4])
    for path in (*hidden, *own):
        _hide_if_visible(layer, path)
    secrets = (Path("/etc", name) for name in _SECRET_NAMES)
    for path in (*_unreadable("/etc"), *_unreadable_software(), *secrets):
        _hide_if_visible(layer, path)
    _write_users(layer)


def _entries_except(parent: str, kept: set[str]) -> Iterator[Path]:
    yield from (Path(parent, name) for name in os.listdir(parent) if name not in kept)


def _unreadable_software() -> list[Path]:
    """Return the unreadable files below /usr and /opt; cached, because a scan takes seconds."""
    newest = max(_mtime("/var/lib/dpkg/status"), _mtime("/usr/local"), _mtime("/opt"))
    try:
        scan = _decoder.decode(_SCAN_CACHE.read_bytes())
        age = clock.system().now().timestamp() - scan.at
        if scan.newest == newest and 0 <= age < _SCAN_CACHE_SECONDS:
            return [Path(path) for path in scan.paths]
    except (OSError, msgspec.DecodeError):
        pass
    paths = [*_unreadable("/usr"), *_unreadable("/opt")]
    scan = _ScanResult(
        at=clock.system().now().timestamp(), newest=newest, paths=tuple(map(str, paths))
    )
    if os.geteuid() == 0:
        _SCAN_CACHE.parent.mkdir(parents=True, exist_ok=True)
        temporary = _SCAN_CACHE.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(scan))
        temporary.replace(_SCAN_CACHE)
    return paths


def _mtime(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _unreadable(tree: str) -> Iterator[Path]:
    """Yield paths that are not world-readable; a closed directory without its content."""
    pending = [tree] if os.path.isdir(tree) and not os.path.islink(tree) else []
    while pending:
        for path, mode in _modes(pending.pop()):
            if stat.S_ISLNK(mode):
                continue
            if stat.S_ISDIR(mode):
                if mode & 0o005 == 0o005:
                    pending.append(path)
                else:
                    yield Path(path)
            # A set-uid program that is executable but not readable (sudo) holds no secret.
            elif not mode & 0o004 and not mode & 0o001:
                yield Path(path)


def _modes(directory: str) -> Iterator[tuple[str, int]]:
    """Yield the entries of a directory with their modes; ignore files that are removed."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, entry.stat(follow_symlinks=False).st_mode


def _write_users(layer: Path, *, user_id: int = 1000) -> None:
    keep = ("root:", "user:")
    system = [
        line
        for line in Path("/etc/passwd").read_text().splitlines()
        if line.count(":") == 6 and int(line.split(":")[2]) < 1000 and not line.startswith(keep)
    ]
    nobody = [line for line in system if line.startswith("nobody:")]
    users = [
        "root:x:0:0:root:/root:/bin/bash",
        *system,
        f"user:x:{user_id}:{user_id}::/home/user:/bin/bash",
    ]
    if not nobody:
        users.append("nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
    groups = [
        line.rsplit(":", 1)[0] + ":"
        for line in Path("/etc/group").read_text().splitlines()
        if line.count(":") == 3 and int(line.split(":")[2]) < 1000
    ]
    if user_id:  # with one id there are no supplementary groups
        groups = [g + "user" if g.startswith("sudo:") else g for g in groups]
    _file(layer, "etc/passwd", "\n".join(users) + "\n", 0o644)
    _file(layer, "etc/group", "\n".join([*groups, "user:x:1000:"]) + "\n", 0o644)
    shadow = "".join(f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in users)
    _file(layer, "etc/shadow", shadow, 0o640)
    _file(layer, "etc/sudoers.d/paddock", "user ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
    if shutil.which("sudo"):
        rules = (
            "Defaults env_reset\n"
            'Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n'
            "root ALL=(ALL:ALL) ALL\n@includedir /etc/sudoers.d\n"
        )
        _file(layer, "etc/sudoers", rules, 0o440)
    for home, uid, mode in (("root", 0, 0o700), ("home", 0, 0o755), ("home/user", 1000, 0o755)):
        path = layer / home
        if path.exists() and not path.is_dir():
            path.unlink()
        _directory(layer, home, mode)
        mark_opaque(path)
        if home != "home":
            _file(layer, f"{home}/.bashrc", _PROFILE, 0o644)
            _set_owner(path / ".bashrc", uid)
        _set_owner(path, uid)


def _set_owner(path: Path, uid: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, uid, uid)


def _directory(layer: Path, name: str, mode: int) -> Path:
    path = layer
    for part in Path(name).parts:
        path /= part
        if not path.exists():
            path.mkdir()
            _like_host(path, layer)
    path.chmod(mode)
    return path


def _like_host(path: Path, layer: Path) -> None:
    """Set the mode that the directory has on the host: the upper layer's mode is visible."""
    try:
        path.chmod(stat.S_IMODE(os.stat(Path("/", path.relative_to(layer))).st_mode))
    except FileNotFoundError:
        path.chmod(0o755)


def _file(layer: Path, name: str, text: str, mode: int) -> None:
    path = layer / name
    if not path.parent.exists() or not path.parent.is_dir():
        if path.parent.exists():
            path.parent.unlink()
        _directory(layer, str(Path(name).parent), 0o755)
        if Path(name).parent.name == "sudoers.d":
            mark_opaque(path.parent)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _hide(layer: Path, path: Path) -> None:
    """Create a whiteout for a path of the host."""
    relative = path.relative_to("/")
    parent = layer / relative.parent
    if not parent.exists():
        for part in reversed(relative.parents[:-1]):
            made = layer / part
            if not made.exists():
                made.mkdir()
                _like_host(made, layer)
    os.mknod(layer / relative, 0o600 | stat.S_IFCHR, os.makedev(0, 0))


def _hide_if_visible(layer: Path, path: Path) -> None:
    """Hide a path unless it or a parent directory is hidden or replaced already."""
    relative = path.relative_to("/")
    at = layer
    for part in relative.parts:
        at /= part
        if at.is_char_device() or at.is_file():
            return
        if at.is_dir() and _is_opaque(at):
            return
    if not at.exists() and path.exists():
        _hide(layer, path)


def _is_opaque(path: Path) -> bool:
    return any(name.endswith("overlay.opaque") for name in os.listxattr(path))
