"""What `paddock up` starts, and what each process is told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paddock.app.up.processes import Process
from paddock.app.up.supervisor import Installation
from paddock.kit.errors import InvalidError
from paddock.settings import Settings


def test_gateways_of_one_machine_have_admin_ports_of_their_own(tmp_path: Path) -> None:
    def told(admin_port: int) -> list[str | None]:
        settings = Settings(state_dir=str(tmp_path), gateways=3, admin_port=admin_port)
        gateways = Installation(settings).gateways
        return [gateway.environment.get("PADDOCK_ADMIN_PORT") for gateway in gateways]

    assert told(9100) == ["9100", "9101", "9102"]
    assert told(0) == [None, None, None]


@pytest.mark.parametrize(
    ("ports", "told"),
    [
        ({"admin_port": 65535}, "port 65536, the one for metrics of gateway-1, is beyond 65535"),
        ({"admin_port": 2999}, "port 3000 is the one for clients and for metrics of gateway-1"),
        ({"api_port": 3000, "host": "0.0.0.0"}, "port 3000 is the one for the control plane and"),
    ],
)
async def test_ports_that_cannot_be_had_are_refused_by_name(
    tmp_path: Path, ports: dict[str, Any], told: str
) -> None:
    settings = Settings(state_dir=str(tmp_path), gateways=2, **ports)
    with pytest.raises(InvalidError, match=told):
        await Installation(settings).refuse_if_taken()


async def test_a_process_is_told_what_it_alone_is_to_know(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "it.log"
    command = ["sh", "-c", "echo $ITS_OWN $HOME; exec sleep 1000"]
    process = Process("it", command, log_file=log, environment={"ITS_OWN": "secret"})
    running = asyncio.create_task(process.keep_running())
    while not (log.exists() and log.read_text()):
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert log.read_text().startswith("secret /")
