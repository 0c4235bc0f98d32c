"""Saves the images that code displays."""

from pathlib import Path

from paddock.kit.errors import PaddockError
from paddock.run_code.events import CodeResult


class ImageFiles:
    """The images of one run: `chart-1.png`, `image-1.png`, …; no file is overwritten."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._next = {"chart": 1, "image": 1}

    def save(self, result: CodeResult) -> Path | None:
        """Save the image of a result; return its path, or None if it has none."""
        found = _content(result)
        if found is None:
            return None
        suffix, data = found
        kind = "chart" if result.chart is not None else "image"
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
