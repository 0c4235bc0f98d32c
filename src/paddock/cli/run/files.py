"""Saves the images that code displays."""

from pathlib import Path

from paddock.kit.errors import PaddockError, TooLargeError
from paddock.run_code.events import CodeResult

MAX_FILES = 1000
MAX_BYTES = 1 << 30


class ImageFiles:
    """The images of one run: `chart-1.png`, `image-1.png`, …; no file is overwritten.

    Code in a sandbox must not fill the disk of this machine: `TooLargeError` beyond the limits.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = self._bytes = 0
        self._next = {"chart": 1, "image": 1}

    def save(self, result: CodeResult) -> Path | None:
        """Save the image of a result; return its path, or None if it has none."""
        found = _content(result)
        if found is None:
            return None
        suffix, data = found
        self._files += 1
        self._bytes += len(data)
        if self._files > MAX_FILES or self._bytes > MAX_BYTES:
            raise TooLargeError(
                f"the code shows more than {MAX_FILES} images, or {MAX_BYTES >> 20} MiB of them",
                hint="save them in the sandbox, and download them from there",
            )
        kind = "chart" if result.is_chart else "image"
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            path = self._directory / f"{kind}-{self._next[kind]}.{suffix}"
            self._next[kind] += 1
            try:
                file = path.open("xb")
            except FileExistsError:
                continue
            with file:
                file.write(data)
            return path


def _content(result: CodeResult) -> tuple[str, bytes] | None:
    """Return the suffix and the bytes of the image of a result."""
    image = result.image()
    if image is None:
        return ("svg", result.svg.encode()) if result.svg else None
    data = image.decoded()
    if data is None:
        raise PaddockError(f"the sandbox sent an image ({image.mime}) that cannot be decoded")
    return image.suffix, data
