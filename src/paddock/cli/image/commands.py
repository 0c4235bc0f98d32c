"""`paddock image`: images of sandboxes on this machine."""

import asyncio
from pathlib import Path

import click

from paddock.cli.context import with_target
from paddock.cli.image import registry
from paddock.cli.image.listing import listed_images
from paddock.cli.output import Output, notes
from paddock.cli.target import CliTarget
from paddock.kit.errors import NotFoundError
from paddock.runtime.image_settings import image_settings
from paddock.runtime.local.driver import LocalRuntime
from paddock.runtime.local.images.debian.recipe import BUILT_IN, built_in_file, read_recipe
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.storage.reserve import DiskReserve


def _store(target: CliTarget) -> ImageStore:
    settings = target.settings
    limits = image_settings(settings).limits
    root = settings.state / "node" / "images"
    reserve = DiskReserve(root, settings.disk_reserve_bytes)
    return ImageStore(root, base_cache=settings.image_cache, limits=limits, reserve=reserve)


@click.group()
def image() -> None:
    """List, build, pull, push, import and delete images of this host."""


@image.command("ls")
@with_target
def list_images(target: CliTarget, output: Output) -> None:
    """List images, and how many sandboxes of this host use them."""
    found = listed_images(_store(target), target.settings.state / "node")
    output.rows(
        found,
        ("name", "layers", "size", "used by", "last used", "digest"),
        (
            (
                item.name,
                str(item.layers),
                f"{item.size_bytes >> 20} MB",
                item.used_by,
                item.last_used.strftime("%Y-%m-%d %H:%M") if item.last_used else "",
                item.digest[:19],
            )
            for item in found
        ),
    )


@image.command("build-base")
@click.argument("name", type=click.Choice(BUILT_IN), default=BUILT_IN[0])
@click.option(
    "--recipe",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Build the image of this recipe.",
)
@click.option("--print", "is_printed", is_flag=True, help="Print the recipe of NAME and stop.")
@with_target
def build_base(
    target: CliTarget, output: Output, name: str, recipe: Path | None, *, is_printed: bool
) -> None:
    """Build the image `base` or `minimal` from Debian packages, unless it exists.

    A recipe of your own is a file like the one that --print shows.
    """
    file = recipe or built_in_file(name)
    if is_printed:
        click.echo(file.read_text(), nl=False)
        return
    wanted = read_recipe(file)
    with notes.status(f"building {wanted.name}") as status:
        image = _store(target).build_base(
            lambda text: status.update(f"{wanted.name}: {text}"), recipe=wanted
        )
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
    pulled = registry.pull(target.settings, _store(target), reference)
    item = {"name": pulled.image.name, "digest": pulled.digest, "new": pulled.is_new}
    verb = "pulled" if pulled.is_new else "already current:"
    output.done(f"{verb} {pulled.image.name}@{pulled.digest}", item)


@image.command("push")
@click.argument("name")
@click.argument("reference")
@with_target
def push_image(target: CliTarget, output: Output, name: str, reference: str) -> None:
    """Push the image NAME to a registry, such as registry.example/tools:1.

    Credentials are read from the file of the setting registry_config. Layers that the registry has
    are not sent. Other tools can pull the image; it is for the platform of this machine.
    """
    pushed = registry.push(target.settings, _store(target), name, reference)
    item = {"name": pushed.name, "digest": pushed.digest, "sentBytes": pushed.sent_bytes}
    output.done(f"pushed {pushed.name}@{pushed.digest}", item)


@image.command("prune")
@with_target
def prune_images(target: CliTarget, output: Output) -> None:
    """Delete pulled images that no template, sandbox or snapshot needs.

    Images that were used within five minutes stay. The node releases the layers within two minutes.
    """
    removed = asyncio.run(_prune(target))
    output.rows(removed, ("deleted",), ((name,) for name in removed))


async def _prune(target: CliTarget) -> tuple[str, ...]:
    runtime = LocalRuntime(target.settings.node_socket)
    try:
        return await runtime.prune_images()
    finally:
        runtime.close()


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
