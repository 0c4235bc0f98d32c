"""Freezing a pod's processes by its cgroup, on the node where it runs; both cgroup versions.

A kubelet names a pod's cgroup after the pod's uid, with dashes or, under systemd, underscores.
Whole pods are frozen, envd with them: a request that arrives is held by the gateway, which wakes.
"""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

from paddock.kit.errors import NotFoundError, UnavailableError, UnsupportedError

CGROUPS = Path("/sys/fs/cgroup")
_PATIENCE_SECONDS = 5.0
_DEPTH = 6
_GONE = (errno.ENOENT, errno.ENODEV)
"""What a cgroup and its files say that ended meanwhile: its container did."""


def find_cgroup(pod_uid: str, *, root: Path = CGROUPS) -> Path:
    """Find a pod's cgroup: the one that can be frozen."""
    base = root if (root / "cgroup.controllers").exists() else root / "freezer"
    if not base.is_dir():
        raise UnsupportedError(
            f"{base} is not there: this node has no cgroups that freeze",
            hint="mount the host's /sys/fs/cgroup into the node agent",
        )
    wanted = {f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}"}
    level = [base]
    for _ in range(_DEPTH):
        below = [child for place in level for child in _inside(place)]
        for child in below:
            # `pod<uid>`, or `kubepods-besteffort-pod<uid>.slice`
            if any(child.name.removesuffix(".slice").endswith(name) for name in wanted):
                return child
        level = below
    raise NotFoundError(f"no cgroup of pod {pod_uid} is on this node")


async def freeze(pod_uid: str, *, frozen: bool, root: Path = CGROUPS) -> None:
    """Stop every process of a pod, or let them go on; return when that is so."""
    place = find_cgroup(pod_uid, root=root)
    if (place / "cgroup.freeze").exists():
        await _freeze(place, frozen=frozen)
        return
    # Version 1 freezes what is directly inside; a pod's containers are below it.
    groups = [place]
    for group in groups:
        try:
            await _freeze_v1(group, frozen=frozen)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        groups += _inside(group)


def _inside(place: Path) -> list[Path]:
    """Give the cgroups directly in one. Others end at any moment; one that has is empty."""
    try:
        return [child for child in place.iterdir() if child.is_dir()]
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return []


async def _freeze(place: Path, *, frozen: bool) -> None:
    (place / "cgroup.freeze").write_text("1" if frozen else "0")
    wanted = f"frozen {int(frozen)}"
    await _until(place, lambda: wanted in (place / "cgroup.events").read_text().splitlines())


async def _freeze_v1(place: Path, *, frozen: bool) -> None:
    wanted = "FROZEN" if frozen else "THAWED"
    file = place / "freezer.state"
    file.write_text(wanted)
    await _until(place, lambda: file.read_text().strip() == wanted)


async def _until(place: Path, check: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not check():  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.005)
    except TimeoutError as error:
        raise UnavailableError(f"{place} did not change within {_PATIENCE_SECONDS:g} s") from error
