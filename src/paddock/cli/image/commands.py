"""`paddock image`: images of sandboxes on this machine."""

from pathlib import Path

import click

from paddock.cli.context import with_target
from paddock.cli.image import pull
from paddock.cli.output import Output, notes
from paddock.cli.target import CliTarget
from paddock.kit.errors import NotFoundError
from paddock.runtime.local.images.limits import ImageLimits
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.storage.reserve import DiskReserve


def _store(target: CliTarget) -> ImageStore:
    settings = target.settings
    limits = ImageLimits(
        max_bytes=settings.image_max_bytes,
        max_entries=settings.image_max_entries,
        max_file_bytes=settings.image_max_file_bytes,
        max_ratio=settings.image_max_ratio,
    )
    root = settings.state / "node" / "images"
    return ImageStore(root, limits=limits, reserve=DiskReserve(root, settings.disk_reserve_bytes))


@click.group()
def image() -> None:
    """List, build, pull, import and delete images of this host."""


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


@image.command("pull")
@click.argument("reference")
@with_target
def pull_image(target: CliTarget, output: Output, reference: str) -> None:
    """Pull an image from a registry, such as python:3.12.

    Credentials are read from the file of the setting registry_config. A pull that was interrupted
    continues with what it has downloaded.
    """
    pulled = pull.run(target.settings, _store(target), reference)
    item = {"name": pulled.image.name, "digest": pulled.digest, "new": pulled.is_new}
    verb = "pulled" if pulled.is_new else "already current:"
    output.done(f"{verb} {pulled.image.name}@{pulled.digest}", item)


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
