"""`paddock image`: what sandboxes of this machine are made of."""

from pathlib import Path

import click

from paddock.cli.context import with_place
from paddock.cli.output import Output, notes
from paddock.cli.target import Place
from paddock.kit.errors import NotFoundError
from paddock.runtime.local.images.store import ImageStore


def _store(place: Place) -> ImageStore:
    return ImageStore(place.settings.state / "node" / "images")


@click.group()
def image() -> None:
    """Images of this machine: list, build, import, delete."""


@image.command("ls")
@with_place
def list_images(place: Place, output: Output) -> None:
    """List images."""
    found = _store(place).images()
    output.rows(
        found,
        ("name", "layers", "size"),
        ((item.name, str(item.layers), f"{item.size_bytes >> 20} MB") for item in found),
    )


@image.command("build-base")
@with_place
def build_base(place: Place, output: Output) -> None:
    """Build the image `base` from Debian packages; quick when it is there."""
    with notes.status("building base") as status:
        made = _store(place).build_base(lambda text: status.update(f"base: {text}"))
    output.done(f"built {made.name}", {"name": made.name})


@image.command("import")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--name", help="What to call it.  [default: what the archive says]")
@with_place
def import_image(place: Place, output: Output, source: Path, name: str | None) -> None:
    """Import an image (an OCI layout or archive, what `podman save` or `docker save` wrote) or a
    root file system (a directory, or a tar such as `docker export` writes)."""
    with notes.status(f"importing {source}"):
        made = _store(place).add(source, name)
    output.done(f"imported {made.name}", {"name": made.name})


@image.command("rm")
@click.argument("name")
@with_place
def remove_image(place: Place, output: Output, name: str) -> None:
    """Delete an image; sandboxes that run from it go on."""
    store = _store(place)
    if all(item.name not in (name, f"{name}:latest") for item in store.images()):
        raise NotFoundError(f"there is no image {name!r}", hint="`paddock image ls` lists them")
    store.delete(name)
    output.done(f"deleted {name}", {"deleted": name})
