"""A process that writes as fast as it can and prints acknowledged writes, until it is killed.

Run by `test_crash`. Each line on standard output is one acknowledged write: operation, name,
version and counter, printed after the store has returned; only `deleting` is printed before.
"""

import asyncio
import os
import random
import sys
from pathlib import Path

from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, ObjectMeta, with_meta
from paddock.store.sqlite import SqliteStore


def acknowledge(operation: str, obj: SandboxTemplate) -> None:
    meta = obj.metadata
    line = f"{operation} {meta.name} {meta.resource_version} {meta.labels['n']}\n"
    os.write(1, line.encode())


async def churn(store: SqliteStore, name: str, rng: random.Random) -> None:
    key = Key("x", name)
    counter = 0
    known = {item.key: item for item in (await store.list(SandboxTemplate)).items}.get(key)
    if known is not None:
        counter = int(known.metadata.labels["n"])
    while True:
        if known is not None and rng.random() < 0.1:
            acknowledge("deleting", known)
            acknowledge("deleted", await store.delete(SandboxTemplate, key))
            known = None
        counter += 1
        # The counter is in two fields of the object, which differ after a torn write.
        filler = f"{counter}-" + "x" * rng.randrange(3000)
        labels, annotations = {"n": str(counter)}, {"fill": filler}
        if known is None:
            wanted = SandboxTemplate(
                metadata=ObjectMeta(
                    namespace="x", name=name, labels=labels, annotations=annotations
                ),
                spec=SandboxTemplateSpec(image=f"i{counter}"),
            )
            known = await store.create(wanted)
        else:
            changed = with_meta(known, labels=labels, annotations=annotations)
            known = await store.update(changed)
        acknowledge("put", known)


async def main(path: Path, seed: int, writers: int) -> None:
    store = await SqliteStore.open(path)
    os.write(1, b"ready\n")
    async with asyncio.TaskGroup() as tasks:
        for number in range(writers):
            tasks.create_task(churn(store, f"n{number}", random.Random(seed * 10_000 + number)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
