"""How controllers handle results, errors and changes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paddock.engine.controller import (
    Controller,
    Done,
    RequeueAfter,
    TerminalError,
    controlled_by,
    own_key,
)
from paddock.engine.informer import Informer
from paddock.engine.queue import WorkQueue
from paddock.kit.backoff import Backoff
from paddock.kit.errors import ConflictError, UnavailableError
from paddock.kit.logs import fields
from paddock.kit.metrics import REGISTRY
from paddock.kit.tasks import background
from paddock.resources.kinds.builtin import Secret
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import Key, ObjectMeta, owner_reference, with_meta
from tests.engine.faults import FaultyStore

pytestmark = pytest.mark.looptime


class Diary:
    """A scripted reconcile function that records its calls with their times."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.calls: list[tuple[float, str]] = []

    async def __call__(self, key: str) -> Any:
        self.calls.append((round(asyncio.get_running_loop().time(), 3), key))
        step = self.script.pop(0) if self.script else Done()
        if isinstance(step, BaseException):
            raise step
        return step


@asynccontextmanager
async def running(
    reconcile: Callable[[str], Any], **options: Any
) -> AsyncIterator[Controller[str]]:
    backoff = Backoff(base_seconds=1, cap_seconds=60, jitter=0)
    controller = Controller("test", reconcile, queue=WorkQueue("test", backoff=backoff), **options)
    async with background(controller.run(), name="controller"):
        yield controller


async def test_done_is_not_requeued() -> None:
    diary = Diary(Done("made it"))
    async with running(diary) as controller:
        controller.queue.add("a")
        await asyncio.sleep(1000)
    assert diary.calls == [(0, "a")]


async def test_after_is_requeued_with_its_delay() -> None:
    diary = Diary(RequeueAfter(30, "waiting"), RequeueAfter(5, "still"))
    async with running(diary) as controller:
        controller.queue.add("a")
        await asyncio.sleep(1000)
    assert [at for at, _ in diary.calls] == [0, 30, 35]


async def test_errors_are_retried_with_backoff_and_success_resets_it() -> None:
    diary = Diary(ValueError("x"), UnavailableError("y"), ConflictError("z"), Done(), KeyError("k"))
    async with running(diary) as controller:
        controller.queue.add("a")
        await asyncio.sleep(100)
        controller.queue.add("a")
        await asyncio.sleep(100)
    assert [at for at, _ in diary.calls] == [0, 1, 3, 7, 100, 101]


async def test_a_terminal_error_is_logged_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    diary = Diary(TerminalError("the image does not exist"))
    async with running(diary) as controller:
        controller.queue.add("a")
        await asyncio.sleep(1000)
        assert len(diary.calls) == 1
        controller.queue.add("a")
        await asyncio.sleep(1)
    assert len(diary.calls) == 2, "a change of the object gives it another chance"
    assert "reconcile failed terminally" in caplog.text


async def test_an_invalid_result_of_a_reconcile_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    diary = Diary("nonsense")
    async with running(diary) as controller:
        controller.queue.add("a")
        await asyncio.sleep(10)
    assert len(diary.calls) == 2
    assert "a reconcile returns Done or RequeueAfter, not 'nonsense'" in caplog.text


async def test_a_cancelled_inner_task_is_retried_and_does_not_end_the_worker() -> None:
    diary = Diary(asyncio.CancelledError(), asyncio.CancelledError(), Done())
    async with running(diary, workers=1) as controller:
        controller.queue.add("a")
        await asyncio.sleep(10)
    assert diary.calls == [(0, "a"), (1, "a"), (3, "a")]


async def test_a_reconcile_has_a_timeout() -> None:
    calls: list[float] = []

    async def reconcile(key: str) -> Done:
        calls.append(asyncio.get_running_loop().time())
        if len(calls) == 1:
            await asyncio.sleep(1000)
        return Done()

    async with running(reconcile, timeout_seconds=20) as controller:
        controller.queue.add("a")
        await asyncio.sleep(100)
    assert calls == [0, 21]


async def test_hanging_reconciles_do_not_block_others_and_time_out() -> None:
    hung, done = asyncio.Event(), []

    async def reconcile(key: str) -> Done:
        if key.startswith("hangs"):
            await hung.wait()
        done.append((asyncio.get_running_loop().time(), key))
        return Done()

    async with running(reconcile, workers=2, timeout_seconds=100) as controller:
        for key in ("hangs 1", "hangs 2", "hangs 3", "sound"):
            controller.queue.add(key)
        await asyncio.sleep(25)
        assert [key for _, key in done] == ["sound"]
        hung.set()
        await asyncio.sleep(1)
        assert len(done) == 4
        controller.queue.add("sound")
        await asyncio.sleep(1)
        assert len(done) == 5
        workers = [task for task in asyncio.all_tasks() if task.get_name().startswith("test ")]
        assert len(workers) == 2, "those who were relieved have gone"


async def test_workers_run_concurrently_but_never_on_the_same_key() -> None:
    busy: set[str] = set()
    most = 0

    async def reconcile(key: str) -> Done:
        nonlocal most
        assert key not in busy
        busy.add(key)
        most = max(most, len(busy))
        await asyncio.sleep(1)
        busy.discard(key)
        return Done()

    async with running(reconcile, workers=3) as controller:
        for _ in range(10):
            for key in "abcde":
                controller.queue.add(key)
            await asyncio.sleep(0.5)
    assert most == 3


async def test_a_cancelled_reconcile_is_repeated_by_the_next_run() -> None:
    done: list[str] = []

    async def reconcile(key: str) -> Done:
        await asyncio.sleep(10)
        done.append(key)
        return Done()

    controller = Controller("again", reconcile)
    async with background(controller.run(), name="first"):
        controller.queue.add("a")
        await asyncio.sleep(5)
    assert done == []
    async with background(controller.run(), name="second"):
        await asyncio.sleep(20)
    assert done == ["a"]


async def test_log_lines_of_a_reconcile_have_controller_key_and_reconcile_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def reconcile(key: str) -> Done:
        logging.getLogger("domain").info("did something", extra=fields(extra=1))
        return Done("all well")

    caplog.set_level(logging.INFO)
    async with running(reconcile) as controller:
        controller.queue.add("a")
        controller.queue.add("b")
        await asyncio.sleep(1)
    lines = [r.paddock_fields for r in caplog.records if r.getMessage() == "did something"]
    ends = [r.paddock_fields for r in caplog.records if r.getMessage() == "reconciled"]
    assert [(line["controller"], line["key"], line["extra"]) for line in lines] == [
        ("test", "a", 1),
        ("test", "b", 1),
    ]
    assert lines[0]["reconcile"] == ends[0]["reconcile"] != lines[1]["reconcile"]


async def test_results_are_counted() -> None:
    def count(result: str) -> float:
        labels = {"controller": "test", "result": result}
        return REGISTRY.get_sample_value("paddock_reconcile_seconds_count", labels) or 0

    before = {result: count(result) for result in ("done", "after", "error", "terminal")}
    async with running(
        Diary(ValueError(), RequeueAfter(1), TerminalError("t"), Done())
    ) as controller:
        controller.queue.add("a")
        await asyncio.sleep(10)
        controller.queue.add("a")
        await asyncio.sleep(10)
    assert {result: count(result) - before[result] for result in before} == {
        "done": 1,
        "after": 1,
        "error": 1,
        "terminal": 1,
    }


async def test_a_change_of_a_child_enqueues_its_old_and_new_controller(
    store: FaultyStore,
) -> None:
    seen: list[Key] = []

    async def reconcile(key: Key) -> Done:
        seen.append(key)
        return Done()

    async def pool(name: str) -> SandboxPool:
        spec = SandboxPoolSpec(template_ref=TemplateRef(name="t"), replicas=1)
        return await store.create(
            SandboxPool(metadata=ObjectMeta(name=name, namespace="default"), spec=spec)
        )

    one, two = await pool("one"), await pool("two")
    informer = Informer(store, Secret)
    controller: Controller[Key] = Controller("owners", reconcile)
    controller.watches(informer, controlled_by(SandboxPool))
    async with (
        background(informer.run(), name="informer"),
        background(controller.run(), name="controller"),
    ):
        await store.create(Secret(metadata=ObjectMeta(name="free", namespace="default")))
        child = await store.create(
            Secret(
                metadata=ObjectMeta(
                    name="child",
                    namespace="default",
                    owner_references=(owner_reference(one),),
                )
            )
        )
        await asyncio.sleep(1)
        assert seen == [Key("default", "one")]
        await store.update(with_meta(child, owner_references=(owner_reference(two),)))
        await asyncio.sleep(1)
        assert sorted(seen[1:]) == [Key("default", "one"), Key("default", "two")]


async def test_a_deleted_object_is_mapped_to_its_own_key() -> None:
    obj = Secret(metadata=ObjectMeta(name="a", namespace="n"))
    assert list(own_key(obj, None)) == list(own_key(None, obj)) == [Key("n", "a")]


def test_a_controller_without_workers_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        Controller("none", Diary(), workers=0)


async def test_slow_keys_of_one_group_leave_workers_for_others() -> None:
    started: list[str] = []

    async def reconcile(key: str) -> Done:
        started.append(key)
        await asyncio.sleep(100 if key.startswith("slow") else 0)
        return Done()

    controller = Controller(
        "test", reconcile, workers=4, group_of=lambda key: key.partition("-")[0]
    )
    async with background(controller.run(), name="controller"):
        for number in range(10):
            controller.queue.add(f"slow-{number}")
        await asyncio.sleep(1)
        assert started == ["slow-0", "slow-1"]
        controller.queue.add("quick-1")
        await asyncio.sleep(0.01)
        assert started[2:] == ["quick-1"]
        # Extra workers replace those of slow keys, so that these do not block their group.
        await asyncio.sleep(60)
        assert len([key for key in started if key.startswith("slow")]) == 10
