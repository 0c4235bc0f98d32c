"""The files of template builds of an installation: logs and uploads, with credentials in memory."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from paddock.builds.credentials import BuildCredentials
from paddock.builds.logs import BuildLogs
from paddock.builds.uploads import Uploads, any_room
from paddock.kit.clock import Clock


class BuildFiles(Struct, frozen=True, kw_only=True, eq=False):
    """Data of builds outside the store. The API and the controllers of a process share it."""

    logs: BuildLogs
    uploads: Uploads
    credentials: BuildCredentials

    @classmethod
    def below(
        cls,
        directory: Path,
        clock: Clock,
        *,
        ensure_room: Callable[[str, int], None] | None = None,
    ) -> "BuildFiles":
        """Return the files below a directory. Nothing is created before it is used.

        `ensure_room` raises `DiskFullError` if the disk has no room for so many bytes.
        """
        return cls(
            logs=BuildLogs(directory / "logs", clock, ensure_room=ensure_room),
            uploads=Uploads(directory / "uploads", clock, ensure_room=ensure_room or any_room),
            credentials=BuildCredentials(),
        )
