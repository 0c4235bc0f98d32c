"""Use cases of builds: request, start, follow. A controller does the work (`controllers/`).

A client registers a build, uploads the files of its steps, submits the steps and follows the
status. What is stored is a `TemplateBuild`; logs and uploads are files (`builds/`).
"""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta

from msgspec import structs

from paddock.builds.files import BuildFiles
from paddock.builds.log_files import BuildLogEntry
from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims.caller import Caller, Role
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import (
    InvalidError,
    NotFoundError,
    QuotaExceededError,
    UnauthenticatedError,
    UnsupportedError,
)
from paddock.manager.templates import build_state
from paddock.manager.templates.build_requests import (
    BuildLimits,
    BuildStart,
    NewBuild,
    check_start,
    resources_of,
    with_start,
)
from paddock.manager.templates.build_state import SUPERSEDED, BuildReason, BuildState
from paddock.manager.templates.names import parse_name, requested_tags
from paddock.manager.templates.registry import TemplateRegistry
from paddock.manager.templates.tags import RESOURCE, TemplateTags
from paddock.resources.kinds.template import SandboxTemplate
from paddock.resources.kinds.template_build import (
    BuildPhase,
    TemplateBuild,
    TemplateBuildSpec,
)
from paddock.resources.meta import Key, ObjectMeta, owner_reference
from paddock.resources.transitions.template_tags import is_finished, share_tag

MAX_WAITING = 100
"""Builds of a team that are registered and not started."""
WAITING_SECONDS = 7200
"""After this time, a build that was not started no longer counts."""


class TemplateBuilds:
    """Builds of the caller's templates."""

    def __init__(
        self,
        *,
        provider: Provider,
        registry: TemplateRegistry,
        tags: TemplateTags,
        files: BuildFiles | None,
        clock: Clock,
        limits: BuildLimits,
    ) -> None:
        """`files` is None where the runtime cannot build templates."""
        self._provider = provider
        self._registry = registry
        self._tags = tags
        self._files = files
        self._clock = clock
        self._limits = limits

    @property
    def is_supported(self) -> bool:
        """Whether templates can be built here."""
        return self._files is not None

    @property
    def files(self) -> BuildFiles:
        """What builds have outside the store; `UnsupportedError` if nothing is built here."""
        if self._files is None:
            raise UnsupportedError(
                "template builds are not supported by this runtime: pods cannot be stored",
                hint="declare a SandboxTemplate (`paddock apply`) with a container image",
            )
        return self._files

    # ---- request and start -------------------------------------------------------------------

    async def request(
        self, caller: Caller, wanted: NewBuild
    ) -> tuple[SandboxTemplate, TemplateBuild]:
        """Register a build; the template is created if there is none of this name."""
        _ = self.files
        name = parse_name(wanted.name, caller.team)
        tags = requested_tags(name, wanted.tags)
        resources = resources_of(wanted, self._limits)
        caller.require("create", RESOURCE, template=name.alias)
        self._check_room(caller.team, for_start=False)
        # Creation times have whole seconds; the history of a template is in the order of requests.
        build_id = ids.ordered_uid(self._clock.now())
        self._tags.check_room(caller.team, name.alias, tags, build_id)
        template = await self._registry.ensure(caller, name.alias, resources)
        build = await self._provider.write.create(
            TemplateBuild(
                metadata=ObjectMeta(
                    name=build_id,
                    namespace=template.metadata.namespace,
                    owner_references=(owner_reference(template),),
                ),
                spec=TemplateBuildSpec(
                    template_name=template.metadata.name,
                    tags=tags,
                    resources=resources,
                    owner=caller.team,
                    key_id=caller.key_id,
                ),
            )
        )
        await self._tags.add(template, tags, build.metadata.name)
        await self._supersede(build, started=False)
        return template, build

    async def start(
        self, caller: Caller, reference: str, build_id: str, wanted: BuildStart
    ) -> None:
        """Submit the steps of a registered build. It is built when it is its turn."""
        files = self.files
        build = self._find(caller, reference, build_id, "create")
        check_start(wanted)
        self._check_rights(caller, build, wanted)
        _check_waiting(build)
        await self._supersede(build, started=True)
        self._check_room(build.spec.owner or caller.team, for_start=True)
        if wanted.login is not None:
            files.credentials.put(build.metadata.uid, wanted.login)

        def started(now: TemplateBuild) -> TemplateBuild:
            _check_waiting(now)
            return with_start(now, wanted)

        try:
            await self._provider.write.mutate(
                TemplateBuild, build.key, started, uid=build.metadata.uid
            )
        except BaseException:
            files.credentials.remove(build.metadata.uid)
            raise

    def _check_rights(self, caller: Caller, build: TemplateBuild, wanted: BuildStart) -> None:
        """Raise `ForbiddenError` unless the caller may use the base and replace the template.

        The template, or the caller's role, may have changed since the request.
        """
        if wanted.from_template:
            caller.require("create", RESOURCE, template=wanted.from_template)
        name = build.spec.template_name
        template = self._provider.get(SandboxTemplate, Key(build.metadata.namespace, name))
        if template is None:
            raise NotFoundError(f"template '{name}' not found")
        self._registry.check_rebuild(caller, template, name)

    async def _supersede(self, build: TemplateBuild, *, started: bool) -> None:
        """Cancel the other builds of the template that share a tag and are (not) started."""
        template = Key(build.metadata.namespace, build.spec.template_name)
        builds = self._provider.builds_of_template(template)
        for other in builds.values():
            is_meant = other.spec.started is started and not is_finished(other)
            if other.metadata.uid != build.metadata.uid and is_meant and share_tag(other, build):
                await self._cancel(other, SUPERSEDED)

    async def _cancel(self, build: TemplateBuild, reason: str) -> None:
        def canceled(now: TemplateBuild) -> TemplateBuild | None:
            if is_finished(now):
                return None
            return structs.replace(now, spec=structs.replace(now.spec, canceled=reason))

        try:
            await self._provider.write.mutate(
                TemplateBuild, build.key, canceled, uid=build.metadata.uid
            )
        except NotFoundError:
            return

    def _check_room(self, team: str, *, for_start: bool) -> None:
        """Raise `QuotaExceededError` if the team has too many builds at once."""
        since = self._clock.now() - timedelta(seconds=WAITING_SECONDS)
        open_builds = [
            item
            for item in self._provider.view(TemplateBuild, indexes.OPEN_BUILD, team)
            if not is_finished(item) and not item.is_deleting
        ]
        running = sum(item.spec.started for item in open_builds)
        if running >= self._limits.builds_per_team:
            raise QuotaExceededError(
                "you have reached the maximum number of concurrent template builds "
                f"({self._limits.builds_per_team})"
            )
        waiting = sum(
            not item.spec.started and (item.metadata.creation_timestamp or since) > since
            for item in open_builds
        )
        if not for_start and waiting >= MAX_WAITING:
            raise QuotaExceededError(
                f"{MAX_WAITING} template builds were requested and not started: start them first"
            )

    # ---- follow ------------------------------------------------------------------------------

    async def state(
        self, caller: Caller, reference: str, build_id: str, *, offset: int, limit: int, level: str
    ) -> BuildState:
        """Return the status of a build, and its log from an offset on."""
        logs = self.files.logs
        build = self._find(caller, reference, build_id, "get")
        status, uid = build_state.status_of(build), build.metadata.uid
        if status == build_state.WAITING:
            return BuildState(build=build, status=status)
        entries = await logs.read(uid, offset=offset, limit=limit, level=level)
        reason = None
        if status == build_state.ERROR:
            step = build.status.failed_step
            found = await logs.read(uid, level="warn") if step else ()
            reason = BuildReason(
                message=build_state.message_of(build),
                step=step,
                entries=tuple(item for item in found if item.step == step),
            )
        return BuildState(build=build, status=status, entries=entries, reason=reason)

    async def log(
        self,
        caller: Caller,
        reference: str,
        build_id: str,
        *,
        cursor: datetime | None,
        limit: int,
        level: str,
        backward: bool,
    ) -> tuple[BuildLogEntry, ...]:
        """Return a page of a build's log: from a time on, or backward from it."""
        logs = self.files.logs
        build = self._find(caller, reference, build_id, "get")
        return await logs.page(
            build.metadata.uid, cursor=cursor, limit=limit, level=level, backward=backward
        )

    def _find(self, caller: Caller, reference: str, build_id: str, verb: str) -> TemplateBuild:
        """Return a build of the caller's; `InvalidError` if there is none, as clients expect."""
        build = self._registry.build(caller, reference, build_id)
        if build is None:
            raise InvalidError(f"Build '{build_id}' not found")
        caller.require(verb, RESOURCE, template=build.spec.template_name)
        return build

    # ---- files -------------------------------------------------------------------------------

    def offer(self, caller: Caller, reference: str, digest: str) -> tuple[str, bool]:
        """Return a token for the upload of files, and whether they are present already."""
        uploads = self.files.uploads
        template = self._registry.own(caller, reference)
        caller.require("create", RESOURCE, template=template.metadata.name)
        team = template.metadata.namespace
        is_present = uploads.path(team, digest) is not None
        return uploads.offer(team, digest, key_id=caller.key_id), is_present

    def uploader(self, token: str) -> Caller:
        """Return the caller that a token was given to; `UnauthenticatedError` if it is unknown."""
        offer = self.files.uploads.offered(token)
        if offer is None:
            raise UnauthenticatedError(
                "the upload URL is unknown or has expired", hint="request a new one"
            )
        return Caller(offer.team, offer.key_id, Role.MEMBER)

    async def upload(self, token: str, chunks: AsyncIterator[bytes], *, length: int | None) -> None:
        """Store an upload; the token stands for the caller."""
        await self.files.uploads.write(token, chunks, length=length)


def _check_waiting(build: TemplateBuild) -> None:
    is_waiting = build.status.phase is BuildPhase.WAITING
    if build.spec.started or build.spec.canceled or not is_waiting or build.is_deleting:
        raise InvalidError("build is not in waiting state")
