"""The `base` image, built from Debian packages on this machine.

A recipe (release, packages, finishing script) has a fingerprint; its build is stored in
`<cache>/base-<fingerprint>`, with the tree in `rootfs/`. A finished build is renamed into place, so
a directory of that name is always complete, and a second build of the same recipe does nothing.
Builds of older recipes are kept: their sandboxes continue.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit.clock import Clock, SystemClock
from paddock.kit.errors import UnavailableError, UnsupportedError
from paddock.runtime.local.images.mirror import debian_mirror, debian_suite
from paddock.runtime.local.images.model import ImageConfig, Manifest

BASE_NAME = "base:latest"
DEFAULT_CACHE = Path("/var/cache/paddock/images")
ROOTFS = "rootfs"
MANIFEST = "manifest.json"

_PACKAGES = (
    "bash",
    "ca-certificates",
    "coreutils",
    "curl",
    "git",
    "iproute2",
    "less",
    "libpam-modules",
    "ncurses-base",
    "ncurses-bin",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
    "xz-utils",
)
_CONFIG = ImageConfig(
    env={
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
    },
    user="user",
    workdir="/home/user",
    cmd=("/bin/bash", "-l"),
)
_FINISH = """
set -e
useradd --create-home --uid 1000 --shell /bin/bash user
# ~/.profile adds this directory to PATH if it exists at login: the scripts of packages that a user
# installs with pip are found by the same command line.
install -d -o user -g user /home/user/.local /home/user/.local/bin
echo 'user ALL=(ALL:ALL) NOPASSWD:ALL' > /etc/sudoers.d/user
chmod 0440 /etc/sudoers.d/user
ln -sf python3 /usr/bin/python
echo 'LANG=C.UTF-8' > /etc/default/locale
# Commands are run by login shells: bash knows who it is without starting a program.
sed -i 's/"\\$(id -u)"/"\\${EUID:-\\$(id -u)}"/' /etc/profile
# A sandbox is thrown away: pip may install beside Debian's packages, also after an upgrade of
# python3. Root installs into /usr/local, other users into ~/.local.
for marker in /usr/lib/python3*/EXTERNALLY-MANAGED; do
  dpkg-divert --local --quiet --rename --divert "$marker.debian" --add "$marker"
done
printf '[global]\nroot-user-action = ignore\ndisable-pip-version-check = true\n' > /etc/pip.conf
# dpkg syncs every file that it unpacks, which halves the speed of apt.
echo force-unsafe-io > /etc/dpkg/dpkg.cfg.d/paddock
echo 'Acquire::Languages "none";' > /etc/apt/apt.conf.d/99paddock
echo sandbox > /etc/hostname
printf '127.0.0.1 localhost sandbox\\n::1 localhost\\n' > /etc/hosts
: > /etc/resolv.conf
: > /etc/machine-id
apt-get clean
rm -rf /var/lib/apt/lists/* /var/log/*.log /var/log/apt/* /var/cache/apt/*.bin
rm -rf /usr/share/doc/* /usr/share/man/* /usr/share/info/* /tmp/* /var/tmp/*
find /dev -mindepth 1 -delete
"""

Progress = Callable[[str], None]


class Recipe(Struct, frozen=True, kw_only=True):
    """All inputs of a build."""

    suite: str
    machine: str
    packages: tuple[str, ...] = _PACKAGES
    finish: str = _FINISH
    config: ImageConfig = _CONFIG

    @property
    def fingerprint(self) -> str:
        """Hash of the recipe, used in the directory name."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


def base_recipe() -> Recipe:
    """Return the recipe for this machine."""
    return Recipe(suite=debian_suite(), machine=platform.machine())


def base_directory(cache: Path = DEFAULT_CACHE) -> Path:
    """Return the directory of this machine's base image, built or not."""
    return cache / f"base-{base_recipe().fingerprint}"


def is_built(cache: Path = DEFAULT_CACHE) -> bool:
    """Whether the base image is built."""
    return (base_directory(cache) / MANIFEST).is_file()


def usable_directory(cache: Path = DEFAULT_CACHE) -> Path | None:
    """Return the base image to use: this recipe's, or else the newest of an older recipe."""
    if is_built(cache):
        return base_directory(cache)
    older = [path.parent for path in cache.glob(f"base-*/{MANIFEST}")]
    return max(older, key=lambda path: path.stat().st_mtime, default=None)


def keep_private(cache: Path = DEFAULT_CACHE) -> None:
    """Close all builds to other users of the machine, who could run their set-uid programs.

    Only root can. The group keeps its access: it may be that of a user who runs a rootless node.
    """
    if os.geteuid() != 0:
        return
    for build in cache.glob("base-*"):
        mode = stat.S_IMODE(build.stat().st_mode)
        if mode & 0o007:
            build.chmod(mode & 0o770 if mode & 0o050 == 0o050 and build.stat().st_gid else 0o700)


def build_base(
    cache: Path = DEFAULT_CACHE,
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Path:
    """Build the base image if it is missing; return its directory. Takes a minute or two."""
    report = progress or _ignore
    target = base_directory(cache)
    if is_built(cache):
        report(f"base image exists: {target}")
        return target
    if os.geteuid() != 0:
        raise UnsupportedError(
            "building the base image needs root (debootstrap creates files of several owners)",
            hint="run the same command with sudo, once",
        )
    recipe = base_recipe()
    _ensure_debootstrap(report)
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
    try:
        work.chmod(0o700)
        _bootstrap(work / ROOTFS, recipe, report)
        manifest = Manifest(
            name=BASE_NAME,
            layers=(str(target / ROOTFS),),
            config=recipe.config,
            created_at=(clock or SystemClock()).now().isoformat(),
        )
        (work / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        _move_into_place(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(f"base image is ready: {target}")
    return target


def _bootstrap(rootfs: Path, recipe: Recipe, report: Progress) -> None:
    report(f"installing {recipe.suite} with {len(recipe.packages)} packages")
    _run(
        [
            "debootstrap",
            "--variant=minbase",
            f"--include={','.join(recipe.packages)}",
            recipe.suite,
            str(rootfs),
            debian_mirror(),
        ],
        report,
    )
    report("adding the user, trimming caches")
    _run(["chroot", str(rootfs), "/bin/sh", "-c", recipe.finish], report)


def _move_into_place(work: Path, target: Path) -> None:
    """Rename a build into place. An existing complete build wins; an incomplete one is replaced."""
    if target.exists() and not (target / MANIFEST).is_file():
        shutil.rmtree(target)
    try:
        work.rename(target)
    except OSError:
        if not (target / MANIFEST).is_file():
            raise


def _ensure_debootstrap(report: Progress) -> None:
    if shutil.which("debootstrap"):
        return
    if not shutil.which("apt-get"):
        raise UnsupportedError(
            "debootstrap is not installed",
            hint="install debootstrap with this distribution's package manager",
        )
    report("installing debootstrap")
    _run(["apt-get", "install", "-y", "--no-install-recommends", "debootstrap"], report)


def _run(command: list[str], report: Progress) -> None:
    """Run a command and report each line; a failure is raised with the last lines."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "DEBIAN_FRONTEND": "noninteractive",
        "LC_ALL": "C",
        **{key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")},
    }
    last: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        umask=0o022,
    ) as process:
        if process.stdout is not None:
            for line in process.stdout:
                last = [*last[-9:], line.rstrip()]
                report(line.rstrip())
    if process.returncode != 0:
        raise UnavailableError(
            f"{command[0]} failed with status {process.returncode}: {' | '.join(last)}",
            hint="check that the package mirror is reachable, then build again",
        )


def _ignore(_: str) -> None:
    """Discard progress."""
