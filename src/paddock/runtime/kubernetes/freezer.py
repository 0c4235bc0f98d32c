"""Freeze the processes of a pod through its cgroup, on the pod's node; both cgroup versions.

A kubelet names a pod's cgroup after the pod's uid, with dashes or, under systemd, underscores.
The whole pod is frozen, including envd. The gateway holds incoming requests and wakes the sandbox.
"""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

from paddock.kit.errors import NotFoundError, UnavailableError, UnsupportedError

CGROUPS = Path("/sys/fs/cgroup")
_TIMEOUT_SECONDS = 5.0
_DEPTH = 6
_GONE_ERRNOS = (errno.ENOENT, errno.ENODEV)
"""Errors of a cgroup that was removed in between, because its container ended."""


def find_cgroup(pod_uid: str, *, root: Path = CGROUPS) -> Path:
    """Return the cgroup by which a pod can be frozen."""
    base = root if (root / "cgroup.controllers").exists() else root / "freezer"
    if not base.is_dir():
        raise UnsupportedError(
            f"{base} does not exist: this node has no freezer cgroups",
            hint="mount the host's /sys/fs/cgroup into the node agent",
        )
    wanted = {f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}"}
    level = [base]
    for _ in range(_DEPTH):
        below = [child for place in level for child in _children(place)]
        for child in below:
            # `pod<uid>`, or `kubepods-besteffort-pod<uid>.slice`
            if any(child.name.removesuffix(".slice").endswith(name) for name in wanted):
                return child
        level = below
    raise NotFoundError(f"pod {pod_uid} has no cgroup on this node")


async def freeze(pod_uid: str, *, frozen: bool, root: Path = CGROUPS) -> None:
    """Freeze or thaw all processes of a pod; return when the kernel confirms it."""
    place = find_cgroup(pod_uid, root=root)
    if (place / "cgroup.freeze").exists():
        await _freeze(place, frozen=frozen)
        return
    # Version 1 freezes only direct members; a pod's containers are in cgroups below it.
    groups = [place]
    for group in groups:
        try:
            await _freeze_v1(group, frozen=frozen)
        except OSError as error:
            if error.errno not in _GONE_ERRNOS:
                raise
        groups += _children(group)


def _children(place: Path) -> list[Path]:
    """Return the child cgroups; none if the cgroup was removed in between."""
    try:
        return [child for child in place.iterdir() if child.is_dir()]
    except OSError as error:
        if error.errno not in _GONE_ERRNOS:
            raise
        return []


async def _freeze(place: Path, *, frozen: bool) -> None:
    (place / "cgroup.freeze").write_text("1" if frozen else "0")
    wanted = f"frozen {int(frozen)}"
    await _wait_until(place, lambda: wanted in (place / "cgroup.events").read_text().splitlines())


async def _freeze_v1(place: Path, *, frozen: bool) -> None:
    wanted = "FROZEN" if frozen else "THAWED"
    file = place / "freezer.state"
    file.write_text(wanted)
    await _wait_until(place, lambda: file.read_text().strip() == wanted)


async def _wait_until(place: Path, check: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            while not check():  # noqa: ASYNC110 - no notification
                await asyncio.sleep(0.005)
    except TimeoutError as error:
        raise UnavailableError(
            f"the kernel did not freeze or thaw {place} within {_TIMEOUT_SECONDS:g} s"
        ) from error
