"""What the end of all contexts leaves in the process."""

from pathlib import Path

from code_interpreter.kernels.contexts import Contexts
from tests.code_interpreter.conftest import run


def event_descriptors() -> int:
    """Return how many descriptors wake threads."""
    links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(str(path.readlink()).startswith("anon_inode:[event") for path in links)


def threads_of_sockets() -> list[str]:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("ZMQ")]


async def test_closed_contexts_leave_no_descriptor_and_no_thread(settings) -> None:
    before = event_descriptors()
    # The second time, all starts again.
    for _ in range(2):
        contexts = Contexts(settings)
        await contexts.start()
        assert (await run(contexts, "6 * 7")).text == "42"
        assert threads_of_sockets()
        await contexts.close()
        assert threads_of_sockets() == []
        assert event_descriptors() == before
