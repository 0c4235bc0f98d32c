"""`paddock image`: images of sandboxes on this machine."""

from pathlib import Path

import click

from paddock.cli.context import with_target
from paddock.cli.output import Output, notes
from paddock.cli.target import CliTarget
from paddock.kit.errors import NotFoundError
from paddock.runtime.local.images.limits import ImageLimits
from paddock.runtime.local.images.store import ImageStore


def _store(target: CliTarget) -> ImageStore:
    settings = target.settings
    limits = ImageLimits(
        max_bytes=settings.image_max_bytes,
        max_entries=settings.image_max_entries,
        max_file_bytes=settings.image_max_file_bytes,
        max_ratio=settings.image_max_ratio,
    )
    return ImageStore(settings.state / "node" / "images", limits=limits)


@click.group()
def image() -> None:
    """List, build, import and delete images of this machine."""


@image.command("ls")
@with_target
def list_images(target: CliTarget, output: Output) -> None:
    """List images."""
    found = _store(target).images()
    output.rows(
        found,
        ("name", "layers", "size"),
        ((item.name, str(item.layers), f"{item.size_bytes >> 20} MB") for item in found),
    )


@image.command("build-base")
@with_target
def build_base(target: CliTarget, output: Output) -> None:
    """Build the image `base` from Debian packages, unless it exists."""
    with notes.status("building base") as status:
        image = _store(target).build_base(lambda text: status.update(f"base: {text}"))
    output.done(f"built {image.name}", {"name": image.name})


@image.command("import")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--name", help="Set the name of the image.  [default: the name in the archive]")
@with_target
def import_image(target: CliTarget, output: Output, source: Path, name: str | None) -> None:
    """Import an image or a root file system.

    An image is an OCI layout or archive, or the output of `podman save` or `docker save`. A root
    file system is a directory, or a tar such as the output of `docker export`.
    """
    with notes.status(f"importing {source}"):
        image = _store(target).add(source, name)
    output.done(f"imported {image.name}", {"name": image.name})


@image.command("rm")
@click.argument("name")
@with_target
def remove_image(target: CliTarget, output: Output, name: str) -> None:
    """Delete an image; its running sandboxes are not affected."""
    store = _store(target)
    if all(item.name not in (name, f"{name}:latest") for item in store.images()):
        raise NotFoundError(
            f"image {name!r} does not exist", hint="`paddock image ls` lists the images"
        )
    store.delete(name)
    output.done(f"deleted {name}", {"deleted": name})
