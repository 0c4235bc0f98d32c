"""Finds the other gateways: from settings, DNS, Kubernetes, and the control plane."""

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from paddock.gateway.routing.peers import GatewayPeers
from paddock.gateway.routing.routes import RouteTable
from paddock.kit.errors import FieldProblem, InvalidError, PaddockError
from paddock.kit.logs import fields
from paddock.settings import Settings
from paddock.store.kubernetes.client import KubernetesClient

log = logging.getLogger(__name__)

CATCH_UP_SECONDS = 5.0
_DNS = "dns:"
_KUBERNETES = "kubernetes:"


class PeerService(NamedTuple):
    """A Kubernetes Service whose endpoints are gateways."""

    namespace: str
    name: str
    port: int


class PeerSetting(NamedTuple):
    """The setting `peers`, parsed."""

    urls: frozenset[str] = frozenset()
    names: tuple[tuple[str, int], ...] = ()
    services: tuple[PeerService, ...] = ()


class _Conditions(Struct, frozen=True):
    terminating: bool | None = None


class _Endpoint(Struct, frozen=True):
    addresses: tuple[str, ...]
    conditions: _Conditions = _Conditions()


class _Slice(Struct, frozen=True):
    endpoints: tuple[_Endpoint, ...] | None = None


class _Slices(Struct, frozen=True):
    items: tuple[_Slice, ...]


class Membership:
    """Keeps the list of peers up to date, without this gateway itself."""

    def __init__(
        self,
        settings: Settings,
        peers: GatewayPeers,
        *,
        own_url: str,
        cluster: KubernetesClient | None = None,
    ) -> None:
        self.own_url = own_url
        self._peers = peers
        self._cluster = cluster
        self._setting = parse_peers(settings.peers)
        if self._setting.services and cluster is None:
            raise _invalid(settings.peers, "Services need `store = kubernetes`")
        self._reported: frozenset[str] = frozenset()
        self._resolved = self._setting.urls
        self._set()

    def set_reported(self, urls: Iterable[str]) -> None:
        """Set the gateways that the control plane reports."""
        self._reported = frozenset(urls)
        self._set()

    def _set(self) -> None:
        self._peers.set_urls((self._reported | self._resolved) - {self.own_url})

    async def keep_caught_up(self, routes: RouteTable) -> None:
        """Resolve the setting and fetch missed routes from peers at intervals, until cancelled."""
        while True:
            await self._resolve()
            if await self._peers.sync(routes) and not routes.is_ready:
                # The routes of a ready peer replace the first sync while the control plane is down.
                routes.is_ready = True
                log.info("gateway is serving", extra=fields(routes=len(routes), source="peers"))
            await asyncio.sleep(CATCH_UP_SECONDS)

    async def _resolve(self) -> None:
        try:
            self._resolved = await look_up(self._setting, self._cluster)
        except (OSError, PaddockError, msgspec.DecodeError) as error:
            # Keep the known peers: a DNS server that is down must not separate the gateways.
            log.warning("peers not found", extra=fields(error=repr(error)))
            return
        self._set()


async def look_up(setting: PeerSetting, cluster: KubernetesClient | None) -> frozenset[str]:
    """Return the URLs of all gateways that the setting names now."""
    found = set(setting.urls)
    for name, port in setting.names:
        found.update(await _by_dns(name, port))
    if cluster is not None:
        for service in setting.services:
            found.update(await _by_service(cluster, service))
    return frozenset(found)


async def _by_dns(name: str, port: int) -> set[str]:
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {base_url(str(address[4][0]), port) for address in addresses}


async def _by_service(cluster: KubernetesClient, service: PeerService) -> set[str]:
    """Return a Service's endpoints, ready or not: one without routes yet is a peer, too."""
    data = await cluster.request(
        "GET",
        f"/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices",
        resource="endpointslices",
        params={"labelSelector": f"kubernetes.io/service-name={service.name}"},
    )
    slices = msgspec.json.decode(data, type=_Slices)
    return {
        base_url(address, service.port)
        for part in slices.items
        for endpoint in part.endpoints or ()
        if not endpoint.conditions.terminating
        for address in endpoint.addresses
    }


def parse_peers(setting: str, *, takes_services: bool = True) -> PeerSetting:
    """Parse the setting `peers`: URLs, DNS names and Services."""
    urls: set[str] = set()
    names: list[tuple[str, int]] = []
    services: list[PeerService] = []
    for item in filter(None, (part.strip() for part in setting.split(","))):
        if item.startswith(_DNS):
            names.append(_name_and_port(item, _DNS, "`dns:NAME:PORT` is expected"))
        elif takes_services and item.startswith(_KUBERNETES):
            expected = "`kubernetes:NAMESPACE/SERVICE:PORT` is expected"
            name, port = _name_and_port(item, _KUBERNETES, expected)
            namespace, _, service = name.partition("/")
            if not namespace or not service:
                raise _invalid(item, expected)
            services.append(PeerService(namespace, service, port))
        elif item.startswith(("http://", "https://")):
            urls.add(_valid_url(item).rstrip("/"))
        else:
            too = ", `kubernetes:NAMESPACE/SERVICE:PORT`" if takes_services else ""
            raise _invalid(item, f"a URL{too} or `dns:NAME:PORT` is expected")
    return PeerSetting(frozenset(urls), tuple(names), tuple(services))


def _name_and_port(item: str, prefix: str, expected: str) -> tuple[str, int]:
    name, _, port = item.removeprefix(prefix).rpartition(":")
    if not name or not port.isdigit():
        raise _invalid(item, expected)
    return name, int(port)


def _valid_url(url: str) -> str:
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise _invalid(url, f"not a URL: {error}") from error
    return url


def base_url(host: str, port: int) -> str:
    """Return the URL of an HTTP server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _invalid(item: str, why: str) -> InvalidError:
    problem = FieldProblem("peers", f"{item!r}: {why}")
    return InvalidError(str(problem), problems=[problem])
