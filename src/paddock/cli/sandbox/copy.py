"""Copies files into and out of sandboxes; an incomplete copy is an error."""

import os
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from paddock.cli.output import notes
from paddock.cli.target import CliTarget
from paddock.kit.errors import UnavailableError

_CHUNK = 1 << 20


def copied(target: CliTarget, source: str, destination: str) -> int:
    """Copy one file into or out of a sandbox; return its size in bytes."""
    from_id, _, from_path = source.partition(":")
    to_id, to_colon, to_path = destination.partition(":")
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
        endpoint = target.envd(to_id)
        if to_path.endswith("/") or not to_path:
            to_path += Path(source).name
        with Path(source).open("rb") as plain, progress:
            found = os.fstat(plain.fileno())
            # The size of a pipe is unknown until its end.
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
        endpoint = target.envd(from_id)
        size = 0
        local = Path(destination)
        if local.is_dir():
            local /= Path(from_path).name
        with endpoint.open("GET", f"/files?path={quote(from_path)}") as response, progress:
            task = progress.add_task(local.name, total=response.length)
            with local.open("wb") as file:
                while chunk := response.read(_CHUNK):
                    size += file.write(chunk)
                    progress.update(task, completed=size)
            if response.length:
                raise UnavailableError(f"{local} is incomplete: the sandbox closed the connection")
    return size


class _Counted:
    """A file that counts the bytes read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        """Read and count."""
        data = self._file.read(size)
        self.count += len(data)
        return data
