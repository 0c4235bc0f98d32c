"""The processes that `paddock up` starts, their ports and their environment."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddock.app.up.processes import SupervisedProcess
from paddock.app.up.supervisor import MachineSupervisor
from paddock.kit.errors import InvalidError
from paddock.runtime.local.kernel.uncharged import KernelMemoryBounds
from paddock.settings import Settings


def test_each_gateway_of_a_machine_has_its_own_admin_port(tmp_path: Path) -> None:
    def ports(admin_port: int) -> list[str | None]:
        settings = Settings(state_dir=str(tmp_path), gateways=3, admin_port=admin_port)
        gateways = MachineSupervisor(settings).gateways
        return [gateway.environment.get("PADDOCK_ADMIN_PORT") for gateway in gateways]

    assert ports(9100) == ["9100", "9101", "9102"]
    assert ports(0) == [None, None, None]


def test_the_node_uses_the_images_that_up_builds(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    command = MachineSupervisor(settings).node.command
    assert command[command.index("--image-cache") + 1] == str(tmp_path / "cache/images")


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ({"admin_port": 65535}, "port 65536 for metrics of gateway-1 is larger than 65535"),
        ({"admin_port": 2999}, "port 3000 is set for clients and for metrics of gateway-1"),
        ({"api_port": 3000, "host": "0.0.0.0"}, "port 3000 is set for the control plane and"),
    ],
)
async def test_impossible_ports_are_refused_with_their_purpose(
    tmp_path: Path, ports: dict[str, Any], message: str
) -> None:
    settings = Settings(state_dir=str(tmp_path), gateways=2, **ports)
    with pytest.raises(InvalidError, match=message):
        await MachineSupervisor(settings).require_free_ports()


async def test_a_process_gets_its_own_environment(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "it.log"
    command = ["sh", "-c", "echo $ITS_OWN $HOME; exec sleep 1000"]
    process = SupervisedProcess("it", command, log_file=log, environment={"ITS_OWN": "secret"})
    running = asyncio.create_task(process.keep_running())
    while not (log.exists() and log.read_text()):
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert log.read_text().startswith("secret /")


def test_the_node_gets_the_bounds_of_kernel_memory(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path), kernel_memory_percent=20, pending_signals_per_sandbox=2048
    )
    command = MachineSupervisor(settings).node.command
    given = command[command.index("--kernel-memory") + 1]
    assert msgspec.json.decode(given, type=KernelMemoryBounds) == KernelMemoryBounds(
        percent=20, pending_signals=2048
    )


def test_the_documented_bounds_of_kernel_memory_are_those_of_the_node() -> None:
    settings = Settings()
    assert KernelMemoryBounds() == KernelMemoryBounds(
        percent=settings.kernel_memory_percent,
        least_bytes=settings.kernel_memory_min_bytes,
        pending_signals=settings.pending_signals_per_sandbox,
    )
