"""What a build starts from: an image, a template, or a snapshot of the team."""

from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase

from msgspec import Struct, structs

from paddock.builds.aws.signature import AwsKeys
from paddock.builds.credentials import BuildCredentials, RegistryLogin
from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.claims.template_resolver import TemplateResolver
from paddock.controllers.template_build.keys import StepContext, hashed
from paddock.controllers.template_build.layers import start_context_of
from paddock.controllers.template_build.sandboxes import BuildBase
from paddock.controllers.template_build.steps.runner import StepFailedError
from paddock.kit.errors import (
    ForbiddenError,
    InvalidError,
    NotFoundError,
    PaddockError,
    UnauthenticatedError,
)
from paddock.resources.kinds.checkpoint import Checkpoint, CheckpointPhase
from paddock.resources.kinds.template import (
    ImagePullPolicy,
    NetworkPolicy,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.kinds.template_build import (
    ANNOTATION_LOGIN,
    REASON_BASE,
    TemplateBuild,
)
from paddock.resources.meta import Key
from paddock.resources.network.ceiling import intersect
from paddock.resources.transitions.template_build import restricted
from paddock.runtime.port import HOST_IMAGE, ReadyImage, RegistryCredentials, Runtime

AwsLogin = Callable[[AwsKeys, str], Awaitable[RegistryLogin]]
"""Exchanges AWS keys for the credentials of the registry of an image."""


class ResolvedBase(Struct, frozen=True, kw_only=True):
    """A base that exists, and what a build inherits of it."""

    key: str
    """Key of the layer below the first step."""
    base: BuildBase
    context: StepContext = StepContext()
    start_command: str = ""
    ready_command: str = ""
    start_context: StepContext = StepContext()
    """User, working directory and variables of these commands."""
    digest: str = ""


class Bases:
    """Resolves the bases of builds."""

    def __init__(
        self,
        provider: Provider,
        runtime: Runtime,
        credentials: BuildCredentials,
        *,
        log_in: AwsLogin,
        images: tuple[str, ...] = (),
    ) -> None:
        """`images` are patterns (fnmatch) of images that the operator opens (`claim_images`)."""
        self._log_in = log_in
        self._provider = provider
        self._images = images
        self._runtime = runtime
        self._credentials = credentials
        self._resolver = TemplateResolver(provider)

    async def resolve(self, build: TemplateBuild) -> ResolvedBase:
        """Return the base of a build, pulled; `StepFailedError` if it cannot be used."""
        found = await self._resolve(build)
        name = build.spec.template_name
        template = self._provider.get(SandboxTemplate, Key(build.metadata.namespace, name))
        if template is None:
            return found
        base = structs.replace(found.base, template=restricted(found.base.template, template))
        return structs.replace(found, base=base)

    async def _resolve(self, build: TemplateBuild) -> ResolvedBase:
        spec = build.spec
        if spec.from_template:
            return self._template(build, spec.from_template)
        image = await self._pulled(build)
        template = SandboxTemplateSpec(
            image=spec.from_image,
            # Its sandboxes start from what was resolved here, also if the tag moves meanwhile.
            image_digest=None if "@" in spec.from_image else image.digest or None,
            resources=spec.resources,
        )
        # The content counts, not the name: a tag that was moved is another base.
        identity = image.identity or image.digest or spec.from_image
        return ResolvedBase(
            key=hashed("image", identity), base=BuildBase(template=template), digest=image.digest
        )

    async def _pulled(self, build: TemplateBuild) -> ReadyImage:
        name = build.spec.from_image
        self._check_host(name, is_host=name == HOST_IMAGE)
        try:
            image = await self._runtime.ensure_image(
                name,
                team=build.spec.owner,
                policy=_policy(build),
                credentials=await self._logins(build),
            )
        except (NotFoundError, ForbiddenError, InvalidError, UnauthenticatedError) as error:
            raise StepFailedError(self._reason(build, error), step=REASON_BASE) from error
        # The name may be written in other ways.
        self._check_host(name, is_host=image.identity == HOST_IMAGE)
        return image

    async def _logins(self, build: TemplateBuild) -> tuple[RegistryCredentials, ...]:
        """Return the credentials that the build was started with."""
        login = self._credentials.get(build.metadata.uid)
        if isinstance(login, AwsKeys):
            login = await self._log_in(login, build.spec.from_image)
        if login is None:
            return ()
        return (
            RegistryCredentials(host=login.host, username=login.username, password=login.password),
        )

    def _reason(self, build: TemplateBuild, error: PaddockError) -> str:
        """Return why an image was not pulled, and whether the build has lost its credentials."""
        is_lost = (
            ANNOTATION_LOGIN in build.metadata.annotations
            and self._credentials.get(build.metadata.uid) is None
        )
        if not is_lost or not isinstance(error, (ForbiddenError, UnauthenticatedError)):
            return error.message
        return (
            f"{error.message}; the registry credentials of the build were lost when the control "
            "plane restarted: start the build again"
        )

    def _check_host(self, name: str, *, is_host: bool) -> None:
        """Raise `StepFailedError` for the root file system of the machine, unless it is open."""
        if is_host and not any(fnmatchcase(name, pattern) for pattern in self._images):
            message = (
                f"templates may not be built from image {name!r}, the files of the machine; "
                "operators allow it with claim_images"
            )
            raise StepFailedError(message, step=REASON_BASE)

    def _template(self, build: TemplateBuild, reference: str) -> ResolvedBase:
        caller = Caller(build.spec.owner, build.spec.key_id)
        try:
            target = self._resolver.resolve(caller, reference)
        except PaddockError as error:
            raise StepFailedError(error.message, step=REASON_BASE) from error
        template = target.template
        network = target.network or template.network
        key = target.template_key
        home = key.namespace if key else build.metadata.namespace
        checkpoint = target.checkpoint or self._checkpoint(template, home)
        if target.checkpoint is not None or home != build.metadata.namespace:
            # A snapshot, too, may be of a sandbox that started from another team's template.
            template, network = _without_grants(template), intersect(network, NetworkPolicy())
        used = structs.replace(
            template,
            resources=build.spec.resources,
            network=network,
            restore_from=None,
            start_command=None,
            ready_command=None,
            aliases=(),
        )
        identity = checkpoint.metadata.uid if checkpoint else template.image
        ready = template.ready_command or ""
        built = self._build_of(target.template_key)
        return ResolvedBase(
            key=hashed("template", identity, dict(template.env), template.user, template.workdir),
            base=BuildBase(
                template=used,
                checkpoint_id=checkpoint.status.checkpoint_id if checkpoint else None,
            ),
            context=StepContext(workdir=template.workdir, env=dict(template.env)),
            start_command=template.start_command or "",
            ready_command=built.spec.ready_command if built else ready,
            start_context=_start_context(template, checkpoint),
            digest=template.image_digest or "",
        )

    def _checkpoint(self, template: SandboxTemplateSpec, home: str) -> Checkpoint | None:
        if template.restore_from is None:
            return None
        found = next(
            (
                item
                for item in self._provider.view(
                    Checkpoint, indexes.CHECKPOINT_ID, template.restore_from
                )
                if indexes.has_checkpoint_id(item, template.restore_from)
                and item.status.phase is CheckpointPhase.SUCCEEDED
                and item.metadata.namespace == home
            ),
            None,
        )
        if found is None:
            message = f"checkpoint {template.restore_from!r} of the base template was not found"
            raise StepFailedError(message, step=REASON_BASE) from NotFoundError(message)
        return found

    def _build_of(self, key: Key | None) -> TemplateBuild | None:
        template = self._provider.get(SandboxTemplate, key) if key else None
        if key is None or template is None or not template.status.build:
            return None
        return self._provider.get(TemplateBuild, Key(key.namespace, template.status.build))


def _start_context(template: SandboxTemplateSpec, checkpoint: Checkpoint | None) -> StepContext:
    """Return what the start command of a base runs with; it may have inherited the command."""
    inherited = start_context_of(checkpoint) if checkpoint is not None else None
    return inherited or StepContext(
        user=template.user, workdir=template.workdir, env=dict(template.env)
    )


def _policy(build: TemplateBuild) -> ImagePullPolicy:
    """Return when the registry is asked: a forced build follows a tag that was moved."""
    return ImagePullPolicy.ALWAYS if build.spec.force else ImagePullPolicy.IF_NOT_PRESENT


def _without_grants(template: SandboxTemplateSpec) -> SandboxTemplateSpec:
    """Return a template without what its team opened for it: directories, proxies, pods."""
    return structs.replace(
        template, volumes=(), outbound=None, pod_template=None, volume_claim_templates=()
    )
