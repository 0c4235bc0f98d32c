"""A whole installation for tests: node, control plane and gateways as real processes.

It has its own temporary directory, ports and fabric number. Leaving the `async with` stops it and
checks that nothing is left behind.

    async with Installation(pool_size=1) as paddock:
        box = await paddock.create(timeout=60)
        answer = await paddock.call(box, 8000, "/")
"""

import asyncio
import base64
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from paddock.app.up import envoy
from paddock.app.wiring.secrets import Secrets
from paddock.runtime import image_settings, outbound_settings
from paddock.settings import load
from tests import disks
from tests.fabrics import usable_numbers
from tests.leaks import note_node
from tests.machine_state import machine_state
from tests.ports import free_ports
from tests.runtime.local.nodes import eventually, traces

START_SECONDS = 150
_NUMBERS = range(40, 60)


class Box(msgspec.Struct, rename="camel"):
    """A new sandbox, as the API returns it."""

    sandbox_i_d: str = msgspec.field(name="sandboxID")
    envd_access_token: str | None = None
    traffic_access_token: str | None = None

    @property
    def id(self) -> str:
        return self.sandbox_i_d


class Installation:
    """One installation; each of its processes may be killed and restarted."""

    def __init__(
        self,
        *,
        gateways: int = 1,
        gateway_ports: bool = False,
        store_disk_mb: int = 0,
        **settings: Any,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pdi"))
        self._store_disk_mb = store_disk_mb
        """The size of a separate disk for the store; 0: the disk of the machine."""
        self.node_state = self.directory / ("node" if store_disk_mb else "state/node")
        self.port, self.api_port, self.kube_port, *own = free_ports(3 + gateways)
        self.gateway_ports = own if gateway_ports else [self.port] * gateways
        """The port of each gateway; by default one port for all."""
        if gateway_ports:
            self.port = own[0]
        self.admin_ports = free_ports(gateways)
        self.settings = {"pool_size": 1, **settings}
        self._lock, self._number = _fabric_number()
        note_node(self.node_state, Path(self._lock.name), self._number)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.http: aiohttp.ClientSession

    # ---- start and stop ------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        # No limit of connections on the side of the test.
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            if self._store_disk_mb:
                self._mount_store()
            await self.start_node()
            await self.start_control()
            for number in range(len(self.gateway_ports)):
                await self.start_gateway(number)
            if "tls_certificate" in self.settings:
                await self.start_tls()
            await self.stocked()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        problems: list[AssertionError] = []
        for name in [name for name in reversed(self._processes) if name != "node"]:
            try:
                await self.stop(name)
            except AssertionError as error:
                problems.append(error)
        if "node" in self._processes:
            if self._processes["node"].poll() is not None:
                await self.start_node()
            await self.stop("node")
        # Orphans of a killed node remain until the init process of the machine reaps them.
        state = self.node_state
        with contextlib.suppress(AssertionError):
            await eventually(lambda: not any(traces(state, self._number).values()), seconds=60)
        left = traces(state, self._number)
        self._lock.close()
        assert not any(left.values()), left
        if os.path.ismount(self.directory / "state"):
            disks.unmount(self.directory / "state")
        shutil.rmtree(self.directory)
        if problems:
            raise problems[0]

    def _mount_store(self) -> None:
        state = self.directory / "state"
        state.mkdir()
        disks.mount(state, f"{self._store_disk_mb}m")

    @property
    def environment(self) -> dict[str, str]:
        values = {
            "state_dir": self.directory / "state",
            "run_dir": self.directory / "run",
            "port": self.port,
            "api_port": self.api_port,
            "kube_port": self.kube_port,
            "gateways": len(self.gateway_ports),
            **self.settings,
        }
        return os.environ | {
            f"PADDOCK_{name.upper()}": str(value) for name, value in values.items()
        }

    @property
    def secrets(self) -> Secrets:
        data = (self.directory / "state" / "secrets.json").read_bytes()
        return msgspec.json.decode(data, type=Secrets)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def _start(self, name: str, command: list[str], **environment: object) -> None:
        self._spawn(name, [sys.executable, "-m", *command], **environment)

    def _spawn(self, name: str, command: list[str], **environment: object) -> None:
        (self.directory / "run").mkdir(exist_ok=True)
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment | {key: str(value) for key, value in environment.items()},
            )

    async def start_node(self, prelude: str = "") -> None:
        """Start the node and wait until it serves; `prelude` is a program in its process."""
        socket_path = self.directory / "run" / "node.sock"
        settings = load(environ=self.environment)
        settings.run.mkdir(exist_ok=True)
        outbound_settings.write_node_file(settings)
        image_settings.write_node_file(settings)
        module = "paddock.runtime.local.node.process"
        main = f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))"
        self._spawn(
            "node",
            [
                *(sys.executable, *(("-c", f"{prelude}\n{main}") if prelude else ("-m", module))),
                *("--state", str(self.node_state)),
                *("--socket", str(socket_path), "--network", str(self._number)),
                *("--outbound", str(outbound_settings.node_file(settings))),
                *("--images", str(image_settings.node_file(settings)), "--purge-on-exit"),
                f"--heavy-work-per-team={settings.heavy_work_per_team}",
            ],
        )
        # Compare the process: a child of a killed node may hold the old socket for a moment.
        await self._until("node", lambda: _listener(socket_path) == self.pid("node"))

    async def start_control(self) -> None:
        self._start("control", ["paddock.app", "control"])
        await self.control_serves()

    async def control_serves(self) -> None:
        """Wait until the control plane answers."""
        await self._until("control", lambda: _connects(("127.0.0.1", self.api_port)))

    def spawn_control(self, prelude: str) -> None:
        """Start the control plane after a Python program in its process. Waits for nothing."""
        main = "import sys; from paddock.app.__main__ import main"
        program = f"{prelude}\n{main}\nsys.argv[1:] = ['control']\nsys.exit(main())"
        self._spawn("control", [sys.executable, "-c", program])

    async def ended(self, name: str, seconds: float = 60) -> int:
        """Wait until a process has ended by itself, and return its status."""
        try:
            return await asyncio.to_thread(self._processes[name].wait, seconds)
        except subprocess.TimeoutExpired as error:
            error.add_note(self.log(name)[-3000:])
            raise

    async def start_gateway(self, number: int = 0, **environment: object) -> None:
        """Start a gateway and wait until it is ready."""
        name = f"gateway-{number}"
        self._start(
            name,
            ["paddock.app", "gateway"],
            PADDOCK_PORT=self.gateway_ports[number],
            PADDOCK_ADMIN_PORT=self.admin_ports[number],
            **environment,
        )

        async def ready() -> bool:
            try:
                url = f"http://127.0.0.1:{self.admin_ports[number]}/readyz"
                async with self.http.get(url) as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await self._until(name, ready)

    async def start_tls(self) -> None:
        """Start Envoy in front of the gateways, as `paddock up` does."""
        settings = load(environ=self.environment)
        process = envoy.front(settings)
        assert process is not None
        self._spawn("tls", list(process.command))
        await self._until("tls", lambda: _connects((settings.tls_host, settings.tls_port)))

    async def _until(self, name: str, check) -> None:
        process = self._processes[name]

        async def holds() -> bool:
            assert process.poll() is None, f"{name} ended:\n{self.log(name)[-3000:]}"
            result = check()
            return await result if asyncio.iscoroutine(result) else result

        try:
            await eventually(holds, seconds=START_SECONDS)
        except AssertionError as error:
            state = machine_state(self.directory)
            raise AssertionError(f"{error}\n{self.log(name)[-3000:]}\n{state}") from error

    async def stop(self, name: str) -> None:
        """Stop a process with SIGTERM."""
        process = self._processes.pop(name)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(process.wait, 60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{name} does not stop:\n{self.log(name)[-3000:]}") from None
        if name == "node":
            assert code == 0, self.log(name)[-3000:]

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        self._processes[name].kill()
        self._processes[name].wait()

    # ---- use -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    async def api(self, method: str, path: str, body: object = None) -> Any:
        """Call the E2B API through the gateway; return the decoded response."""
        async with self.http.request(
            method, self.url + path, json=body, headers={"X-API-Key": self.secrets.api_key}
        ) as response:
            data = await response.read()
            assert response.status < 400, f"{method} {path}: {response.status} {data!r}"
            return msgspec.json.decode(data) if data else None

    async def kube(
        self, method: str, path: str, body: object = None, *, kind: str = "application/json"
    ) -> Any:
        """Call the declarative API."""
        async with self.http.request(
            method,
            f"http://127.0.0.1:{self.api_port}{path}",
            data=msgspec.json.encode(body) if body is not None else None,
            headers={"Authorization": f"Bearer {self.secrets.token}", "Content-Type": kind},
        ) as response:
            data = await response.read()
            assert response.status < 400, f"{method} {path}: {response.status} {data!r}"
            return msgspec.json.decode(data)

    async def stocked(self, count: int | None = None) -> None:
        """Wait until the default pool has its warm sandboxes."""
        wanted = self.settings["pool_size"] if count is None else count
        path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/base"

        async def full() -> bool:
            pool = await self.kube("GET", path)
            return pool.get("status", {}).get("available", 0) >= wanted

        try:
            await eventually(full, seconds=START_SECONDS)
        except AssertionError as error:
            logs = "\n".join(self.log(name)[-3000:] for name in ("node", "control"))
            items = (await self.kube("GET", "/apis/paddock.dev/v1alpha1/sandboxes"))["items"]
            statuses = [item.get("status") for item in items]
            pool, state = await self.kube("GET", path), machine_state(self.directory)
            raise AssertionError(f"{error}\n{pool}\n{statuses}\n{logs}\n{state}") from error

    async def create(self, **body: Any) -> Box:
        """Create a sandbox, by default from the template `base`."""
        answer = await self.api("POST", "/sandboxes", {"templateID": "base", **body})
        return msgspec.convert(answer, Box)

    async def call(
        self,
        box: Box,
        port: int,
        path: str = "/",
        *,
        method: str = "GET",
        token: bool = True,
        gateway: int = 0,
        **options: Any,
    ) -> tuple[int, bytes]:
        """Call a port of a sandbox through a gateway."""
        headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(port)}
        if token and box.envd_access_token:
            headers["X-Access-Token"] = box.envd_access_token
        url = f"http://127.0.0.1:{self.gateway_ports[gateway]}{path}"
        headers |= options.pop("headers", {})
        async with self.http.request(method, url, headers=headers, **options) as response:
            return response.status, await response.read()

    async def run(self, box: Box, command: str, *, background: bool = False) -> str:
        """Run a command in a sandbox through envd; return its standard output."""
        # One message in Connect's framing; the response is a stream of such messages.
        config = {"process": {"cmd": "/bin/sh", "args": ["-c", command]}}
        message = msgspec.json.encode(config)
        frame = b"\0" + len(message).to_bytes(4, "big") + message
        status, data = await self.call(
            box,
            49983,
            "/process.Process/Start",
            method="POST",
            data=frame,
            headers={"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"},
        )
        assert status == 200, data
        return _output(data)

    async def write_file(self, box: Box, path: str, content: bytes) -> None:
        form = aiohttp.FormData()
        form.add_field("file", content, filename=path)
        status, data = await self.call(
            box, 49983, f"/files?path={path}&username=user", method="POST", data=form
        )
        assert status == 200, data

    async def serve_inside(self, box: Box, port: int, code: str) -> None:
        """Start a Python program in the sandbox that serves a port, and wait until it does."""
        await self.write_file(box, "/home/user/server.py", code.encode())
        await self.run(
            box, f"nohup python3 /home/user/server.py {port} >/tmp/server.log 2>&1 </dev/null &"
        )

        async def answers() -> bool:
            status, _ = await self.call(box, port, "/")
            return status == 200

        await eventually(answers, seconds=60)


def _output(data: bytes) -> str:
    text, has_ended, start = bytearray(), False, 0
    while start < len(data):
        end = start + 5 + int.from_bytes(data[start + 1 : start + 5], "big")
        message, start = msgspec.json.decode(data[start + 5 : end]), end
        event = message.get("event", {})
        text += base64.b64decode(event.get("data", {}).get("stdout", ""))
        has_ended = has_ended or "end" in event
        error = message.get("error")
        assert not error, error
    assert has_ended, f"the stream ended before the command: {bytes(text[-200:])!r}"
    return text.decode()


def _connects(address: tuple[str, int]) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(address) == 0


def _listener(path: Path) -> int | None:
    """Return the process that listens on a socket, or None."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) != 0:
            return None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid


def _fabric_number() -> tuple[Any, int]:
    """Return a fabric number that no other installation of this machine uses, and its lock."""
    for number in usable_numbers(_NUMBERS):
        lock = Path(f"/tmp/paddock-fabric-{number}.lock").open("w")  # noqa: SIM115 - held
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return lock, number
    raise AssertionError("no fabric number is free: too many installations run at once")
