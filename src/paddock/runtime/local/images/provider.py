"""Images for sandboxes: those of the store, and those of registries, pulled on demand.

A name that the store has without a digest (built or imported here) and the names of built-in images
never cause a network call. Concurrent requests of a team for one image share a pull (a *flight*).
It goes on when its callers are gone, so that the next call finds the image or joins; one that still
waits for its turn is withdrawn. What needs no credentials is pulled once for all teams: the flight
of a team that has its turn follows the one that pulls. So nobody waits in the queue of another
team, or fails by its share.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct, structs

from paddock.kit.clock import Clock
from paddock.kit.errors import (
    ImageMissingError,
    InvalidError,
    NotFoundError,
    QuotaExceededError,
    RateLimitedError,
    UnavailableError,
)
from paddock.kit.logs import fields
from paddock.resources.kinds.template import ImagePullPolicy
from paddock.runtime.local.images.access import may_use
from paddock.runtime.local.images.base import BUILT_IN_NAMES, HOST_NAME
from paddock.runtime.local.images.model import Image, Manifest, canonical_name
from paddock.runtime.local.images.registry.puller import LayerProgress, PulledImage, Puller
from paddock.runtime.local.images.registry.reference import parse_reference
from paddock.runtime.local.images.store import ImageStore
from paddock.runtime.local.node.heavy_work import HeavyKind, HeavyWork
from paddock.runtime.port import HOST_IMAGE, ImagePull, ReadyImage, RegistryCredentials

log = logging.getLogger(__name__)

_MAX_SECONDS = 3600.0
"""Of one pull; a registry may send slowly for ever."""


_RETRY_SECONDS = 10.0
_UNNEEDED_SECONDS = 60.0
"""How long a pull waits for its turn after its last caller has left: callers ask repeatedly."""
_MAX_FLIGHTS = 100
"""Pulls of a team at a time, with those that wait for their turn."""


class ImageRequest(Struct, frozen=True, kw_only=True):
    """The arguments of `Runtime.ensure_image`."""

    reference: str
    team: str
    policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    credentials: tuple[RegistryCredentials, ...] = ()


class _Flight:
    """A pull in progress."""

    def __init__(self, key: tuple[str, str, str], request: ImageRequest, since: float) -> None:
        """`key`: the image, the team, and a fingerprint of the credentials."""
        self.key = key
        self.request = request
        self.since = since
        self.is_pulling = False
        self.leader: _Flight | None = None
        """The flight of another team that pulls the image."""
        self._waiters = 0
        """Calls that need the result."""
        self._unneeded: asyncio.TimerHandle | None = None
        self.layers: dict[str, LayerProgress] = {}
        self.task: asyncio.Task[ReadyImage] | None = None

    def add_waiter(self) -> None:
        """Count a call that needs the result."""
        self._waiters += 1
        if self._unneeded is not None:
            self._unneeded.cancel()

    def remove_waiter(self, withdraw: Callable[[], None]) -> None:
        """Count a call no more. If no other comes, `withdraw` is called a while after the last."""
        self._waiters -= 1
        if not self._waiters and self.task is not None and not self.task.done():
            loop = asyncio.get_running_loop()
            self._unneeded = loop.call_later(_UNNEEDED_SECONDS, withdraw)

    def show(self, layer: LayerProgress) -> None:
        """Record the progress of a layer."""
        if layer.state != "present":
            self.layers[layer.digest] = layer

    @property
    def image(self) -> tuple[str, str]:
        """What flights of several teams have in common; credentials are of one team."""
        name, team, login = self.key
        return (name, f"{team}\0{login}" if login else "")

    @property
    def done_bytes(self) -> int:
        """What was downloaded so far."""
        return sum(layer.done_bytes for layer in self.layers.values())

    def report(self, now: float) -> ImagePull:
        """Return the progress of all layers together."""
        pulling = self.leader or self
        return ImagePull(
            reference=self.request.reference,
            team=self.request.team,
            done_bytes=pulling.done_bytes,
            total_bytes=sum(layer.total_bytes for layer in pulling.layers.values()),
            seconds=now - self.since,
            is_waiting=not pulling.is_pulling,
        )


class ImageProvider:
    """Finds images for sandboxes, and pulls those that are missing."""

    def __init__(
        self,
        store: ImageStore,
        puller: Puller,
        heavy_work: HeavyWork,
        clock: Clock,
        *,
        node_name: str = "",
    ) -> None:
        self._store = store
        self._puller = puller
        self._heavy_work = heavy_work
        self._clock = clock
        self._node_name = node_name
        self._flights: dict[tuple[str, str, str], _Flight] = {}

    def find(self, image: str, *, digest: str = "", team: str = "") -> Image:
        """Return an image of the store that a team may use. Blocks on the disk.

        Raises `ImageMissingError` if a pull may help, else `NotFoundError`.
        """
        if self._is_built_in(image):
            return self._store.resolve(image)
        manifest = self._manifest(image, digest)
        if manifest is None or not may_use(manifest, team):
            shown = f"{image} ({digest})" if digest else image
            raise ImageMissingError(
                f"there is no image {shown} on this node",
                hint="get it: paddock image pull, paddock image import",
            )
        self._store.refs.mark_used(manifest.name, self._clock.now().timestamp())
        try:
            return self._store.image(manifest)
        except NotFoundError as error:  # it has lost a layer
            if not manifest.digest:
                raise
            raise ImageMissingError(error.message, hint="pull it again") from error

    async def ensure(self, request: ImageRequest) -> ReadyImage:
        """Return an image that is there, after a pull if necessary."""
        found = await self._heavy_work.run(self._present, request)
        if found is not None:
            return found
        if request.policy is ImagePullPolicy.NEVER:
            raise NotFoundError(
                f"image {request.reference!r} is not on this node, and its pull policy is Never",
                hint="pull it with `paddock image pull`, or use the policy IfNotPresent",
            )
        flight = self._join(request)
        if flight.task is None:
            raise UnavailableError("the pull has not begun")
        flight.add_waiter()
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.remove_waiter(lambda: self._withdraw(flight))

    def pulls(self) -> tuple[ImagePull, ...]:
        """Return the pulls in progress."""
        now = self._clock.monotonic()
        return tuple(flight.report(now) for flight in self._flights.values())

    async def close(self) -> None:
        """Cancel all pulls; the next request continues them."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _present(self, request: ImageRequest) -> ReadyImage | None:
        """Return the image if nothing has to be asked of a registry."""
        if self._is_built_in(request.reference):
            return self._built_in(request.reference)
        manifest = self._manifest(request.reference, "")
        if manifest is None or not may_use(manifest, request.team):
            return None
        # A registry cannot have another version of a digest, or of an image that was made here.
        is_fixed = not manifest.digest or "@" in request.reference
        if request.policy is ImagePullPolicy.ALWAYS and not is_fixed:
            return None
        if manifest.digest and not self._store.is_whole(manifest):
            return None  # a pull restores what it has lost
        # Before it is looked at: from now on it is not evicted until a sandbox has it.
        self._store.refs.mark_used(manifest.name, self._clock.now().timestamp())
        self._store.image(manifest)  # raises if it has lost a layer
        return self._ready(request.reference, manifest)

    def _manifest(self, image: str, digest: str) -> Manifest | None:
        """Return the manifest of a name, or of one version of it."""
        for name in names_of(image, digest):
            if (manifest := self._store.manifest(name)) is not None:
                return manifest
        return None

    def _is_built_in(self, reference: str) -> bool:
        """Whether a name is that of an image that is built on this machine, never pulled."""
        try:
            name = self._store.known_name(reference)
        except InvalidError:
            return False
        return name in BUILT_IN_NAMES or name == HOST_NAME

    def _built_in(self, image: str) -> ReadyImage:
        """Return an image that is made on this machine; the root of the host is always there."""
        name = self._store.known_name(image)
        if name == HOST_NAME:
            return ReadyImage(reference=image, identity=HOST_IMAGE, location=self._node_name)
        self._store.resolve(name)  # raises if it is not built
        manifest = self._store.manifest(name) or self._store.built_in_manifest(name)
        identity = content_identity(manifest) if manifest is not None else ""
        return ReadyImage(reference=image, identity=identity, location=self._node_name)

    def _join(self, request: ImageRequest) -> _Flight:
        """Return the flight of the team for an image; start it if there is none."""
        reference = parse_reference(request.reference)
        login = _login_for(reference.host, request.credentials)
        key = (reference.name, request.team, _fingerprint(login))
        flight = self._flights.get(key)
        if flight is None:
            if sum(team == request.team for _, team, _ in self._flights) >= _MAX_FLIGHTS:
                raise RateLimitedError(
                    f"image {request.reference} is not pulled yet: team '{request.team}' has "
                    f"{_MAX_FLIGHTS} pulls on this machine",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            flight = self._flights[key] = _Flight(key, request, self._clock.monotonic())
            flight.task = asyncio.create_task(self._fly(flight, login))
            flight.task.add_done_callback(lambda task: self._end(flight, task))
        return flight

    def _withdraw(self, flight: _Flight) -> None:
        """Cancel a flight that still waits for its turn: nobody needs the result."""
        if flight.task is not None and not flight.is_pulling and flight.leader is None:
            self._forget(flight)
            flight.task.cancel()

    def _forget(self, flight: _Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _end(self, flight: _Flight, task: asyncio.Task[ReadyImage]) -> None:
        self._forget(flight)
        if not task.cancelled() and (problem := task.exception()) is not None:
            image = flight.request.reference
            log.warning("image not pulled", extra=fields(image=image, reason=str(problem)))

    async def _fly(self, flight: _Flight, login: RegistryCredentials | None) -> ReadyImage:
        """Pull the image, or follow the team that pulls it without credentials, as this one."""
        request, may_follow = flight.request, login is None
        while True:
            flight.leader = self._leader(flight) if may_follow else None
            if flight.leader is None:
                async with self._heavy_work.turn(HeavyKind.PULL, request.team, request.reference):
                    flight.leader = self._leader(flight) if may_follow else None
                    if flight.leader is None:
                        flight.is_pulling = True
                        return await self._pull(flight, login)
            if (task := flight.leader.task) is not None:
                try:
                    found = await asyncio.shield(task)
                    return structs.replace(found, reference=request.reference, pulled_bytes=0)
                except QuotaExceededError:
                    pass  # the share of the other team is full
                except asyncio.CancelledError:
                    # The other flight was cancelled, unless this one was.
                    own = asyncio.current_task()
                    if own is None or own.cancelling() or not task.cancelled():
                        raise
            may_follow = False

    def _leader(self, flight: _Flight) -> _Flight | None:
        """Return the flight of another team that pulls the same image."""
        for other in self._flights.values():
            if other is not flight and other.is_pulling and other.image == flight.image:
                return other
        return None

    async def _pull(self, flight: _Flight, login: RegistryCredentials | None) -> ReadyImage:
        request = flight.request
        pulled = await self._pull_bounded(flight, login)
        seconds = self._clock.monotonic() - flight.since
        size = flight.done_bytes if pulled.is_new else 0
        log.info(
            "image pulled",
            extra=fields(
                image=request.reference,
                digest=pulled.digest,
                team=request.team,
                bytes=size,
                seconds=round(seconds, 3),
            ),
        )
        return ReadyImage(
            reference=request.reference,
            digest=pulled.digest,
            identity=pulled.digest,
            location=self._node_name,
            pulled_bytes=size,
            seconds=seconds,
        )

    async def _pull_bounded(
        self, flight: _Flight, login: RegistryCredentials | None
    ) -> PulledImage:
        request, limit = flight.request, asyncio.timeout(_MAX_SECONDS)
        try:
            async with limit:
                return await self._puller.pull(
                    request.reference,
                    team=request.team,
                    credentials=login,
                    on_progress=flight.show,
                )
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UnavailableError(
                f"image {request.reference!r} was not pulled within {_MAX_SECONDS:.0f} seconds",
                hint="the next attempt continues with what was downloaded",
            ) from error

    def _ready(self, reference: str, manifest: Manifest) -> ReadyImage:
        return ReadyImage(
            reference=reference,
            digest=manifest.digest,
            identity=manifest.digest or content_identity(manifest),
            location=self._node_name,
        )


def content_identity(manifest: Manifest) -> str:
    """Return a digest of the layers and the configuration of an image."""
    content = msgspec.json.encode((manifest.layers, manifest.config), order="sorted")
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def names_of(image: str, digest: str = "") -> Iterable[str]:
    """Yield the names by which the store may have an image: as given, then as it is pulled."""
    if not digest:
        with contextlib.suppress(InvalidError):  # such as a host in upper case
            yield canonical_name(image)
    reference = parse_reference(image)
    if digest or reference.digest:
        yield reference.version(digest or reference.digest).name
    else:
        yield reference.name


def _login_for(host: str, logins: tuple[RegistryCredentials, ...]) -> RegistryCredentials | None:
    return next((login for login in logins if login.host in ("", host)), None)


def _fingerprint(login: RegistryCredentials | None) -> str:
    """Return a text that differs for different credentials."""
    return "" if login is None else hashlib.sha256(msgspec.json.encode(login)).hexdigest()


def known_names(reference: str) -> tuple[str, ...]:
    """Return the names by which the store may have an image; none if it is malformed."""
    try:
        return tuple(names_of(reference))
    except InvalidError:
        return ()
