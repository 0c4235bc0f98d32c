"""The cost of the cache at 1,000 and at 100,000 sandboxes: lookups, lists, events, waits.

    python bench/cache.py [--quick] [--large 100000]

Both sizes are measured in turn, in the same process, on the same number of objects. The spread is
that of the rounds, each the mean of many operations; ratios compare the best rounds, because only
they are meaningful on a busy machine. A lookup in a plain dictionary is the floor.
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

from paddock.cache.provider import Provider
from paddock.resources.kinds.sandbox import (
    CONDITION_READY,
    LABEL_POOL,
    ClaimIdentity,
    Phase,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Condition, ConditionStatus, Key, ObjectMeta, with_meta
from paddock.store.port import Page, Store
from reporting import Report

SMALL = 1_000
IN_POOL = 25
LOOKED_AT = 500
ROUNDS = 60
MOMENT = datetime(2030, 1, 1, tzinfo=UTC)


class Shelf:
    """A minimal store: initial objects, and no changes."""

    def __init__(self, count: int) -> None:
        self.items = tuple(make(number) for number in range(count))

    async def list(self, kind: Any, *, limit: int, continue_token: str = "", **_: Any) -> Any:
        if kind is not Sandbox:
            return Page(items=(), version="1")
        start = int(continue_token or 0)
        end = start + limit
        token = str(end) if end < len(self.items) else ""
        return Page(items=self.items[start:end], version="1", continue_token=token)

    async def watch(self, kind: Any, **_: Any) -> Any:
        await asyncio.Event().wait()
        yield


def make(number: int) -> Sandbox:
    pool, is_claimed = f"pool-{number // (2 * IN_POOL)}", number % 2
    ready = Condition(type=CONDITION_READY, status=ConditionStatus.TRUE, reason="Ready")
    identity = ClaimIdentity(
        sandbox_id=f"i{number}", owner=f"team-{number // 20}", lock="x", claim_time=MOMENT
    )
    return Sandbox(
        metadata=ObjectMeta(
            name=f"sandbox-{number}",
            namespace="default",
            uid=f"uid-{number}",
            resource_version="1",
            labels={LABEL_POOL: pool},
        ),
        spec=SandboxSpec(template=SandboxTemplateSpec(), claim=identity if is_claimed else None),
        status=SandboxStatus(phase=Phase.RUNNING, conditions=(ready,)),
    )


def each(work: Callable[[], Any], count: int) -> float:
    gc.disable()
    began = time.perf_counter()
    work()
    took = (time.perf_counter() - began) / count
    gc.enable()
    return took


class Subject:
    """One cache of one size, with its times so far, in seconds."""

    def __init__(self, cache: Provider, count: int) -> None:
        self.cache = cache
        self.times: dict[str, list[float]] = {}
        # The same number of objects is read in both, spread over all.
        step = count // LOOKED_AT
        self.ids = [f"i{number * step | 1}" for number in range(LOOKED_AT)]
        pools = count // (2 * IN_POOL)
        self.pools = [Key("default", f"pool-{number % pools}") for number in range(20)] * 10
        self.version = 1
        self.plain = {name: cache.claimed_sandbox(name) for name in self.ids}

    def take(self, name: str, work: Callable[[], Any], count: int) -> None:
        self.times.setdefault(name, []).append(each(work, count))

    def round(self) -> None:
        cache = self.cache
        informer = cache.informer(Sandbox)
        self.take("dictionary", lambda: [self.plain[item] for item in self.ids], LOOKED_AT)
        self.take(
            "get_by_index", lambda: [cache.claimed_sandbox(item) for item in self.ids], LOOKED_AT
        )
        self.take(
            "list_by_index",
            lambda: [cache.sandboxes_in_pool(pool) for pool in self.pools],
            len(self.pools),
        )
        self.version += 1
        found = [cache.claimed_sandbox(item) for item in self.ids]
        changed = [with_meta(box, resource_version=str(self.version)) for box in found if box]
        self.take("event", lambda: [informer.observe(box) for box in changed], len(changed))


async def wait_costs(cache: Provider) -> list[float]:
    """Return the seconds of waits that are satisfied at once."""
    box = cache.claimed_sandbox("i1")
    assert box is not None
    samples: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(500):
            await cache.waits.ready(box).wait(1)
        samples.append((time.perf_counter() - began) / 500)
    return samples


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--large", type=int)


async def main() -> None:
    report = Report("cache", __doc__, options)
    large = report.given.large or (20_000 if report.is_quick else 100_000)
    began = time.perf_counter()
    shelf = Shelf(large)
    report.note(f"made {large} sandboxes in {time.perf_counter() - began:.1f} s")
    async with Provider(cast("Store", Shelf(SMALL))).run() as little:
        began = time.perf_counter()
        async with Provider(cast("Store", shelf)).run() as much:
            report.figure("sync_seconds", time.perf_counter() - began)
            subjects = {SMALL: Subject(little, SMALL), large: Subject(much, large)}
            for _ in range(ROUNDS):
                for subject in subjects.values():
                    subject.round()
            report.spread("wait_satisfied", await wait_costs(much))
    for size, subject in subjects.items():
        for name, samples in subject.times.items():
            report.spread(f"{name}_{size}", samples)
            report.figure(f"{name}_us_{size}", min(samples) * 1e6, f"best of {len(samples):,}")
    for name in subjects[large].times:
        report.ratio(f"{name}_{large}_to_{SMALL}", f"{name}_us_{large}", f"{name}_us_{SMALL}")
    report.ratio("get_by_index_to_dictionary", f"get_by_index_us_{large}", f"dictionary_us_{large}")
    report.finish()


if __name__ == "__main__":
    asyncio.run(main())
