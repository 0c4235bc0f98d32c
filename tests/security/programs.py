"""The image `programs`: the image `minimal` plus browsers, databases and compilers.

Built once per list of packages, in the cache of the machine; it takes some minutes and 2 GB. Run
`python -m tests.security.programs` as root to build it.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from paddock.runtime.local.images.base import DEFAULT_CACHE, build_base, minimal_rootfs
from paddock.runtime.local.images.debian.build import ROOTFS
from paddock.runtime.local.images.debian.recipe import built_in
from paddock.runtime.local.images.debian.work import work_directory

PACKAGES = (
    "chromium",
    "default-jdk-headless",
    "gcc",
    "gdb",
    "libc6-dev",
    "make",
    "mariadb-client-core",
    "mariadb-server-core",
    "nodejs",
    "postgresql",
    "strace",
)
_INSTALL = """
set -e
mount -t proc proc "$1/proc"
mount --bind /dev "$1/dev"
mount --bind "$(readlink -f /etc/resolv.conf)" "$1/etc/resolv.conf"
# Packages must not start their services.
printf '#!/bin/sh\\nexit 101\\n' > "$1/usr/sbin/policy-rc.d"
chmod +x "$1/usr/sbin/policy-rc.d"
root=$1
shift
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
chroot "$root" apt-get update -q
chroot "$root" apt-get install -qy --no-install-recommends "$@"
chroot "$root" apt-get clean
rm "$root/usr/sbin/policy-rc.d"
"""


def directory(cache: Path = DEFAULT_CACHE) -> Path:
    """Return the root file system of the image, built or not."""
    base = build_base(cache, recipe=built_in("minimal"))
    recipe = " ".join((base.name, *PACKAGES))
    return cache / f"programs-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}" / ROOTFS


def build(cache: Path = DEFAULT_CACHE) -> Path:
    """Build the image if it is missing; return its root file system."""
    target = directory(cache)
    if target.is_dir():
        return target
    with work_directory(cache) as work:
        rootfs = work / ROOTFS
        source = minimal_rootfs(cache)
        subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(rootfs)], check=True)
        # Mounts and processes of the installation end with their namespaces.
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _INSTALL]
        subprocess.run(
            [*command, "sh", str(rootfs), *PACKAGES], check=True, stdin=subprocess.DEVNULL
        )
        target.parent.mkdir(mode=0o700, exist_ok=True)
        rootfs.rename(target)
    return target


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("building the image needs root")
    print(build())
