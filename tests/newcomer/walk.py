"""Runs the blocks of the documentation against a real `paddock up`, as a new user would.

Blocks run unchanged except for what differs on a machine that is shared: the state directory, the
cache, the ports, and the API key that `scripts/up` prints. All blocks share one working directory,
which is a checkout of the project, and the exported variables of earlier blocks.
"""

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paddock.runtime.local.images import base
from paddock.settings import Settings
from tests.api.kube.kubectl import binaries
from tests.interpreter import WHEELS
from tests.leaks import note_node
from tests.newcomer.blocks import ROOT, Block, console_steps, expected_output
from tests.ports import free_ports
from tests.runtime.local.nodes import traces
from tests.sdk.clients import LEAVE, NEWEST, NODE, NODE_CLIENTS, python_of

START_SECONDS = 100
BLOCK_SECONDS = 400
"""Blocks that install packages take minutes on a busy machine."""
READY = "Paddock is up"
_END = "\x1e"
"""Separates the output of commands."""
COPIED = ("scripts", "requirements", "examples", "pyproject.toml", "README.md", "LICENSE")


def _kubectl() -> list[str]:
    """Return the directory of kubectl, if it is not in PATH."""
    return [str(binary.parent) for binary in binaries()[:1]]


class Walk:
    """One installation, a shell session and a checkout."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="pdw"))
        self.state, self.cache = self.home / "state", self.home / "cache"
        self.checkout = self.home / "paddock"
        self.port, self.api_port, self.kube_port = free_ports(3)
        self._foreground: subprocess.Popen[bytes] | None = None
        self._session = self.home / "session.sh"
        self._key = ""
        note_node(self.state / "node")
        self._prepare_checkout()
        self._prepare_cache()

    def _prepare_checkout(self) -> None:
        """Make a clone, so that `git pull` works, with the virtual environment of the tests."""
        upstream = self.home / "upstream"
        upstream.mkdir()
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, upstream / name)
        git = ["git", "-c", "user.name=walk", "-c", "user.email=walk@localhost"]
        for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "A checkout.")):
            subprocess.run([*git, *words], cwd=upstream, check=True)
        subprocess.run(["git", "clone", "-q", upstream, self.checkout], check=True)
        stamp = Path(sys.prefix) / ".paddock-run"
        assert stamp.exists(), "`scripts/up` would install into this environment: run scripts/test"
        (self.checkout / ".venv").symlink_to(sys.prefix)

    def _prepare_cache(self) -> None:
        """Link the built artifacts: a page removes the cache at its end."""
        for name in ("criu", "images"):
            source = Path(Settings().cache_dir) / name
            if source.exists():
                subprocess.run(["cp", "-al", "--", source, _made(self.cache)], check=True)

    def provide_image(self, name: str) -> None:
        """Write an image as `docker export` does."""
        directory = base.minimal_rootfs(self.cache / "images")
        subprocess.run(["tar", "-C", directory, "-cf", self.checkout / name, "."], check=True)

    # ---- the session ---------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        ours = ("E2B", "PADDOCK")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return kept | {
            "PATH": ":".join((f"{sys.prefix}/bin", *_kubectl(), kept["PATH"])),
            "PADDOCK_STATE_DIR": str(self.state),
            "PADDOCK_RUN_DIR": str(self.home / "run"),
            "PADDOCK_CACHE_DIR": str(self.cache),
            "PADDOCK_CACHE": str(self.cache),
            "PADDOCK_PORT": str(self.port),
            "PADDOCK_API_PORT": str(self.api_port),
            "PADDOCK_KUBE_PORT": str(self.kube_port),
            "PADDOCK_POOL_SIZE": "2",
            "PADDOCK_GATEWAYS": "1",
            "PADDOCK_WHEELS": str(WHEELS),
            "NO_COLOR": "1",
        }

    def adapted(self, text: str) -> str:
        """Replace what differs on this machine."""
        for old, new in (
            ("/var/lib/paddock", str(self.state)),
            ("/var/cache/paddock", str(self.cache)),
            ("localhost:3000", f"localhost:{self.port}"),
            ("127.0.0.1:3001", f"127.0.0.1:{self.api_port}"),
            ("e2b_…", self._key),
        ):
            text = text.replace(old, new)
        return text

    def run(self, block: Block) -> None:
        """Run a block; fail if text and behaviour differ."""
        text = self.adapted(block.text)
        if name := block.marks.get("file"):
            (self.checkout / name).write_text(text)
        elif text == "scripts/up\n":
            self.start()
        elif block.language == "sh":
            self.shell(text, block.exit_code, types=block.marks.get("types"))
        elif block.language == "console":
            self._console(text, block.exit_code)
        elif block.language == "python":
            self._program([python_of(NEWEST), "-c", text + LEAVE], text)
        elif block.language == "js":
            program = self.checkout / "program.mjs"
            program.write_text(text)
            modules = self.checkout / "node_modules"
            if not modules.is_symlink():
                modules.symlink_to(NODE_CLIENTS / "node_modules")
            self._program([NODE, program], text)
        elif block.language == "yaml":
            self.shell(f"paddock apply -f - <<'END'\n{text}END\n")
        else:
            raise AssertionError(f"no way to run a block of the language {block.language!r}")
        for check in block.checks:
            self.shell(self.adapted(check))

    def _console(self, text: str, exit_code: int) -> None:
        """Run the commands of a terminal: one that fails ends nothing, and `$?` is its code."""
        steps = console_steps(text)
        script = "".join(
            f"{command}\ncode=$?; printf '%s' '{_END}'; (exit $code)\n" for command, _ in steps
        )
        *outputs, rest = self.shell(f"set +e\n{script}", exit_code).split(_END)
        assert len(outputs) == len(steps), f"the session ended early:\n{rest[-3000:]}"
        for output, (_, lines) in zip(outputs, steps, strict=True):
            _require(output, lines)

    def _program(self, command: list[object], text: str) -> None:
        words = shlex.join(str(word) for word in command)
        _require(self.shell(words), expected_output(text))

    def shell(self, text: str, exit_code: int = 0, *, types: str | None = None) -> str:
        """Run commands in the session; return what they print."""
        session = shlex.quote(str(self._session))
        script = (
            f"set -eu -o pipefail; [ ! -f {session} ] || . {session}\n"
            f"trap 'code=$?; export -p > {session}; exit $code' EXIT\n{text}"
        )
        code, output = self._execute(["bash", "-c", script], types)
        assert code == exit_code, f"exit code {code} instead of {exit_code}:\n{output[-3000:]}"
        return output

    def _execute(self, command: list[str], types: str | None) -> tuple[int, str]:
        """Run a command, with a terminal if it asks a question."""
        if types is None:
            done = subprocess.run(
                command,
                cwd=self.checkout,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=BLOCK_SECONDS,
                check=False,
            )
            return done.returncode, done.stdout.decode(errors="replace")
        leader, terminal = pty.openpty()
        try:
            process = subprocess.Popen(
                command,
                cwd=self.checkout,
                env=self.environment,
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )
            os.close(terminal)
            os.write(leader, f"{types}\n".encode())
            output = _read_all(leader)
            return process.wait(BLOCK_SECONDS), output
        finally:
            os.close(leader)

    # ---- start and stop ------------------------------------------------------------------

    def start(self) -> None:
        """Run `scripts/up` in a terminal of its own until it prints how to connect."""
        log = self.home / "up.log"
        with log.open("wb") as output:
            self._foreground = subprocess.Popen(
                ["scripts/up"],
                cwd=self.checkout,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while READY not in log.read_text() or "E2B_API_KEY=" not in log.read_text():
            assert self._foreground.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        [self._key] = re.findall(r"export E2B_API_KEY=(\S+)", log.read_text())

    def interrupt(self) -> None:
        """Press Ctrl-C where `scripts/up` runs."""
        if self._foreground is None:
            return
        os.killpg(self._foreground.pid, signal.SIGINT)
        code = self._foreground.wait(60)
        self._foreground = None
        assert code == 0, (self.home / "up.log").read_text()[-3000:]

    def remove(self) -> None:
        """Remove everything from the machine."""
        try:
            self.interrupt()
        finally:
            number = self.state / "node" / "net" / "number"
            with contextlib.suppress(FileNotFoundError):
                network = int(number.read_text())
                self.shell("paddock down --purge --yes")
                _until_gone(self.state / "node", network)
            shutil.rmtree(self.home)


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def _read_all(terminal: int) -> str:
    """Read from a terminal until its last process closes it."""
    data = b""
    deadline = time.monotonic() + BLOCK_SECONDS
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            chunk = os.read(terminal, 65536)
        except OSError:
            break
        if not chunk:
            break
        data += chunk
    return data.decode(errors="replace")


def _require(output: str, lines: list[re.Pattern[str]]) -> None:
    """Fail unless the lines were printed, in this order."""
    rest = output.splitlines()
    for line in lines:
        while rest and not line.fullmatch(rest[0].strip()):
            rest.pop(0)
        assert rest, f"no line like {line.pattern!r} in:\n{output[-3000:]}"


def _until_gone(state: Path, network: int) -> None:
    """Wait for orphans: they remain until the init process of the machine reaps them."""
    deadline = time.monotonic() + 60
    while any((left := traces(state, network)).values()):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
