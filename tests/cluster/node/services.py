"""Services, cluster DNS and NetworkPolicies for one node.

`Services` replaces kube-proxy, the cluster's DNS server and a network plugin that enforces
NetworkPolicies. It polls the API server a few times a second and writes the packet filter of the
node's network namespace; DNS is served here, on the host end of the node's link. Pods reach each
other and the API server, and nothing else.
"""

import asyncio
import contextlib
import ssl
import struct
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import aiohttp

from paddock.kit.tasks import background
from tests.cluster.info import ClusterInfo
from tests.cluster.node import policies
from tests.cluster.users import TOKENS

RANGE = "10.0.0.0/24"
API_ADDRESS = "10.0.0.1"
DNS_ADDRESS = "10.0.0.10"
DOMAIN = "cluster.local"
LOOK_SECONDS = 0.3
START_SECONDS = 60.0
_LISTS = {
    "services": "/api/v1/services",
    "slices": "/apis/discovery.k8s.io/v1/endpointslices",
    "policies": "/apis/networking.k8s.io/v1/networkpolicies",
    "pods": "/api/v1/pods",
    "spaces": "/api/v1/namespaces",
}
_TABLE = """
add table ip cluster
delete table ip cluster
table ip cluster {{
  chain services {{
{services}
  }}
  chain arriving {{ type nat hook prerouting priority -100; jump services; }}
  chain leaving {{ type nat hook output priority -100; jump services; }}
  chain egress {{
{egress}
  }}
  chain ingress {{
{ingress}
  }}
  chain passing {{
    type filter hook forward priority 0; policy accept;
    ct state established,related accept
    ip daddr {range} reject
    oifname "{link}" ip daddr != {gateway} reject
    ip daddr {gateway} udp dport {dns_port} accept
    jump egress
    jump ingress
  }}
}}
"""
_QUESTION = struct.Struct(">HHHHHH")
_ANSWER = struct.Struct(">HHHIH4s")
_KNOWN, _UNKNOWN = 0x8580, 0x8583
_A = 1

Objects = Sequence[Mapping[str, Any]]


class Services:
    """Keeps the rules of one node up to date."""

    def __init__(
        self, info: ClusterInfo, *, pid: int, link: str, gateway: str, api_port: int
    ) -> None:
        self._info = info
        self._pid = pid
        self._link = link
        self._gateway = gateway
        """The host end of the link: address of the API server and of DNS."""
        self._api_port = api_port
        self._rules = ""
        self._has_rules = asyncio.Event()
        self._names: Mapping[str, list[str]] = {}

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Keep the rules up to date during the body, which starts when they are written."""
        loop = asyncio.get_running_loop()
        answering, _ = await loop.create_datagram_endpoint(
            lambda: _Names(self), local_addr=(self._gateway, 0)
        )
        self._dns_port = answering.get_extra_info("sockname")[1]
        tls = ssl.create_default_context(cafile=self._info.ca_file)
        headers = {"Authorization": f"Bearer {TOKENS['admin']}"}
        try:
            async with (
                aiohttp.ClientSession(
                    self._info.server,
                    headers=headers,
                    connector=aiohttp.TCPConnector(ssl=tls),
                    raise_for_status=True,
                ) as session,
                background(self._refresh_loop(session), name="services"),
            ):
                async with asyncio.timeout(START_SECONDS):
                    await self._has_rules.wait()
                yield
        finally:
            answering.close()

    async def _refresh_loop(self, session: aiohttp.ClientSession) -> None:
        while True:
            # A busy server rejects or times out: keep the current rules until then.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                await self._refresh(session)
                self._has_rules.set()
            await asyncio.sleep(LOOK_SECONDS)

    async def _refresh(self, session: aiohttp.ClientSession) -> None:
        seen: dict[str, Objects] = {}
        for name, path in _LISTS.items():
            async with session.get(path) as answer:
                seen[name] = (await answer.json())["items"]
        endpoints = _endpoints(seen["slices"])
        self._names = names(seen["services"], endpoints)
        about = (seen["policies"], seen["pods"], seen["spaces"])
        rules = _TABLE.format(
            services="\n".join((*self._fixed(), *balanced(seen["services"], endpoints))),
            ingress=policies.ingress(*about),
            egress=policies.egress(*about),
            range=RANGE,
            link=self._link,
            gateway=self._gateway,
            dns_port=self._dns_port,
        )
        if rules != self._rules:
            await asyncio.to_thread(self._apply, rules)
            self._rules = rules

    def _fixed(self) -> tuple[str, ...]:
        return (
            f"ip daddr {API_ADDRESS} tcp dport 443 dnat to {self._gateway}:{self._api_port}",
            f"ip daddr {DNS_ADDRESS} udp dport 53 dnat to {self._gateway}:{self._dns_port}",
        )

    def _apply(self, rules: str) -> None:
        command = ["nsenter", f"--target={self._pid}", "--net", "nft", "-f", "-"]
        done = subprocess.run(command, input=rules, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{rules}"

    def answer(self, query: bytes) -> bytes:
        """Answer one DNS query as a cluster's name server would."""
        number, flags, _, _, _, _ = _QUESTION.unpack_from(query)
        labels, place = [], _QUESTION.size
        while size := query[place]:
            labels.append(query[place + 1 : place + 1 + size].decode().lower())
            place += 1 + size
        question = query[_QUESTION.size : place + 5]
        found = self._names.get(".".join(labels))
        wanted = found if found and int.from_bytes(question[-4:-2]) == _A else []
        said = (_KNOWN if found is not None else _UNKNOWN) | flags & 0x100
        head = _QUESTION.pack(number, said, 1, len(wanted), 0, 0)
        records = [
            _ANSWER.pack(0xC00C, _A, 1, 1, 4, bytes(map(int, address.split("."))))
            for address in wanted
        ]
        return head + question + b"".join(records)


class _Names(asyncio.DatagramProtocol):
    def __init__(self, services: Services) -> None:
        self._services = services

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._transport.sendto(self._services.answer(data), addr)


Endpoints = Mapping[tuple[str, str], Sequence[tuple[str, Mapping[str, int]]]]
"""By namespace and name of the Service: addresses, each with ports by name."""


def _endpoints(slices: Objects) -> Endpoints:
    found: dict[tuple[str, str], list[tuple[str, Mapping[str, int]]]] = {}
    for item in slices:
        metadata = item["metadata"]
        name = metadata.get("labels", {}).get("kubernetes.io/service-name", "")
        ports = {port.get("name") or "": port["port"] for port in item.get("ports") or ()}
        for endpoint in item.get("endpoints") or ():
            if endpoint["conditions"].get("ready"):
                place = found.setdefault((metadata["namespace"], name), [])
                place += [(address, ports) for address in endpoint["addresses"]]
    return found


def _key(service: Mapping[str, Any]) -> tuple[str, str]:
    return service["metadata"]["namespace"], service["metadata"]["name"]


def names(services: Objects, endpoints: Endpoints) -> Mapping[str, list[str]]:
    """Return the DNS records: the address of each Service, or of all its endpoints."""
    found: dict[str, list[str]] = {}
    for service in services:
        namespace, name = _key(service)
        own = service["spec"].get("clusterIP")
        behind = [address for address, _ in endpoints.get((namespace, name), ())]
        found[f"{name}.{namespace}.svc.{DOMAIN}"] = behind if own == "None" else [own]
    return found


def balanced(services: Objects, endpoints: Endpoints) -> list[str]:
    """Return the rules that forward a Service's address to one of its endpoints."""
    rules: list[str] = []
    for service in services:
        own = service["spec"].get("clusterIP")
        behind = endpoints.get(_key(service), ())
        if own == "None" or not behind:
            continue
        for port in service["spec"]["ports"]:
            name = port.get("name") or ""
            places = [f"{address} . {ports[name]}" for address, ports in behind]
            table = ", ".join(f"{number} : {place}" for number, place in enumerate(places))
            chosen = f"numgen random mod {len(places)} map {{ {table} }}"
            rules.append(f"ip daddr {own} tcp dport {port['port']} dnat ip addr . port to {chosen}")
    return rules
