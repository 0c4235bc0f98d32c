"""The node process: sandboxes of this machine, and nothing of the control plane.

    python -m paddock.runtime.local.node.process --state DIR --socket PATH

It may be killed at any instruction: sandboxes and their envds go on, and the next node takes them
over. SIGTERM lets go of them; SIGINT does the same. `--purge-on-exit` ends all sandboxes instead
and removes what stays between runs; `--purge` (uninstalling) does so at once.
"""

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

import uvloop

from paddock.kit import clock, logs
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.runtime.local.kernel import syscalls
from paddock.runtime.local.node import recovery
from paddock.runtime.local.node.capabilities import Abilities
from paddock.runtime.local.node.node_context import Machine, Settings
from paddock.runtime.local.node.rpc_server import Descriptor, Handler, LogArguments, Service
from paddock.runtime.local.sandbox.freeze import Pausing
from paddock.runtime.local.sandbox.hibernation import Keeping
from paddock.runtime.local.sandbox.lifecycle import UP, Sandboxes
from paddock.runtime.local.sandbox.sandbox import Sandbox
from paddock.runtime.port import Instance, InstanceState, LogLine

log = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0002
_LOOK_SECONDS = 2.0
_SWEEP_SECONDS = 60.0


class Node:
    """Everything wired together."""

    def __init__(self, settings: Settings, tasks: asyncio.TaskGroup) -> None:
        self._settings = settings
        self._tasks = tasks
        self.machine = Machine(settings)
        self.sandboxes = Sandboxes(
            self.machine, clock.system(), self.spawn, lambda event: self._service.tell(event)
        )
        self.pausing = Pausing(self.sandboxes)
        self.abilities = Abilities(self.machine)
        self.keeping = Keeping(self.sandboxes, self.pausing, self.abilities)
        self._service = Service(self._handlers(), self.spawn)
        self._is_closing = False
        self._looking: asyncio.Task[None] | None = None

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run something beside everything else; its errors are logged, not spread."""
        if self._is_closing:
            work.close()
            return
        self._tasks.create_task(self._guard(name, work), name=name)

    async def open(self) -> None:
        """Take over what is there, then answer."""
        await self.machine.open()
        await recovery.adopt(self.sandboxes)
        self._service.open(str(self._settings.socket_path))
        self.sandboxes.parking.fill()
        self._looking = self._tasks.create_task(self._look_after(), name="look after sandboxes")
        log.info("node serves", extra=fields(socket=self._settings.socket_path))

    async def close(self, *, purge: bool) -> None:
        """Let go of everything."""
        self._service.close()
        if self._looking is not None:  # it uses all that is let go of below
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self.sandboxes.parking.close()
        if purge:
            # Who was being made when the first were ended is known by the time the last are.
            while self.sandboxes.known:
                for uid in list(self.sandboxes.known):
                    await self.sandboxes.destroy(uid)
            await self.keeping.forget_all()
        for sandbox in self.sandboxes.known.values():
            sandbox.go_down(kill=False)
        self._is_closing = True
        self.abilities.close()
        await self.machine.close(purge=purge)

    def _handlers(self) -> dict[str, Handler]:
        boxes, pausing, keeping = self.sandboxes, self.pausing, self.keeping
        return {
            "capabilities": lambda uid, body: self.abilities.capabilities(),
            "create": lambda uid, body: keeping.create(body),
            "start": lambda uid, body: boxes.start(uid),
            "configure": lambda uid, body: boxes.configure(uid, body),
            "freeze": lambda uid, body: pausing.freeze(uid),
            "thaw": lambda uid, body: pausing.thaw(uid),
            "hibernate": lambda uid, body: keeping.hibernate(uid),
            "restore": lambda uid, body: keeping.restore(uid),
            "stop": lambda uid, body: keeping.stop(uid),
            "snapshot": lambda uid, body: keeping.snapshot(
                uid, body.checkpoint_id, memory=body.memory, keep_running=body.keep_running
            ),
            "fork": lambda uid, body: keeping.fork(uid, body),
            "delete_checkpoint": lambda uid, body: keeping.delete_checkpoint(uid),
            "checkpoints": lambda uid, body: keeping.checkpoints(),
            "destroy": lambda uid, body: boxes.destroy(uid),
            "set_egress": lambda uid, body: boxes.set_egress(uid, body),
            "usage": lambda uid, body: boxes.usage(uid),
            "inspect": self._inspect,
            "instances": self._instances,
            "logs": self._logs,
            "netns": self._netns,
            "facts": self._facts,
        }

    async def _inspect(self, uid: str, body: object) -> Instance | None:
        sandbox = self.sandboxes.known.get(uid)
        return sandbox.instance() if sandbox else None

    async def _instances(self, uid: str, body: object) -> tuple[Instance, ...]:
        return tuple(sandbox.instance() for sandbox in self.sandboxes.known.values())

    async def _logs(self, uid: str, body: LogArguments) -> tuple[LogLine, ...]:
        journal = self.sandboxes.get(uid).journal
        return await self.machine.work(journal.read, since=body.since, limit=body.limit)

    async def _netns(self, uid: str, body: object) -> Descriptor:
        return Descriptor(self.sandboxes.netns(uid))

    async def _facts(self, uid: str, body: object) -> dict[str, object]:
        """For people and tests: which processes belong to the node itself."""
        favourite, ready = self.sandboxes.parking.favourite
        return {
            "pid": os.getpid(),
            "launcher": self.machine.launching.pid,
            "zygote": self.machine.zygote.pid,
            "parked": self.sandboxes.parking.count,
            "parked_whole": self.sandboxes.parking.whole,
            "parked_image": favourite.image if favourite else None,
            "parked_privileges": favourite.privileges if favourite else None,
            "parked_of_those": ready,
            "node_id": self.machine.node_id,
            "storage": self.machine.storage.backend_name,
            "inits": {
                uid: box.record.init.pid
                for uid, box in self.sandboxes.known.items()
                if box.record.init is not None and box.record.state in UP
            },
            "envds": {
                uid: box.record.envd.pid
                for uid, box in self.sandboxes.known.items()
                if box.record.envd is not None
            },
        }

    async def _look_after(self) -> None:
        """See what happens by itself: processes killed for memory, leftovers."""
        last_sweep = clock.system().monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._guard("look at memory", self._look_at_memory())
            if clock.system().monotonic() - last_sweep > _SWEEP_SECONDS:
                last_sweep = clock.system().monotonic()
                await self._guard("sweep", recovery.sweep(self.sandboxes))

    async def _look_at_memory(self) -> None:
        for sandbox in list(self.sandboxes.known.values()):
            if sandbox.record.state is InstanceState.RUNNING:
                self._look_for_memory_kills(sandbox)
                await asyncio.sleep(0)  # there may be hundreds

    def _look_for_memory_kills(self, sandbox: Sandbox) -> None:
        kills = self.machine.cgroups.oom_kills(sandbox.group)
        if kills <= sandbox.record.oom_kills:
            return
        count = kills - sandbox.record.oom_kills
        sandbox.save(oom_kills=kills)
        reason = f"{count} of its processes were killed: the memory limit was reached"
        sandbox.journal.write("out of memory", level="warning", killed=str(count))
        self.sandboxes.tell(sandbox, reason)

    async def _guard(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except PaddockError as problem:
            log.warning("work failed", extra=fields(work=name, reason=problem.message))
        except Exception:
            log.exception("work failed", extra=fields(work=name))


async def serve(settings: Settings, *, purge: bool, at_once: bool = False) -> None:
    """Run a node until it is told to stop, or only to take over and `purge` what is there."""
    stop = asyncio.Event()
    if at_once:
        stop.set()
    loop = asyncio.get_running_loop()
    for signo in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signo, stop.set)
    async with asyncio.TaskGroup() as tasks:
        node = Node(settings, tasks)
        await node.open()
        await stop.wait()
        await node.close(purge=purge)
        current = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not current:
                task.cancel()


def _network(given: str) -> int | Literal["auto"] | None:
    if given == "auto":
        return "auto"
    return None if given == "none" else int(given)


def main(argv: list[str]) -> int:
    """Parse arguments and serve."""
    parser = argparse.ArgumentParser(prog="paddock-node", description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--parked", type=int, default=Settings.__struct_defaults__[0])
    parser.add_argument(
        "--network", default="auto", help="fabric number on this machine, `auto`, or `none`"
    )
    parser.add_argument("--storage", default="auto", choices=("auto", "btrfs", "plain"))
    parser.add_argument("--envd-idle-seconds", type=float, default=60.0)
    parser.add_argument("--purge-on-exit", action="store_true")
    parser.add_argument("--purge", action="store_true")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-json", action="store_true")
    given = parser.parse_args(argv)
    logs.configure(level=given.log_level, json=given.log_json)
    os.umask(0o077)
    # A handful of descriptors per sandbox; the usual soft limit would end at some two hundred.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    syscalls.prctl(syscalls.PR_SET_NAME, b"paddock-node\0")
    # Threads that make links and files run beside the loop: it must not wait 5 ms for its turn.
    sys.setswitchinterval(_SWITCH_SECONDS)
    settings = Settings(
        state=given.state.absolute(),
        socket_path=given.socket.absolute(),
        parked=0 if given.purge else given.parked,
        network=_network(given.network),
        storage=given.storage,
        envd_idle_seconds=given.envd_idle_seconds,
    )
    status = 0
    try:
        purge = given.purge or given.purge_on_exit
        uvloop.run(serve(settings, purge=purge, at_once=given.purge))
    except* PaddockError as group:
        status = 1
        for problem in group.exceptions:
            hint = getattr(problem, "hint", None)
            # People need no traceback of what we refuse on purpose.
            log.error("node cannot run", extra=fields(reason=problem, hint=hint))  # noqa: TRY400
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
