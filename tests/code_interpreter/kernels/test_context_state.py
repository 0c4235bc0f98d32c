"""What a context knows of its kernel, when runs are dropped, restarted or removed meanwhile."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from code_interpreter.kernels.context import Context
from code_interpreter.kernels.event_queue import EventQueue
from code_interpreter.kernels.events import Accepted, Event, Failure, KernelError
from code_interpreter.kernels.languages import Language
from code_interpreter.kernels.process import Exit
from code_interpreter.kernels.run import Run, RunRequest


class FakeKernel:
    """Records what it is told to run."""

    def __init__(self) -> None:
        self.end: Exit | None = None
        self.before: list[str] = []
        self.is_stopped = False
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.interrupted = asyncio.Event()

    async def start(self) -> None:
        await self.may_start.wait()

    async def execute(
        self,
        code: str,
        queue: EventQueue,
        *,
        before: str,
        after: str,
        on_prepared: Callable[[], None],
    ) -> None:
        if code == "refused":
            queue.put(Failure("InvalidCode", code))
            return
        self.before.append(before)
        on_prepared()
        queue.put(Accepted(len(self.before)))
        if code == "endless":
            await self.interrupted.wait()

    async def interrupt(self, *, is_repeated: bool) -> None:
        self.interrupted.set()

    async def stop(self) -> None:
        self.is_stopped = True


class World:
    """A context, its kernels, and an envd that answers when it is told to."""

    def __init__(self) -> None:
        self.kernels: list[FakeKernel] = []
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        language = Language(
            "fake", ("true",), lambda changed: f"set {dict(changed)}", reseed="seed"
        )
        self.context = Context(
            "c",
            language,
            "/",
            new_kernel=self.new_kernel,
            initial={},
            max_output_bytes=1 << 20,
            interrupt_seconds=1.0,
            detached_seconds=30.0,
        )

    def new_kernel(self) -> FakeKernel:
        self.kernels.append(FakeKernel())
        return self.kernels[-1]

    async def variables(self) -> Mapping[str, str]:
        self.is_asked.set()
        await self.may_answer.wait()
        return {"WHERE": "clone"}

    def run(self, code: str = "1") -> Run:
        return self.context.run(RunRequest(code, generation="clone", get_variables=self.variables))


async def events(run: Run) -> list[Event]:
    return [event async for event in run.events()]


pytestmark = pytest.mark.looptime
PREPARED = "seed\nset {'WHERE': 'clone'}"


@pytest.fixture
def world() -> World:
    return World()


async def test_a_dropped_run_leaves_the_preparation_of_a_clone_to_the_next_one(
    world: World,
) -> None:
    dropped = world.run()
    await world.is_asked.wait()
    world.context.abandon(dropped)
    world.may_answer.set()
    assert dropped.task is not None
    await dropped.task
    await events(world.run())
    await events(world.run())
    assert world.kernels[0].before == [PREPARED, ""]


async def test_a_run_that_its_kernel_refuses_leaves_the_preparation_to_the_next_one(
    world: World,
) -> None:
    world.may_answer.set()
    await events(world.run("refused"))
    await events(world.run())
    assert world.kernels[0].before == [PREPARED]


async def test_a_run_whose_context_is_restarted_before_its_code_runs_in_the_new_kernel(
    world: World,
) -> None:
    run = world.run()
    await world.is_asked.wait()
    await world.context.restart()
    world.may_answer.set()
    seen = await events(run)
    assert isinstance(seen[0], Accepted)
    old, new = world.kernels
    assert (old.is_stopped, old.before, new.before) == (True, [], [PREPARED])


async def test_a_removed_context_starts_no_kernel(world: World) -> None:
    await world.context.close()
    [failure, _] = await events(world.run())
    assert isinstance(failure, Failure)
    assert failure.name == "ContextRemoved"
    with pytest.raises(KernelError, match="removed"):
        await world.context.restart()
    assert world.kernels == []


async def test_a_run_that_goes_on_without_its_caller_does_not_block_others_for_good(
    world: World,
) -> None:
    world.may_answer.set()
    loop = asyncio.get_running_loop()
    endless = world.run("endless")
    assert isinstance(await endless.next(), Accepted)
    world.context.detach(endless)
    await asyncio.sleep(1000)
    assert not world.kernels[0].interrupted.is_set(), "nobody waits for it"
    began = loop.time()
    await events(world.run())
    assert loop.time() - began == pytest.approx(30, abs=1)


async def test_a_caller_that_waits_already_when_a_run_loses_its_own_waits_as_long(
    world: World,
) -> None:
    world.may_answer.set()
    endless, next_one = world.run("endless"), world.run()
    assert isinstance(await endless.next(), Accepted)
    world.context.detach(endless)
    began = asyncio.get_running_loop().time()
    await events(next_one)
    assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=1)


async def test_a_run_that_loses_its_caller_before_its_turn_runs_nevertheless(world: World) -> None:
    world.may_answer.set()
    first, second = world.run(), world.run()
    world.context.detach(second)
    await events(first)
    assert second.task is not None
    await second.task
    assert len(world.kernels[0].before) == 2
