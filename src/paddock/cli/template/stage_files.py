"""Takes files out of stages and images that are built: a sandbox of each packs them."""

import shlex
import shutil
import string
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from paddock.cli.http import Endpoint
from paddock.cli.sandbox.envd_client import Shell, output_of
from paddock.cli.target import CliTarget, path_of
from paddock.cli.template.context import below_root, is_pattern
from paddock.kit.errors import InvalidError, PaddockError

_TIMEOUT_SECONDS = 3600
_ARCHIVE = "/tmp/.paddock-copy.tar"  # noqa: S108 - in a sandbox of its own
_MISSING = 44
_PLAIN = frozenset(string.ascii_letters + string.digits + "_./-*?[]^!")


class StageFiles:
    """Sandboxes of stages, created when files are taken from them and killed at the end."""

    def __init__(self, target: CliTarget, directory: Path) -> None:
        self._target = target
        self._directory = directory
        self._sandboxes: dict[str, tuple[str, Endpoint]] = {}
        self._count = 0

    def fetch(self, template: str, source: str) -> Path:
        """Return a tar of a path or a pattern in a template, with names relative to its root."""
        endpoint = self._endpoint(template)
        name = below_root(source)
        code, message = _run(Shell(endpoint, "root"), pack_command(name))
        if code == _MISSING:
            raise InvalidError(f"{source!r} does not exist in {template}")
        if code:
            raise InvalidError(
                f"{source!r} cannot be packed in {template}: {message or f'exit status {code}'}",
                hint="COPY --from needs tar and bash in the image of the stage",
            )
        self._count += 1
        path = self._directory / f"{self._count}.tar"
        query = f"/files?path={quote(_ARCHIVE)}&username=root"
        with endpoint.open("GET", query) as response, path.open("wb") as file:
            shutil.copyfileobj(response, file)
            if response.length:
                raise PaddockError(f"{source!r} of {template} is incomplete: the connection ended")
        return path

    def close(self) -> None:
        """Kill the sandboxes."""
        for sandbox_id, _ in self._sandboxes.values():
            with suppress(PaddockError):  # it ends by its timeout
                self._target.e2b.call("DELETE", path_of(sandbox_id))
        self._sandboxes.clear()

    def _endpoint(self, template: str) -> Endpoint:
        if template not in self._sandboxes:
            body = {"templateID": template, "timeout": _TIMEOUT_SECONDS}
            made = self._target.e2b.call("POST", "/v2/sandboxes", body)
            endpoint = self._target.sandbox(made["sandboxID"], made.get("envdAccessToken"))
            self._sandboxes[template] = (made["sandboxID"], endpoint)
        return self._sandboxes[template][1]


def pack_command(name: str) -> str:
    """Return the command that packs a path or a pattern, relative to the root."""
    target = shlex.quote(_ARCHIVE)
    if is_pattern(name):
        pattern = "".join(sign if sign in _PLAIN else f"\\{sign}" for sign in name)
        packed = f"shopt -s failglob; tar -cf {target} -- {pattern}"
        return f"cd / && compgen -G {shlex.quote(name)} >/dev/null || exit {_MISSING}; {packed}"
    word = shlex.quote(name)
    # A link that is named itself is followed, as Docker does; links below a directory stay links.
    return (
        f"cd / && if [ -d {word} ]; then tar -cf {target} -- {word}/.; "
        f"elif [ -e {word} ]; then tar -chf {target} -- {word}; else exit {_MISSING}; fi"
    )


def _run(shell: Shell, command: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed on standard error."""
    errors = bytearray()
    for event in shell.start(command):
        errors += output_of(event)[1]
        if end := event.get("end"):
            return int(end.get("exitCode", 0)), errors.decode(errors="replace").strip()
    raise PaddockError("the sandbox did not report the end of the command")


@contextmanager
def stage_files(target: CliTarget) -> Generator[StageFiles]:
    """Yield access to files of stages; their sandboxes and copies are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="paddock-build-") as directory:
        files = StageFiles(target, Path(directory))
        try:
            yield files
        finally:
            files.close()
