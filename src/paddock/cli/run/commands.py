"""`paddock run`: run a script or code in a new sandbox, and show what it returns."""

import asyncio
import signal
import sys
from contextlib import aclosing
from pathlib import Path

import click
from msgspec import Struct

from paddock.cli.click_ext import examples, pairs
from paddock.cli.context import with_target
from paddock.cli.output import Output
from paddock.cli.run.files import ImageFiles
from paddock.cli.run.report import JsonReport, RunReport, TextReport
from paddock.cli.run.sandbox import RunSandbox, SandboxOrder, new_sandbox
from paddock.cli.run.source import LANGUAGES, CodeSource, read
from paddock.cli.target import CliTarget
from paddock.kit.errors import PaddockError, UnsupportedError
from paddock.run_code.client import PORT, TEMPLATE, CodeInterpreter
from paddock.run_code.events import CodeError
from paddock.run_code.http import sandbox_session

_SPARE_SECONDS = 60
"""The sandbox lives that much longer than its code may run."""


class _CodeCommand(click.Command):
    """Everything behind the file belongs to the code, as with Python."""

    allow_interspersed_args = False


class _RunOptions(Struct, frozen=True):
    order: SandboxOrder
    timeout_seconds: int
    keep: bool


@click.command(
    "run",
    cls=_CodeCommand,
    epilog=examples(
        "paddock run analysis.py 2026 --fast",
        "paddock run -c 'import sys; print(sys.version)'",
        "curl -s https://example.com/job.py | paddock run --timeout 3600 -",
        "paddock run --language bash -c 'echo $GREETING' --env GREETING=hello",
        "paddock run -o json --output-dir charts plot.py",
    ),
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[FILE|-] [ARGUMENTS]...")
@click.option("--code", "-c", help="Run this code instead of a file.")
@click.option(
    "--language",
    "-l",
    type=click.Choice(sorted(set(LANGUAGES.values()))),
    help="Language of the code.  [default: by the suffix of the file, else python]",
)
@click.option(
    "--template",
    "-t",
    default=TEMPLATE,
    show_default=True,
    help="Create the sandbox from this template, which must have a code interpreter.",
)
@click.option("--env", "-e", multiple=True, help="Set an environment variable NAME=VALUE.")
@click.option(
    "--timeout",
    default=300,
    show_default=True,
    type=click.IntRange(min=1),
    help="Interrupt the code after this many seconds.",
)
@click.option(
    "--output-dir",
    "-d",
    default=Path(),
    type=click.Path(file_okay=False, path_type=Path),
    help="Save charts and images in this directory.  [default: the current directory]",
)
@click.option("--keep", is_flag=True, help="Keep the sandbox until its timeout and print its id.")
@with_target
def run(
    target: CliTarget,
    output: Output,
    words: tuple[str, ...],
    code: str | None,
    language: str | None,
    template: str,
    env: tuple[str, ...],
    timeout: int,
    output_dir: Path,
    keep: bool,
) -> None:
    """Run code in a new sandbox; print its output and its result.

    FILE is a script, or - for standard input. Charts and images are saved as chart-1.png,
    image-1.png and so on. The exit code is that of the code: 0, 1 after an exception, or N after
    sys.exit(N). The sandbox is killed at the end. Options come before FILE.
    """
    source = read(code, words, language)
    order = SandboxOrder(template, pairs(env, "--env"), timeout + _SPARE_SECONDS)
    images = ImageFiles(output_dir)
    report = JsonReport(images, output) if output.is_json else TextReport(images)
    try:
        asyncio.run(_run(target, source, report, _RunOptions(order, timeout, keep)))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    sys.exit(report.exit_code)


async def _run(
    target: CliTarget, source: CodeSource, report: RunReport, options: _RunOptions
) -> None:
    """Run the code in a sandbox of its own; SIGTERM and Ctrl-C kill the sandbox too."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with new_sandbox(target, options.order, keep=options.keep) as box:
        if options.keep:
            left = options.order.timeout_seconds
            report.note(f"sandbox {box.id} is kept and ends in {left} s")
        try:
            await _run_in(box, target, source, report, options.timeout_seconds)
        except PaddockError as error:
            report.exit_code = 1
            report.finish(box.id)
            if isinstance(error, UnsupportedError):
                error.hint = f"paddock run --template {TEMPLATE}"
            raise
        report.finish(box.id)


async def _run_in(
    box: RunSandbox, target: CliTarget, source: CodeSource, report: RunReport, timeout_seconds: int
) -> None:
    place = target.sandbox(box.id, box.token, PORT, traffic_token=box.traffic_token)
    async with sandbox_session() as session:
        interpreter = CodeInterpreter(session, place.url, place.headers)
        if source.prelude:
            await _prepare(interpreter, source)
        events = interpreter.run(
            source.code, language=source.language, timeout_seconds=timeout_seconds
        )
        async with aclosing(events):
            async for event in events:
                report.add(event)


async def _prepare(interpreter: CodeInterpreter, source: CodeSource) -> None:
    """Pass the arguments, in a run of its own: lines of tracebacks are those of the code."""
    async with aclosing(interpreter.run(source.prelude, language=source.language)) as events:
        async for event in events:
            if isinstance(event, CodeError):
                raise PaddockError(
                    f"the arguments could not be passed: {event.name}: {event.value}"
                )
