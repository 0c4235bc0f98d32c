"""What `paddock up` shows: progress while things start, then how to use them."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from paddock.app.up import supervisor as installation
from paddock.app.up.progress import Pipe, Told, teller
from paddock.app.wiring.secrets import Secrets, load_or_create
from paddock.kit import logs
from paddock.kit.errors import PaddockError, UnavailableError, UnsupportedError
from paddock.runtime.local.images.base import build_base, is_built
from paddock.settings import Settings

notes = Console(stderr=True, highlight=False)

HOW = """
[bold]Paddock is up[/] at {url}   (stop with {stop}; sandboxes are kept)

  export E2B_API_URL={url} E2B_SANDBOX_URL={url}{domain}
  export E2B_API_KEY={key}

  python -c 'from e2b import Sandbox; print(Sandbox.create().commands.run("echo hello").stdout)'

  {paddock} status | sandbox ls | sandbox create | doctor
"""


def up(settings: Settings, config: Path | None, *, as_json: bool, detach: bool) -> int:
    """Start everything and say how to use it; ends when it is stopped."""
    _refuse_without_root(settings)
    _prepare_image(settings, is_silent=as_json)
    if detach:
        return _in_background(settings, config, as_json=as_json)
    told = teller(notes, is_silent=as_json)
    _run(settings, config, told, lambda secrets: _tell(settings, secrets, as_json=as_json))
    if not as_json:
        notes.print("stopped; sandboxes are kept for the next `paddock up`")
    return 0


def _run(
    settings: Settings, config: Path | None, told: Told, on_ready: Callable[[Secrets], None]
) -> None:
    logs.configure(level="warning")
    with told:

        def ready(secrets: Secrets) -> None:
            told.stop()
            on_ready(secrets)

        installation.run(settings, config, teller=told, on_ready=ready)


def _refuse_without_root(settings: Settings) -> None:
    unprepared = settings.state_dir == Settings().state_dir
    if settings.runtime == "local" and os.geteuid() != 0 and unprepared:
        raise UnsupportedError(
            "sandboxes with limits, addresses and checkpoints need root",
            hint="run with sudo, or set PADDOCK_STATE_DIR and PADDOCK_RUN_DIR to directories of "
            "your own and PADDOCK_DEFAULT_IMAGE=host for what works without",
        )


def _prepare_image(settings: Settings, *, is_silent: bool) -> None:
    """Build the base image where it is wanted and missing: once, a minute or two."""
    cache = Path(settings.cache_dir) / "images"
    if settings.runtime != "local" or settings.default_image != "base" or is_built(cache):
        return
    with teller(notes, is_silent=is_silent) as told:
        told.say("building the base image: once, a minute or two")
        build_base(cache, progress=lambda text: told.say(f"base image: {text}"))


def _tell(settings: Settings, secrets: Secrets, *, as_json: bool, pid: int | None = None) -> None:
    host = "localhost" if settings.host in ("127.0.0.1", "0.0.0.0") else settings.host  # noqa: S104 - compared
    url = f"http://{host}:{settings.port}"
    if as_json:
        line = msgspec.json.encode(
            {"url": url, "apiKey": secrets.api_key, "pid": pid or os.getpid()}
        )
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()
    else:
        paddock = _command()
        # Clients put sandboxes' names in front of it, which goes with no address in numbers.
        domain = settings.domain or (f"{host}:{settings.port}" if host == "localhost" else "")
        told = HOW.format(
            url=url,
            key=secrets.api_key,
            domain=f" E2B_DOMAIN={domain}" if domain else "",
            stop=f"`{paddock} down`" if pid else "Ctrl-C",
            paddock=paddock,
        )
        notes.print(told, soft_wrap=True)


def _command() -> str:
    """Give what to type for `paddock`: where it was installed, if no shell would find it."""
    beside = Path(sys.executable).with_name("paddock")
    return "paddock" if shutil.which("paddock") or not beside.exists() else str(beside)


def _in_background(settings: Settings, config: Path | None, *, as_json: bool) -> int:
    """Leave a supervisor behind, and return when everything is up."""
    listening, telling = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(listening)
        os.setsid()
        _detach_standard_streams(settings)

        pipe = Pipe(telling)

        def ready(secrets: Secrets) -> None:
            pipe.send("up", str(os.getpid()))
            os.close(telling)

        try:
            _run(settings, config, pipe, ready)
        except PaddockError as error:
            pipe.send("error", msgspec.json.encode([error.message, error.hint]).decode())
            os._exit(1)
        except Exception as error:  # noqa: BLE001 - the parent shows it, whatever it is
            pipe.send("error", msgspec.json.encode([repr(error), None]).decode())
            os._exit(1)
        os._exit(0)
    os.close(telling)
    word, text = _listen(listening, teller(notes, is_silent=as_json))
    if word == "error":
        message, hint = msgspec.json.decode(text, type=tuple[str, str | None])
        raise UnavailableError(message, hint=hint)
    _tell(settings, load_or_create(settings), as_json=as_json, pid=int(text))
    return 0


def _listen(descriptor: int, told: Told) -> tuple[str, str]:
    """Show what the supervisor tells of its start; gives its last word."""
    with told, os.fdopen(descriptor) as lines:
        for line in lines:
            last = Pipe.pass_on(line, told)
            if last is not None:
                return last
    raise UnavailableError(
        "it ended while it started", hint="look at logs/up.log in the state directory"
    )


def _detach_standard_streams(settings: Settings) -> None:
    log = settings.state / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
