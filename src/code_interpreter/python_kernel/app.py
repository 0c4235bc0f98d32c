"""The IPython kernel of the sandbox: plain tracebacks, no history file, no timers when idle."""

import importlib
import os
import site
import sys
from pathlib import Path
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from traitlets.config import Config

from code_interpreter.python_kernel import formatters, images, seeds, warm

_OWN_VARIABLES = ("CODE_INTERPRETER_WARM", "CODE_INTERPRETER_KERNEL")
_NEVER_SECONDS = 10.0 * 365 * 24 * 3600


class KernelApp(IPKernelApp):
    """The application of the kernel."""

    def init_heartbeat(self) -> None:
        """Leave it out: the server waits for the end of the process instead."""

    def init_iopub(self, context: Any) -> None:
        """Never drop output: the server stops the process when it cannot take more."""
        context.sndhwm = 0
        super().init_iopub(context)
        # It wakes up every 10 s to close the sockets of ended threads, of which there are few.
        self.iopub_thread._event_pipe_gc_seconds = _NEVER_SECONDS  # noqa: SLF001


def main(connection_file: str) -> None:
    """Run the kernel until its process is ended."""
    is_warm = bool(os.environ.get("CODE_INTERPRETER_WARM"))
    for name in _OWN_VARIABLES:
        os.environ.pop(name, None)
    _add_user_site()
    app: Any = KernelApp.instance(config=_config(connection_file))
    app.initialize([])
    # Programs would parse the arguments of the kernel.
    sys.argv = [""]
    shell = app.shell
    formatters.install(shell)
    images.install()
    seeds.install()
    # Packages may have been installed since the last run, or by another process.
    shell.events.register("pre_run_cell", lambda *_: importlib.invalidate_caches())
    if is_warm:
        warm.load()
    app.start()


def _config(connection_file: str) -> Config:
    config = Config()
    config.IPKernelApp.connection_file = connection_file
    config.IPKernelApp.outstream_class = "code_interpreter.python_kernel.streams.PacedStream"
    config.InteractiveShell.colors = "NoColor"
    config.InteractiveShell.banner1 = ""
    config.HistoryManager.enabled = False
    config.IPCompleter.use_jedi = False
    config.PlainTextFormatter.max_seq_length = 0
    return config


def _add_user_site() -> None:
    """Make packages importable that `pip install --user` installs later."""
    directory = site.getusersitepackages()
    if site.ENABLE_USER_SITE and directory not in sys.path:
        Path(directory).mkdir(parents=True, exist_ok=True)
        site.addsitedir(directory)
