"""The check of the admission webhook that refuses templates of which no pod can be made.

Without it, the driver would refuse them only when it makes the pod.
"""

from collections.abc import Sequence

from msgspec import structs

from paddock.api.admission_webhook import Check
from paddock.kit.errors import FieldProblem, InvalidError, PaddockError
from paddock.resources.contained_templates import Contained, contained_templates
from paddock.resources.kinds.sandbox import Sandbox, SandboxSpec
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
        own = settings.cluster_id
        before = (
            {}
            if old is None
            else {item.path: item.template for item in contained_templates(old, cluster=own)}
        )
        for item in contained_templates(new, cluster=own):
            if before.get(item.path) != item.template:
                _refuse_impossible(item, pods)
        return ()

    return check


def _refuse_impossible(item: Contained, pods: PodSettings) -> None:
    template = item.template
    example = Sandbox(
        metadata=ObjectMeta(name="example", namespace="default", uid="example"),
        spec=SandboxSpec(template=template),
    )
    wanted = blueprint(example, template, _EXAMPLE_SEED, checkpoint_id=None)
    try:
        render(wanted, pods, control_hash="")
    except InvalidError as error:
        text = error.message.replace("spec.podTemplate", item.at("podTemplate"))
        inner = [
            structs.replace(problem, path=item.at(problem.path.removeprefix("spec.")))
            for problem in error.problems
        ]
        raise InvalidError(text, problems=inner, hint=error.hint) from error
    try:
        network_policy(wanted.egress, wanted.namespace, system_namespace=pods.system_namespace)
    except PaddockError as error:
        problem = FieldProblem(item.at("network"), error.message)
        raise InvalidError(str(problem), problems=[problem], hint=error.hint) from error
