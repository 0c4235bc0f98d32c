"""The check of the admission webhook that refuses templates of which no pod can be made.

Without it, the driver would refuse them only when it makes the pod.
"""

from collections.abc import Sequence

from msgspec import structs

from paddock.api.admission_webhook import Check
from paddock.kit.errors import FieldProblem, InvalidError, PaddockError
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, Resource
from paddock.resources.tokens import TokenSeed
from paddock.runtime.blueprint import blueprint
from paddock.runtime.kubernetes.network.policy_render import network_policy
from paddock.runtime.kubernetes.pods.render import PodSettings, render
from paddock.settings import Settings

_EXAMPLE_SEED = TokenSeed(b"example")


def pod_check(settings: Settings) -> Check:
    """Return the check; it renders a pod of each new or changed template."""
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
        return ()

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
    wanted = blueprint(example, template, _EXAMPLE_SEED, checkpoint_id=None)
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
