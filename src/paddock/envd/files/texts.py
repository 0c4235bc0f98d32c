"""Small text files of the system that envd changes in the sandbox."""

import contextlib
import os
import stat

from paddock.envd.files import paths

_MAX_BYTES = 8 << 20


def read(path: str) -> str:
    """Return the text of a file; `OSError` if it is not regular or too large."""
    try:
        fd = paths.open_regular(path, os.O_RDONLY)
    except paths.NotRegularError as error:
        raise OSError(f"{path} is not a regular file") from error
    with os.fdopen(fd, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise OSError(f"{path} is larger than {_MAX_BYTES} bytes")
    return data.decode(errors="surrogateescape")


def replace(path: str, text: str, *, mode: int | None = None) -> None:
    """Write a file under another name, then rename it: readers see the old text or the new one."""
    if mode is None:
        mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.exists(path) else 0o644
    temporary = f"{os.path.dirname(path)}/.{os.path.basename(path)}.paddock"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode(errors="surrogateescape"))
            os.fchmod(file.fileno(), mode)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
