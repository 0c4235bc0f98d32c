"""Sandboxes of builds: acquired like any other of the team, within its quota and turns.

Clients do not see them. Each has an end of its own, so that none outlives a build that was
forgotten.
"""

from collections.abc import Callable
from datetime import timedelta

from msgspec import Struct, structs

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims import cold
from paddock.claims.acquirer import Acquirer, Attempt
from paddock.claims.caller import Caller
from paddock.claims.lost_replies import LostReplies
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.kit.errors import NotFoundError, UnavailableError
from paddock.resources.kinds.sandbox import ClaimIdentity, Sandbox
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.kinds.template_build import LABEL_BUILD, TemplateBuild
from paddock.resources.meta import owner_reference, with_meta
from paddock.resources.tokens import TokenSeed, hashed
from paddock.resources.transitions.claim import Terms

START_SECONDS = 600.0
"""Longest start of a sandbox: its image may have to be pulled."""
DELETE_SECONDS = 60.0


class BuildBase(Struct, frozen=True, kw_only=True):
    """What a sandbox of a build starts from."""

    template: SandboxTemplateSpec
    checkpoint_id: str | None = None
    """Public id of a checkpoint, whose files are used; `None`: the image of the template."""


class BuildSandboxes:
    """Acquires and deletes sandboxes of builds."""

    def __init__(
        self,
        provider: Provider,
        acquirer: Acquirer,
        seed: TokenSeed,
        clock: Clock,
        *,
        max_seconds: float,
    ) -> None:
        self._provider = provider
        self._acquirer = acquirer
        self._seed = seed
        self._clock = clock
        self.lost_replies = LostReplies(provider, acquirer.reservations, acquirer.pool_members)
        self._max_seconds = max_seconds

    async def acquire(self, build: TemplateBuild, base: BuildBase) -> Sandbox:
        """Return a running sandbox; `QuotaExceededError`, `UnavailableError` and others."""
        terms = self._terms(build, base)

        async def work(attempt: Attempt) -> Sandbox:
            found = await attempt.take_or_create(None, self._new_sandbox(build, base, terms))
            if found is None:
                raise UnavailableError("no sandbox was created", retry_after_seconds=1)
            return found[0]

        sandbox = await self._acquirer.acquire(
            Caller(build.spec.owner, build.spec.key_id),
            terms,
            build.spec.resources,
            work,
            on_unresolved=self.lost_replies.add,
        )
        return await self._provider.waits.ready(sandbox).wait(START_SECONDS, written=sandbox)

    async def delete_all(self, build: TemplateBuild) -> None:
        """Delete the sandboxes of a build."""
        for sandbox in self.of(build):
            try:
                await self._provider.write.delete(sandbox)
            except NotFoundError:
                continue

    def of(self, build: TemplateBuild) -> tuple[Sandbox, ...]:
        """Return the sandboxes of a build that are not being deleted."""
        found = self._provider.informer(Sandbox).by_index(indexes.OWNER_UID, build.metadata.uid)
        return tuple(sandbox for sandbox in found if not sandbox.is_deleting)

    def _terms(self, build: TemplateBuild, base: BuildBase) -> Terms:
        now = self._clock.now()
        sandbox_id = ids.sandbox_id()
        identity = ClaimIdentity(
            sandbox_id=sandbox_id,
            owner=build.spec.owner,
            key_id=build.spec.key_id,
            lock=ids.uid(),
            claim_time=now,
            template_id=build.spec.template_name,
            access_token_hash=hashed(self._seed.access_token(sandbox_id)),
            account=self._acquirer.reservations.account,
        )
        return Terms(
            identity=identity,
            traffic_token_hash=hashed(self._seed.traffic_token(sandbox_id)),
            # Nobody has a token of it: a build serves no requests.
            network=structs.replace(base.template.network, allow_public_traffic=False),
            shutdown_time=now + timedelta(seconds=self._max_seconds),
            labels={LABEL_BUILD: build.metadata.name},
        )

    def _new_sandbox(
        self, build: TemplateBuild, base: BuildBase, terms: Terms
    ) -> Callable[[], Sandbox]:
        def make() -> Sandbox:
            sandbox = cold.new_sandbox(
                terms,
                base.template,
                namespace=build.metadata.namespace,
                template_name=build.spec.template_name,
                now=self._clock.now(),
                name_prefix="build-",
                restore_from=base.checkpoint_id,
                restore_memory=False,
            )
            return with_meta(sandbox, owner_references=(owner_reference(build),))

        return make
