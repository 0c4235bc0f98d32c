"""Kernels as local processes, in the environments that scripts/install-interpreter makes."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from code_interpreter.kernels.contexts import Contexts
from code_interpreter.kernels.events import Accepted, Ended, Event, Failure, Output, Result
from code_interpreter.kernels.run import Run, RunRequest
from code_interpreter.settings import Settings

INSTALLED = Path(os.environ.get("PADDOCK_CACHE", "/var/cache/paddock")) / "interpreter"


def make_settings(home: Path, **changes) -> Settings:
    """Settings with the environments of the cache, and sockets in a short path."""
    if not (INSTALLED / "python" / ".complete").is_file():
        pytest.skip("the code interpreter is not installed: run scripts/install-interpreter")
    return Settings(
        host="127.0.0.1",
        python=str(INSTALLED / "python" / "bin" / "python"),
        server=INSTALLED / "server",
        home=home,
        runtime=Path(tempfile.mkdtemp(prefix="ci")),
        environment_url="http://127.0.0.1:9/envs",
        generation=home / "generation",
        **changes,
    )


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Iterator[Settings]:
    """Settings of this module's interpreter."""
    made = make_settings(tmp_path_factory.mktemp("home"))
    yield made
    shutil.rmtree(made.runtime)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def contexts(settings) -> AsyncIterator[Contexts]:
    """Contexts without a protocol."""
    made = Contexts(settings)
    await made.start()
    yield made
    await made.close()


class Seen:
    """The events of a run, by kind."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.counts = [e.execution_count for e in events if isinstance(e, Accepted)]
        self.results = [e for e in events if isinstance(e, Result)]
        self.failures = [e for e in events if isinstance(e, Failure)]

    def printed(self, stream: str = "stdout") -> str:
        """Everything that was printed to a stream."""
        return "".join(e.text for e in self.events if isinstance(e, Output) and e.stream == stream)

    @property
    def text(self) -> str | None:
        """The value of the last expression."""
        return next((e.data["text/plain"] for e in self.results if e.is_main), None)


async def seen(run: Run) -> Seen:
    """Read a run to its end."""
    events = [event async for event in run.events()]
    assert isinstance(events[-1], Ended)
    return Seen(events)


async def run(contexts: Contexts, code: str, language: str | None = None, **request) -> Seen:
    """Run code in the default context of a language."""
    return await seen(contexts.default(language).run(RunRequest(code, **request)))
