"""The output of `paddock up`: progress during the start, then how to connect."""

import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from paddock.app.up import interpreter, supervisor
from paddock.app.up.progress import PipeProgress, Progress, open_progress
from paddock.app.wiring.secrets import Secrets, load_or_create
from paddock.kit import logs
from paddock.kit.errors import PaddockError, UnavailableError, UnsupportedError
from paddock.runtime.local.images.base import build_base, is_built, keep_private, usable_directory
from paddock.runtime.local.images.debian.recipe import BUILT_IN, built_in
from paddock.runtime.local.images.debian.work import remove_abandoned
from paddock.settings import Settings, require_loopback_or_consent

notes = Console(stderr=True, highlight=False)

USAGE = """
[bold]Paddock is up[/] at {url}   (stop with {stop}; sandboxes are kept)

  export E2B_API_URL={url} E2B_SANDBOX_URL={url}{domain}
  export E2B_API_KEY={key}

  python -c 'from e2b import Sandbox; print(Sandbox.create().commands.run("echo hello").stdout)'
{interpreter}
  {paddock} status | sandbox ls | sandbox create | doctor
"""


WITHOUT_INTERPRETER = """
  {paddock} template install code-interpreter     installs run_code(), once
"""


def up(settings: Settings, config: Path | None, *, as_json: bool, detach: bool) -> int:
    """Start everything and print how to connect; return when it is stopped."""
    require_loopback_or_consent(settings)
    _require_root(settings)
    prepare_image(settings, is_silent=as_json)
    if detach:
        return _in_background(settings, config, as_json=as_json)
    progress = open_progress(notes, is_silent=as_json)
    is_purged = _run(
        settings, config, progress, lambda secrets: _print_usage(settings, secrets, as_json=as_json)
    )
    if not as_json:
        kept = "sandboxes are kept for the next `paddock up`"
        notes.print(
            f"stopped; {'`paddock down --purge` kills all sandboxes' if is_purged else kept}"
        )
    return 0


def _run(
    settings: Settings, config: Path | None, progress: Progress, on_ready: Callable[[Secrets], None]
) -> bool:
    """Run until stopped; return whether a purge follows."""
    logs.configure(level="warning")
    with progress:

        def ready(secrets: Secrets) -> None:
            progress.stop()
            on_ready(secrets)

        once_ready = None
        if settings.code_interpreter and settings.runtime == "local":
            once_ready = functools.partial(interpreter.install, settings, config, _say)
        return supervisor.run(
            settings, config, progress=progress, on_ready=ready, once_ready=once_ready
        )


def _say(text: str) -> None:
    notes.print(text, markup=False, soft_wrap=True)


def _require_root(settings: Settings) -> None:
    unprepared = settings.state_dir == Settings().state_dir
    if settings.runtime == "local" and os.geteuid() != 0 and unprepared:
        raise UnsupportedError(
            "limits, networks and checkpoints of sandboxes need root",
            hint="run with sudo; or, without these features, set PADDOCK_STATE_DIR and "
            "PADDOCK_RUN_DIR to directories of your own and PADDOCK_DEFAULT_IMAGE=host",
        )


def prepare_image(settings: Settings, *, is_silent: bool) -> None:
    """Build the default image if it is built in and missing. It takes a minute or two, once.

    An installation that was upgraded without access to a package mirror keeps its older image.
    """
    cache = settings.image_cache
    if settings.runtime == "local":
        keep_private(cache)
        remove_abandoned(cache)
    name = settings.default_image
    if settings.runtime != "local" or name not in BUILT_IN or is_built(cache, name=name):
        return
    with open_progress(notes, is_silent=is_silent) as progress:
        progress.step(f"building the {name} image (once; a minute or two)")
        try:
            build_base(
                cache,
                recipe=built_in(name),
                progress=lambda text: progress.step(f"{name} image: {text}"),
            )
        except PaddockError as error:
            if (older := usable_directory(cache, name=name)) is None:
                raise
            progress.stop()
            notes.print(f"the {name} image could not be rebuilt: {error.message}", soft_wrap=True)
            notes.print(f"using the older {older}; hint: {error.hint}", soft_wrap=True)


def _print_usage(
    settings: Settings, secrets: Secrets, *, as_json: bool, pid: int | None = None
) -> None:
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
        # Clients prefix the names of sandboxes, which is not possible with an IP address.
        domain = settings.domain or (f"{host}:{settings.port}" if host == "localhost" else "")
        text = USAGE.format(
            url=url,
            key=secrets.api_key,
            domain=f" E2B_DOMAIN={domain}" if domain else "",
            stop=f"`{paddock} down`" if pid else "Ctrl-C",
            paddock=paddock,
            interpreter=_interpreter_note(settings, url, secrets, paddock),
        )
        notes.print(text, soft_wrap=True)


def _interpreter_note(settings: Settings, url: str, secrets: Secrets, paddock: str) -> str:
    """Return how to install the code interpreter, unless it is there or being installed."""
    if settings.runtime != "local" or settings.code_interpreter:
        return ""
    if interpreter.is_installed(url, secrets.api_key):
        return ""
    return WITHOUT_INTERPRETER.format(paddock=paddock)


def _command() -> str:
    """Return how to call `paddock`: its path, if it is not in PATH."""
    beside = Path(sys.executable).with_name("paddock")
    return "paddock" if shutil.which("paddock") or not beside.exists() else str(beside)


def _in_background(settings: Settings, config: Path | None, *, as_json: bool) -> int:
    """Start the supervisor in the background; return when everything is up."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        _detach_standard_streams(settings)

        pipe = PipeProgress(writing)

        def ready(secrets: Secrets) -> None:
            pipe.send("up", str(os.getpid()))
            os.close(writing)

        try:
            _run(settings, config, pipe, ready)
        except PaddockError as error:
            pipe.send("error", msgspec.json.encode([error.message, error.hint]).decode())
            os._exit(1)
        except Exception as error:  # noqa: BLE001 - the parent shows it, whatever it is
            pipe.send("error", msgspec.json.encode([repr(error), None]).decode())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    kind, text = _replay(reading, open_progress(notes, is_silent=as_json))
    if kind == "error":
        message, hint = msgspec.json.decode(text, type=tuple[str, str | None])
        raise UnavailableError(message, hint=hint)
    _print_usage(settings, load_or_create(settings), as_json=as_json, pid=int(text))
    return 0


def _replay(descriptor: int, progress: Progress) -> tuple[str, str]:
    """Show the progress that the supervisor sends; return its last message."""
    with progress, os.fdopen(descriptor) as lines:
        for line in lines:
            last = PipeProgress.replay(line, progress)
            if last is not None:
                return last
    raise UnavailableError(
        "the supervisor exited during the start", hint="see logs/up.log in the state directory"
    )


def _detach_standard_streams(settings: Settings) -> None:
    log = settings.state / "logs" / "up.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
