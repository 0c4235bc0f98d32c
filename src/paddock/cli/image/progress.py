"""Bars for the layers of an image that is pulled or pushed, one per layer."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from paddock.cli.output import notes
from paddock.runtime.local.images.registry.puller import LayerProgress, OnProgress

_SHOWN_DIGITS = 12


@contextmanager
def layer_bars() -> Generator[OnProgress]:
    """Show bars until the end of the block; the result is called with the progress of a layer."""
    bars: dict[str, TaskID] = {}
    with _progress() as progress:

        def show(layer: LayerProgress) -> None:
            label = layer.digest.removeprefix("sha256:")[:_SHOWN_DIGITS]
            if layer.digest not in bars:
                bars[layer.digest] = progress.add_task(label, total=layer.total_bytes, state="")
            progress.update(
                bars[layer.digest],
                completed=layer.done_bytes,
                total=layer.total_bytes,
                state=layer.state,
            )

        yield show


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[state]}"),
        console=notes,
        transient=True,
    )
