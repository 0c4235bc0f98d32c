"""Recipes: the packages and the script of an image.

name = "data"                  # the image
from = "base"                  # build on this recipe; without it, on an empty Debian
packages = ["postgresql-client"]
script = "pip install numpy"   # run as root in the image, with `sh -e`

[node]                         # Node.js with npm in /usr/local
version = "24.19.0"
sha256 = ["…", "…"]            # of the packages for each architecture
"""

import hashlib
import platform
import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError
from paddock.runtime.local.images.debian.mirror import debian_suite
from paddock.runtime.local.images.model import ImageConfig, canonical_name

BUILT_IN = ("base", "minimal")
_FINGERPRINT_DIGITS = 12
INSTALL_SCRIPT = Path(__file__).with_name("install.sh")
"""The program that installs what a recipe lists."""
_CONFIG = ImageConfig(
    env={
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
    },
    user="user",
    workdir="/home/user",
    cmd=("/bin/bash", "-l"),
)


class NodeRelease(Struct, frozen=True, forbid_unknown_fields=True):
    """The Node.js of an image."""

    version: str
    sha256: tuple[str, ...]
    """Accepted hashes of the download."""


class RecipeFile(Struct, frozen=True, forbid_unknown_fields=True, rename={"parent": "from"}):
    """A recipe as people write it."""

    name: str
    parent: str = ""
    packages: tuple[str, ...] = ()
    script: str = ""
    node: NodeRelease | None = None


class Recipe(Struct, frozen=True, kw_only=True):
    """All inputs of a build."""

    name: str
    suite: str
    machine: str
    parent: "Recipe | None" = None
    packages: tuple[str, ...] = ()
    script: str = ""
    node: NodeRelease | None = None
    config: ImageConfig = _CONFIG
    procedure: str
    """Hash of the program that installs it."""

    @property
    def fingerprint(self) -> str:
        """Hash of the recipe and of those below it, used in the directory name."""
        return _hash(msgspec.json.encode(self))


def built_in_file(name: str) -> Path:
    """Return the file of a built-in recipe."""
    return Path(__file__).with_name(f"{name}.toml")


def built_in(name: str = "base") -> Recipe:
    """Return a built-in recipe for this machine."""
    return read_recipe(built_in_file(name))


def read_recipe(file: Path) -> Recipe:
    """Read a recipe and those that it builds on. Raise `InvalidError` for an invalid one."""
    try:
        found = msgspec.convert(tomllib.loads(file.read_text()), RecipeFile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidError(
            f"cannot read the recipe {file}: {error}",
            hint="`paddock image build-base --print` shows one",
        ) from error
    _check(file, found)
    return Recipe(
        name=found.name,
        suite=debian_suite(),
        machine=platform.machine(),
        parent=built_in(found.parent) if found.parent else None,
        packages=found.packages,
        script=found.script,
        node=found.node,
        procedure=_hash(INSTALL_SCRIPT.read_bytes()),
    )


def _check(file: Path, found: RecipeFile) -> None:
    if not _is_simple(found.name):
        raise InvalidError(
            f"the recipe {file} has the name {found.name!r}",
            hint="use lower-case letters, digits and - for the name",
        )
    if found.parent and found.parent not in BUILT_IN:
        raise InvalidError(
            f"the recipe {file} builds on {found.parent!r}",
            hint=f"`from` is one of {', '.join(BUILT_IN)}, or left out",
        )
    for package in found.packages:
        if package.startswith("-") or not package.isprintable() or " " in package:
            raise InvalidError(f"the recipe {file} lists {package!r}, which is not a package")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_FINGERPRINT_DIGITS]


def _is_simple(name: str) -> bool:
    """Whether a name is an image name without a tag, and a directory name."""
    try:
        return canonical_name(name) == f"{name}:latest" and "/" not in name
    except InvalidError:
        return False
