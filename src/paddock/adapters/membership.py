"""Which gateways there are: from settings, DNS or Kubernetes, or as the control plane tells."""

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from paddock.gateway.routing.peers import Peers
from paddock.gateway.routing.routes import RouteTable
from paddock.kit.errors import FieldProblem, InvalidError, PaddockError
from paddock.kit.logs import fields
from paddock.settings import Settings
from paddock.store.kubernetes.client import KubernetesClient

log = logging.getLogger(__name__)

CATCH_UP_SECONDS = 5.0
_DNS = "dns:"
_KUBERNETES = "kubernetes:"


class Service(NamedTuple):
    """A Service whose endpoints are gateways."""

    namespace: str
    name: str
    port: int


class Named(NamedTuple):
    """Whom the setting `peers` names."""

    fixed: frozenset[str] = frozenset()
    names: tuple[tuple[str, int], ...] = ()
    services: tuple[Service, ...] = ()


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
    """Keeps the list of peers, without ourselves."""

    def __init__(
        self,
        settings: Settings,
        peers: Peers,
        *,
        own_url: str,
        cluster: KubernetesClient | None = None,
    ) -> None:
        self.own_url = own_url
        self._peers = peers
        self._cluster = cluster
        self._named = parse(settings.peers)
        if self._named.services and cluster is None:
            raise _invalid(settings.peers, "Services are looked up where `store` is kubernetes")
        self._heard: frozenset[str] = frozenset()
        self._resolved = self._named.fixed
        self._set()

    def heard(self, urls: Iterable[str]) -> None:
        """Take in whom the control plane knows."""
        self._heard = frozenset(urls)
        self._set()

    def _set(self) -> None:
        self._peers.set((self._heard | self._resolved) - {self.own_url})

    async def keep_caught_up(self, routes: RouteTable) -> None:
        """Look names up, and take over what peers know and we missed, until cancelled."""
        while True:
            await self._resolve()
            if await self._peers.catch_up(routes) and not routes.is_ready:
                # All that a ready peer knows is a first sync, though the control plane be down.
                routes.is_ready = True
                log.info("gateway serves", extra=fields(routes=len(routes), source="peers"))
            await asyncio.sleep(CATCH_UP_SECONDS)

    async def _resolve(self) -> None:
        try:
            self._resolved = await look_up(self._named, self._cluster)
        except (OSError, PaddockError, msgspec.DecodeError) as error:
            # What was known stays: a name server that is down must not part the gateways.
            log.warning("peers not found", extra=fields(error=repr(error)))
            return
        self._set()


async def look_up(named: Named, cluster: KubernetesClient | None) -> frozenset[str]:
    """Give the addresses of all who are named now."""
    found = set(named.fixed)
    for name, port in named.names:
        found.update(await _by_dns(name, port))
    if cluster is not None:
        for service in named.services:
            found.update(await _by_service(cluster, service))
    return frozenset(found)


async def _by_dns(name: str, port: int) -> set[str]:
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {_url(str(address[4][0]), port) for address in answers}


async def _by_service(cluster: KubernetesClient, service: Service) -> set[str]:
    """Give a Service's endpoints, ready or not: one that has no routes yet is a peer, too."""
    data = await cluster.request(
        "GET",
        f"/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices",
        resource="endpointslices",
        params={"labelSelector": f"kubernetes.io/service-name={service.name}"},
    )
    slices = msgspec.json.decode(data, type=_Slices)
    return {
        _url(address, service.port)
        for part in slices.items
        for endpoint in part.endpoints or ()
        if not endpoint.conditions.terminating
        for address in endpoint.addresses
    }


def parse(setting: str, *, takes_services: bool = True) -> Named:
    """Read the setting `peers`: fixed addresses, names and Services to look up."""
    fixed: set[str] = set()
    names: list[tuple[str, int]] = []
    services: list[Service] = []
    for item in filter(None, (part.strip() for part in setting.split(","))):
        if item.startswith(_DNS):
            names.append(_name_and_port(item, _DNS, "`dns:NAME:PORT` is expected"))
        elif takes_services and item.startswith(_KUBERNETES):
            expected = "`kubernetes:NAMESPACE/SERVICE:PORT` is expected"
            name, port = _name_and_port(item, _KUBERNETES, expected)
            namespace, _, service = name.partition("/")
            if not namespace or not service:
                raise _invalid(item, expected)
            services.append(Service(namespace, service, port))
        elif item.startswith(("http://", "https://")):
            fixed.add(_checked(item).rstrip("/"))
        else:
            too = ", `kubernetes:NAMESPACE/SERVICE:PORT`" if takes_services else ""
            raise _invalid(item, f"a URL{too} or `dns:NAME:PORT` is expected")
    return Named(frozenset(fixed), tuple(names), tuple(services))


def _name_and_port(item: str, prefix: str, expected: str) -> tuple[str, int]:
    name, _, port = item.removeprefix(prefix).rpartition(":")
    if not name or not port.isdigit():
        raise _invalid(item, expected)
    return name, int(port)


def _checked(url: str) -> str:
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise _invalid(url, f"no URL: {error}") from error
    return url


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _invalid(item: str, why: str) -> InvalidError:
    problem = FieldProblem("peers", f"{item!r}: {why}")
    return InvalidError(str(problem), problems=[problem])
