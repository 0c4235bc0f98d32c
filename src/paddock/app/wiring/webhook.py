"""The admission webhook of the `api` role: TLS, fresh certificates, and what no pod can be."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from msgspec import structs

from paddock.api.admission_webhook import Check, create_app
from paddock.app.wiring.http_server import Server, listen
from paddock.kit.errors import FieldProblem, InvalidError, PaddockError
from paddock.kit.logs import fields
from paddock.kit.tasks import background
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import PauseStrategy, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, Resource
from paddock.resources.tokens import TokenSeed
from paddock.runtime.blueprint import blueprint
from paddock.runtime.kubernetes.network.policy_render import network_policy
from paddock.runtime.kubernetes.pods.render import PodSettings, render
from paddock.settings import Settings

log = logging.getLogger(__name__)

RELOAD_SECONDS = 30.0
"""Between two looks at the certificate: whoever renews it need not restart anything."""
_NOBODY = TokenSeed(b"nobody")


def pod_check(settings: Settings) -> Check:
    """Refuse templates of which no pod can be made; the driver would, when it is too late."""
    pods = PodSettings(
        agent_image=settings.agent_image or "paddock",
        system_namespace=settings.system_namespace,
        has_pod_limits=settings.pod_limits,
        allow_host=settings.pods_may_reach_host,
    )

    def check(old: Resource | None, new: Resource) -> Sequence[str]:
        path, template = _template(new)
        if template is None or (old is not None and _template(old)[1] == template):
            return ()
        _refuse_impossible(template, pods, path)
        return _warnings(template, path)

    return check


def _template(obj: Resource) -> tuple[str, SandboxTemplateSpec | None]:
    match obj:
        case SandboxTemplate():
            return "spec", obj.spec
        case Sandbox() | SandboxPool() | BatchSandbox():
            return "spec.template", obj.spec.template
        case _:
            return "", None


def _refuse_impossible(template: SandboxTemplateSpec, pods: PodSettings, path: str) -> None:
    example = Sandbox(
        metadata=ObjectMeta(name="example", namespace="default", uid="example"),
        spec=SandboxSpec(template=template),
    )
    wanted = blueprint(example, template, _NOBODY, checkpoint_id=None)
    try:
        render(wanted, pods, control_hash="")
    except InvalidError as error:
        if path == "spec":
            raise
        text = error.message.replace("spec.podTemplate", f"{path}.podTemplate")
        inner = [
            structs.replace(item, path=item.path.replace("spec.", f"{path}.", 1))
            for item in error.problems
        ]
        raise InvalidError(text, problems=inner, hint=error.hint) from error
    try:
        network_policy(wanted.egress, wanted.namespace, system_namespace=pods.system_namespace)
    except PaddockError as error:
        problem = FieldProblem(f"{path}.network", error.message)
        raise InvalidError(str(problem), problems=[problem], hint=error.hint) from error


def _warnings(template: SandboxTemplateSpec, path: str) -> list[str]:
    field = f"{path}.pauseStrategy"
    if template.pause_strategy is PauseStrategy.HIBERNATE:
        return [f"{field}: pods cannot store their memory; its sandboxes will refuse to pause"]
    if template.pause_strategy is PauseStrategy.STOP and not template.volume_claim_templates:
        return [f"{field}: without volumeClaimTemplates its sandboxes will refuse to pause"]
    return []


@contextlib.asynccontextmanager
async def served(settings: Settings) -> AsyncGenerator[None]:
    """Serve the webhook beside the body, where a certificate is set."""
    if not settings.webhook_certificate:
        yield
        return
    files = (Path(settings.webhook_certificate), Path(settings.webhook_key))
    context = _loaded(files)
    server = Server(
        create_app([pod_check(settings)]),
        listen(settings.api_host, settings.webhook_port),
        lambda: log.info("webhook serves", extra=fields(port=settings.webhook_port)),
        tls=context,
    )
    async with (
        background(server.run_until_stopped(), name="webhook") as serving,
        background(_keep_fresh(context, files), name="webhook certificate"),
    ):
        try:
            yield
        finally:
            server.should_exit = True
            await serving


def _loaded(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(*files)
    except (OSError, ssl.SSLError) as error:
        raise InvalidError(
            f"the webhook's certificate {files[0]} or key {files[1]} cannot be used: {error}",
            hint="mount both from the Secret `paddock-webhook`, or unset webhook_certificate",
        ) from error
    return context


async def _keep_fresh(context: ssl.SSLContext, files: tuple[Path, Path]) -> None:
    """Load the certificate again when its files change; connections from then on are shown it."""
    seen = _stamp(files)
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        now = _stamp(files)
        if now == seen:
            continue
        try:
            # First apart: a context that is given a certificate without its key serves nobody.
            _loaded(files)
            context.load_cert_chain(*files)
        except (InvalidError, OSError) as error:
            # Half-written, perhaps: the old one serves on, and we look again.
            log.warning("webhook certificate not taken", extra=fields(error=str(error)))
        else:
            log.info("webhook certificate renewed")
            seen = now


def _stamp(files: tuple[Path, Path]) -> tuple[bytes, ...]:
    found: list[bytes] = []
    for file in files:
        try:
            found.append(file.read_bytes())
        except OSError:
            found.append(b"")
    return tuple(found)
