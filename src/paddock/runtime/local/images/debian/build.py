"""Builds one image from a recipe: a root file system, or a layer on top of another one.

Packages and script run in the image's root, in mount and process namespaces of their own, which end
with the build. Their /dev, /run and /tmp are temporary; downloads stay outside of the image.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.images.debian import node_release
from paddock.runtime.local.images.debian.commands import Progress, run
from paddock.runtime.local.images.debian.mirror import debian_mirror
from paddock.runtime.local.images.debian.recipe import INSTALL_SCRIPT, Recipe

Node = Future[Path] | None
"""The download of Node.js; None: the recipe does not have it."""

ROOTFS = "rootfs"
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
_OVERLAY = "index=off,redirect_dir=off,metacopy=off,volatile"
_COPY_PARENT = """
set -e
mount -t overlay overlay -o "lowerdir=$1" "$2"
cp -a "$2/." "$3"
"""


@contextlib.contextmanager
def downloaded_node(recipe: Recipe, work: Path, report: Progress) -> Generator[Node]:
    """Download Node.js, if the recipe has it, while other steps run."""
    with ThreadPoolExecutor(max_workers=1) as downloads:
        yield recipe.node and downloads.submit(
            node_release.fetch, recipe.node, recipe.machine, work / "node", report
        )


def build_tree(
    recipe: Recipe, parents: Sequence[Path], node: Node, work: Path, report: Progress
) -> bool:
    """Build `rootfs` in a work directory; return whether it is a layer above the parents.

    The parents are the layers below, lowest first. Where the file system cannot hold a layer, the
    tree is complete.
    """
    tree = work / ROOTFS
    tree.mkdir(mode=0o755)
    is_layer = bool(parents) and _can_hold_layers(work)
    if not parents:
        _bootstrap(recipe, tree, report)
    elif not is_layer:
        _copy(parents, tree, work, report)
    if node is not None:
        node_release.install(node.result(), tree / "usr/local")
    _install(recipe, parents if is_layer else (), tree, work, report)
    run(["sync", "--file-system", str(tree)], report)
    return is_layer


def _bootstrap(recipe: Recipe, tree: Path, report: Progress) -> None:
    _ensure_debootstrap(report)
    # dpkg syncs every file that it unpacks, which halves the speed of apt.
    settings = tree / "etc/dpkg/dpkg.cfg.d"
    settings.mkdir(parents=True)
    (settings / "paddock").write_text("force-unsafe-io\n")
    report(f"installing {recipe.suite}")
    options = ["--variant=minbase", "--include=ca-certificates"]
    run(["debootstrap", *options, recipe.suite, str(tree), debian_mirror()], report)
    for path in (tree / "dev").iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in (tree / "var/cache/apt/archives", tree / "var/lib/apt/lists"):
        shutil.rmtree(path)
        path.mkdir()


def _install(
    recipe: Recipe, parents: Sequence[Path], tree: Path, work: Path, report: Progress
) -> None:
    report(f"installing {len(recipe.packages)} packages for {recipe.name}")
    root, overlay = tree, ""
    if parents:
        root = work / "merged"
        root.mkdir()
        overlay = _overlay(parents, tree, work / "overlay")
    downloads = _made(work / "downloads")
    arguments = [str(root), overlay, str(downloads), recipe.script, *recipe.packages]
    run([*_NAMESPACES, "sh", str(INSTALL_SCRIPT), *arguments], report)


def _copy(parents: Sequence[Path], tree: Path, work: Path, report: Progress) -> None:
    report("copying the layers below: this file system cannot hold a layer")
    merged = _made(work / "parents")
    lower = ":".join(map(str, [*reversed(parents), _made(work / "empty")]))
    run([*_NAMESPACES, "sh", "-c", _COPY_PARENT, "sh", lower, str(merged), str(tree)], report)


def _can_hold_layers(work: Path) -> bool:
    """Whether an overlay can write to this file system; overlays themselves do not allow it."""
    lower, upper, root = (_made(work / "probe" / name) for name in ("lower", "upper", "root"))
    options = _overlay((lower,), upper, work / "probe" / "work")
    command = [*_NAMESPACES, "mount", "-t", "overlay", "overlay", "-o", options, str(root)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _overlay(parents: Sequence[Path], upper: Path, work: Path) -> str:
    """Return the options of an overlay; the build is synced once, at its end."""
    lower = ":".join(map(str, reversed(parents)))
    return f"lowerdir={lower},upperdir={upper},workdir={_made(work)},{_OVERLAY}"


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _ensure_debootstrap(report: Progress) -> None:
    if shutil.which("debootstrap"):
        return
    if not shutil.which("apt-get"):
        raise UnsupportedError(
            "debootstrap is not installed",
            hint="install debootstrap with this distribution's package manager",
        )
    report("installing debootstrap")
    run(["apt-get", "install", "-y", "--no-install-recommends", "debootstrap"], report)
