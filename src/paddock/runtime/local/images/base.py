"""The built-in images `base` and `minimal`, built on this machine once.

A recipe has a fingerprint; its build is stored in `<cache>/<name>-<fingerprint>`, with its files in
`rootfs/`: the whole tree of `minimal`, and what `base` adds to it. A finished build is renamed into
place, so a directory of that name is always complete, and a second build of the same recipe does
nothing. Builds of older recipes are kept: their sandboxes continue.
"""

import os
import re
import shutil
import stat
from pathlib import Path

import msgspec

from paddock.kit.clock import Clock, SystemClock
from paddock.kit.errors import UnsupportedError
from paddock.runtime.local.images.debian.build import ROOTFS, build_tree, downloaded_node
from paddock.runtime.local.images.debian.commands import Progress
from paddock.runtime.local.images.debian.recipe import BUILT_IN, Recipe, built_in
from paddock.runtime.local.images.debian.work import work_directory
from paddock.runtime.local.images.model import Manifest, decode_manifest

BASE_NAME = "base:latest"
BUILT_IN_NAMES = {f"{name}:latest": name for name in BUILT_IN}
"""The names of recipes, by name of the image."""
HOST_NAME = "host:latest"
DEFAULT_CACHE = Path("/var/cache/paddock/images")
MANIFEST = "manifest.json"


def build_directory(recipe: Recipe, cache: Path = DEFAULT_CACHE) -> Path:
    """Return the directory of a recipe's build, built or not."""
    return cache / f"{recipe.name}-{recipe.fingerprint}"


def base_directory(cache: Path = DEFAULT_CACHE, *, name: str = "base") -> Path:
    """Return the directory of a built-in image of this machine, built or not."""
    return build_directory(built_in(name), cache)


def minimal_rootfs(cache: Path = DEFAULT_CACHE) -> Path:
    """Return the root file system of `minimal`, built or not."""
    return base_directory(cache, name="minimal") / ROOTFS


def is_built(cache: Path = DEFAULT_CACHE, *, name: str = "base") -> bool:
    """Whether a built-in image is built."""
    return _is_complete(base_directory(cache, name=name))


def usable_directory(cache: Path = DEFAULT_CACHE, *, name: str = "base") -> Path | None:
    """Return the build to use: this recipe's, or else the newest of an older recipe."""
    if is_built(cache, name=name):
        return base_directory(cache, name=name)
    is_build = re.compile(rf"{re.escape(name)}-[0-9a-f]+").fullmatch
    older = [
        path.parent for path in cache.glob(f"{name}-*/{MANIFEST}") if is_build(path.parent.name)
    ]
    return max(older, key=lambda path: path.stat().st_mtime, default=None)


def keep_private(cache: Path = DEFAULT_CACHE) -> None:
    """Close all builds to other users of the machine, who could run their set-uid programs.

    Only root can. The group keeps its access: it may be that of a user who runs a rootless node.
    """
    if os.geteuid() != 0:
        return
    for tree in cache.glob(f"*/{ROOTFS}"):
        build = tree.parent
        mode = stat.S_IMODE(build.stat().st_mode)
        if mode & 0o007:
            build.chmod(mode & 0o770 if mode & 0o050 == 0o050 and build.stat().st_gid else 0o700)


def build_base(
    cache: Path = DEFAULT_CACHE,
    *,
    recipe: Recipe | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Path:
    """Build an image, by default `base`, unless it is built; return its directory.

    It takes a minute or two. The images below it are built first.
    """
    recipe = recipe or built_in()
    report = progress or _ignore
    target = build_directory(recipe, cache)
    if _is_complete(target):
        report(f"{recipe.name} image exists: {target}")
        return target
    if os.geteuid() != 0:
        raise UnsupportedError(
            f"building the {recipe.name} image needs root (it has files of several owners)",
            hint="run the same command with sudo, once",
        )
    with work_directory(cache) as work:
        with downloaded_node(recipe, work, report) as node:
            below = _layers_below(recipe, cache, report, clock)
            is_layer = build_tree(recipe, [Path(layer) for layer in below], node, work, report)
        finished = work / "finished"
        finished.mkdir(mode=0o700)
        (work / ROOTFS).rename(finished / ROOTFS)
        manifest = Manifest(
            name=f"{recipe.name}:latest",
            layers=(*(below if is_layer else ()), str(target / ROOTFS)),
            config=recipe.config,
            created_at=(clock or SystemClock()).now().isoformat(),
        )
        (finished / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        _move_into_place(finished, target)
    report(f"{recipe.name} image is ready: {target}")
    return target


def read_manifest(build: Path) -> Manifest:
    """Return the manifest of a build."""
    path = build / MANIFEST
    return decode_manifest(path.read_bytes(), origin=str(path))


def _layers_below(
    recipe: Recipe, cache: Path, report: Progress, clock: Clock | None
) -> tuple[str, ...]:
    if recipe.parent is None:
        return ()
    build = build_base(cache, recipe=recipe.parent, progress=report, clock=clock)
    return read_manifest(build).layers


def _is_complete(build: Path) -> bool:
    return (build / MANIFEST).is_file()


def _move_into_place(work: Path, target: Path) -> None:
    """Rename a build into place. An existing complete build wins; an incomplete one is replaced."""
    if target.exists() and not _is_complete(target):
        shutil.rmtree(target)
    try:
        work.rename(target)
    except OSError:
        if not _is_complete(target):
            raise


def _ignore(_: str) -> None:
    """Discard progress."""


def missing_hint(name: str) -> str:
    """Return how to get an image that is missing."""
    if name == BASE_NAME:
        return "build it: paddock image build-base"
    if name in BUILT_IN_NAMES:
        return f"build it: paddock image build-base {BUILT_IN_NAMES[name]}"
    return "list images: paddock image ls; get one: paddock image pull, paddock image import"
