"""What the end of all contexts leaves in the process."""

from pathlib import Path

from code_interpreter.kernels.contexts import Contexts
from tests.code_interpreter.conftest import make_settings, run


def event_descriptors() -> int:
    """Return how many descriptors wake threads."""
    links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(str(path.readlink()).startswith("anon_inode:[event") for path in links)


def threads_of_sockets() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("ZMQ") for name in names)


async def test_closed_contexts_leave_no_descriptor_and_no_thread_and_end_no_others(
    settings, tmp_path: Path
) -> None:
    apart = make_settings(tmp_path)
    others = Contexts(apart)
    await others.start()
    assert (await run(others, "kept = 6 * 7")).failures == []
    before, threads = event_descriptors(), threads_of_sockets()
    for _ in range(2):
        contexts = Contexts(settings)
        await contexts.start()
        assert (await run(contexts, "6 * 7")).text == "42"
        assert threads_of_sockets() > threads
        await contexts.close()
        assert threads_of_sockets() == threads
        assert event_descriptors() == before
    assert (await run(others, "kept")).text == "42"
    await others.close()
    apart.runtime.rmdir()
