"""All contexts: default ones, one for each language, and those that callers create."""

import asyncio
import functools
import itertools
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import zmq.asyncio

from code_interpreter.kernels import connection, process
from code_interpreter.kernels.bash import BashKernel
from code_interpreter.kernels.context import Context
from code_interpreter.kernels.events import (
    KernelError,
    UnknownContextError,
    UnknownLanguageError,
)
from code_interpreter.kernels.jupyter import JupyterKernel
from code_interpreter.kernels.kernel import Kernel
from code_interpreter.kernels.languages import DEFAULT, Language, languages
from code_interpreter.settings import PREFIX, Settings

_LISTED = (DEFAULT, "javascript")
"""Languages whose default contexts are listed before they are used."""
WARM = PREFIX + "WARM"
"""The variable by which the Python kernel loads packages at its start."""


class Contexts:
    """Contexts by id, in the order of their creation."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._languages = languages(settings)
        self._contexts: dict[str, Context] = {}
        self._defaults: dict[str, Context] = {}
        self._numbers = itertools.count(1)
        self._environment = _environment(settings)
        self._sockets = zmq.asyncio.Context()
        self._is_closed = False

    async def start(self) -> None:
        """Prepare the files, and start the default context of Python with packages loaded.

        `KernelError` if it does not start; the contexts can be used nevertheless.
        """
        connection.prepare(self._settings.runtime)
        process.kill_left(self._settings.runtime)
        for name in _LISTED:
            self.default(name)
        await self.default(DEFAULT).start()

    def default(self, name: str | None) -> Context:
        """Return the default context of a language."""
        language = self.language(name)
        context = self._defaults.get(language.name)
        if context is None or context.id not in self._contexts:
            is_first = language.name == DEFAULT and context is None
            context = self._new(language, str(self._settings.home), is_warm=is_first)
            self._defaults[language.name] = context
        return context

    def language(self, name: str | None) -> Language:
        """Return a language by name or alias; `UnknownLanguageError` if there is no kernel."""
        found = self._languages.get((name or DEFAULT).strip().lower())
        if found is None:
            known = ", ".join(sorted({item.name for item in self._languages.values()}))
            raise UnknownLanguageError(f"no kernel for language {name!r}: there are {known}")
        return found

    async def create(self, name: str | None, cwd: str | None) -> Context:
        """Create a context and start its kernel."""
        language = self.language(name)
        directory = cwd or str(self._settings.home)
        if not Path(directory).is_dir():
            raise KernelError(f"the working directory {directory} does not exist")
        context = self._new(language, directory)
        try:
            await context.start()
        except BaseException:
            self._contexts.pop(context.id, None)
            raise
        return context

    def get(self, context_id: str) -> Context:
        """Return a context; `UnknownContextError` if there is none."""
        try:
            return self._contexts[context_id]
        except KeyError:
            raise UnknownContextError(f"Context {context_id} not found") from None

    def all(self) -> list[Context]:
        """Return all contexts."""
        return list(self._contexts.values())

    async def remove(self, context_id: str) -> None:
        """End a context."""
        context = self.get(context_id)
        del self._contexts[context_id]
        await context.close()

    async def close(self) -> None:
        """End all contexts."""
        contexts = self.all()
        self._is_closed = True
        self._contexts.clear()
        await asyncio.gather(*(context.close() for context in contexts))
        # With the threads of all connections.
        self._sockets.destroy(linger=0)

    def _new(self, language: Language, cwd: str, *, is_warm: bool = False) -> Context:
        if self._is_closed:
            # Nobody would end its kernel.
            raise KernelError("the code interpreter is ending")
        environment = {**self._environment, **({WARM: "1"} if is_warm else {})}
        context = Context(
            str(uuid.uuid4()),
            language,
            cwd,
            new_kernel=lambda: self._new_kernel(language, cwd, environment),
            initial=self._environment,
            max_output_bytes=self._settings.max_output_bytes,
            interrupt_seconds=self._settings.interrupt_seconds,
        )
        self._contexts[context.id] = context
        return context

    def _new_kernel(self, language: Language, cwd: str, environment: Mapping[str, str]) -> Kernel:
        make = functools.partial(JupyterKernel, self._sockets)
        return (make if language.is_jupyter else BashKernel)(
            f"{language.name}-{os.getpid()}-{next(self._numbers)}",
            language,
            runtime=self._settings.runtime,
            cwd=Path(cwd),
            environment=environment,
            start_seconds=self._settings.start_seconds,
        )


def _environment(settings: Settings) -> Mapping[str, str]:
    """Return the variables of kernels: those of the server, without its own settings.

    `python` and `pip` are those of the Python kernel.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "JPY_PARENT_PID"):
        kept.pop(name, None)
    directory = str(Path(settings.python).parent)
    path = kept.get("PATH", os.defpath).split(":")
    if directory not in path:
        kept["PATH"] = ":".join((directory, *path))
    return kept
