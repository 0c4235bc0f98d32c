"""Copying files into sandboxes and out of them; a copy that is not whole is an error."""

import os
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from paddock.cli.output import notes
from paddock.cli.target import Place
from paddock.kit.errors import UnavailableError

_CHUNK = 1 << 20


def copied(place: Place, source: str, target: str) -> int:
    """Copy one file into a sandbox or out of it; gives its size."""
    from_id, _, from_path = source.partition(":")
    to_id, to_colon, to_path = target.partition(":")
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
    if to_colon:
        endpoint = place.inside(to_id)
        if to_path.endswith("/") or not to_path:
            to_path += Path(source).name
        with Path(source).open("rb") as plain, progress:
            found = os.fstat(plain.fileno())
            # How much a pipe will give is known at its end alone.
            size = found.st_size if stat.S_ISREG(found.st_mode) else None
            headers = {"Content-Type": "application/octet-stream"}
            if size is not None:
                headers["Content-Length"] = str(size)
            file = _Counted(
                progress.wrap_file(plain, total=size or 0, description=Path(source).name)
            )
            endpoint.call("POST", f"/files?path={quote(to_path)}", file, headers=headers)
            size = file.count
    else:
        endpoint = place.inside(from_id)
        size = 0
        here = Path(target)
        if here.is_dir():
            here /= Path(from_path).name
        with endpoint.open("GET", f"/files?path={quote(from_path)}") as response, progress:
            task = progress.add_task(here.name, total=response.length)
            with here.open("wb") as file:
                while chunk := response.read(_CHUNK):
                    size += file.write(chunk)
                    progress.update(task, completed=size)
            if response.length:
                raise UnavailableError(f"{here} is incomplete: the sandbox broke off")
    return size


class _Counted:
    """A file that knows how much of it was read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        """Read on."""
        data = self._file.read(size)
        self.count += len(data)
        return data
