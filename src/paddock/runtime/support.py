"""The fields that a runtime cannot honour, with the reason and the alternative. Pure.

One table per runtime. Both APIs and the admission webhook refuse such an object when it is
applied; a driver that meets one nevertheless (applied without the webhook, or before an upgrade)
fails its sandboxes at once. What depends on the machine is in `port.Capabilities`.
"""

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources.contained_templates import Contained, contained_templates
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import (
    NetworkPolicy,
    PauseStrategy,
    SandboxTemplateSpec,
    Volume,
)
from paddock.resources.kinds.template_build import TemplateBuild
from paddock.resources.meta import Resource
from paddock.runtime import host_paths, rates

LOCAL, KUBERNETES = "local", "kubernetes"


class Restriction(Struct, frozen=True, kw_only=True):
    """One thing that a runtime cannot do."""

    uses: Callable[[SandboxTemplateSpec], Iterable[str]]
    """Returns the paths, below a template, of the fields that need it."""
    reason: str
    alternative: str

    @property
    def message(self) -> str:
        """The reason and the next step."""
        return f"{self.reason}; {self.alternative}"


def _claimed_volumes(spec: SandboxTemplateSpec) -> Iterable[str]:
    return (f"volumes[{n}].claimName" for n, item in enumerate(spec.volumes) if item.claim_name)


def _claim_templates(spec: SandboxTemplateSpec) -> Iterable[str]:
    return ("volumeClaimTemplates",) if spec.volume_claim_templates else ()


def _pod_template(spec: SandboxTemplateSpec) -> Iterable[str]:
    return ("podTemplate",) if spec.pod_template is not None else ()


def _hibernates(spec: SandboxTemplateSpec) -> Iterable[str]:
    return ("pauseStrategy",) if spec.pause_strategy is PauseStrategy.HIBERNATE else ()


def _stops_without_volume(spec: SandboxTemplateSpec) -> Iterable[str]:
    stops = spec.pause_strategy is PauseStrategy.STOP
    return ("pauseStrategy",) if stops and not spec.volume_claim_templates else ()


def _host_names(spec: SandboxTemplateSpec) -> Iterable[str]:
    return (f"network.{path}" for path in _named_hosts(spec.network))


def _stored_state(spec: SandboxTemplateSpec) -> Iterable[str]:
    return ("restoreFrom",) if spec.restore_from else ()


def _rates(spec: SandboxTemplateSpec) -> Iterable[str]:
    names = (*rates.NETWORK, *rates.DISK)
    fields = (name for name in names if getattr(spec.resources, name) is not None)
    return (f"resources.{_camel(name)}" for name in fields)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


_NO_RATES = Restriction(
    uses=_rates,
    reason="Kubernetes does not limit bandwidth and disk I/O of a pod by itself",
    alternative="leave it out; if the cluster's network enforces them, set the annotations "
    "kubernetes.io/ingress-bandwidth and egress-bandwidth in podTemplate",
)
_NO_MEMORY = Restriction(
    uses=_hibernates,
    reason="pods cannot store their memory",
    alternative="use Freeze, or Stop with volumeClaimTemplates",
)
_NO_HOSTS = Restriction(
    uses=_host_names,
    reason="NetworkPolicies support addresses only",
    alternative="use addresses or CIDRs",
)
_NO_STORED_STATE = Restriction(
    uses=_stored_state,
    reason="pods cannot be stored, so none can start from a checkpoint",
    alternative="use an image that has what sandboxes need",
)
TEMPLATES: Mapping[str, tuple[Restriction, ...]] = {
    LOCAL: (
        Restriction(
            uses=_claimed_volumes,
            reason="one machine has no volume claims",
            alternative="mount a directory of the machine with hostPath",
        ),
        Restriction(
            uses=_claim_templates,
            reason="one machine has no volume claims",
            alternative="leave it out: files are kept by every pause, and hostPath mounts others",
        ),
        Restriction(
            uses=_pod_template,
            reason="one machine has no pods",
            alternative="leave it out, and use the other fields of the template",
        ),
    ),
    KUBERNETES: (
        _NO_MEMORY,
        Restriction(
            uses=_stops_without_volume,
            reason="a pod that stops loses its files",
            alternative="add volumeClaimTemplates, or use Freeze",
        ),
        _NO_HOSTS,
        _NO_RATES,
        _NO_STORED_STATE,
    ),
}
_NO_BUILDS = "pods cannot be stored, so templates cannot be built; use an image that you built"
_NO_SNAPSHOTS = "pods cannot be stored; keep files on a volume (volumeClaimTemplates)"


def _named_hosts(network: NetworkPolicy) -> list[str]:
    """Return the paths of allowed destinations that are host names, not addresses."""
    return [f"allowOut[{n}]" for n, text in enumerate(network.allow_out) if not _is_address(text)]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def problems(
    runtime: str,
    new: Resource,
    old: Resource | None = None,
    *,
    allowed_paths: tuple[str, ...] | None = None,
    cluster: str | None = None,
) -> list[FieldProblem]:
    """Return what a runtime cannot do of an object, or of the parts that an update changes.

    `allowed_paths` are the directories that sandboxes may mount; `None`: not checked here. Members
    of an environment in other clusters than `cluster` are those clusters' to check.
    """
    found: list[FieldProblem] = []
    before = _by_path(old, cluster)
    for item in contained_templates(new, cluster=cluster):
        if before.get(item.path) != item.template:
            found += _template_problems(runtime, item, allowed_paths)
    if runtime == KUBERNETES:
        found += _pod_problems(new, old)
    if runtime == LOCAL and isinstance(new, Sandbox) and isinstance(old, Sandbox):
        found += _running_problems(new, old)
    return found


def _by_path(old: Resource | None, cluster: str | None) -> Mapping[str, SandboxTemplateSpec]:
    if old is None:
        return {}
    return {item.path: item.template for item in contained_templates(old, cluster=cluster)}


def _template_problems(
    runtime: str, item: Contained, allowed_paths: tuple[str, ...] | None
) -> list[FieldProblem]:
    found: dict[str, str] = {}
    for restriction in TEMPLATES.get(runtime, ()):
        known = () if item.base is None else tuple(restriction.uses(item.base))
        fields = (field for field in restriction.uses(item.template) if field not in known)
        found |= dict.fromkeys(fields, restriction.message)
    if runtime == LOCAL and allowed_paths is not None:
        known = () if item.base is None else item.base.volumes
        found |= _path_problems(item.template, known, allowed_paths)
    return [FieldProblem(item.at(field), message) for field, message in found.items()]


def _path_problems(
    spec: SandboxTemplateSpec, known: tuple[Volume, ...], allowed: tuple[str, ...]
) -> dict[str, str]:
    return {
        f"volumes[{number}].hostPath": reason
        for number, volume in enumerate(spec.volumes)
        if volume.host_path is not None
        and volume not in known
        and (reason := host_paths.refusal(volume.host_path, allowed)) is not None
    }


def check_network(runtime: str, network: NetworkPolicy) -> None:
    """Raise `InvalidError` for the network policy of a request that a runtime cannot enforce."""
    if runtime != KUBERNETES:
        return
    found = [FieldProblem(f"network.{field}", _NO_HOSTS.message) for field in _named_hosts(network)]
    if found:
        raise InvalidError("; ".join(str(item) for item in found), problems=found)


def _pod_problems(new: Resource, old: Resource | None) -> list[FieldProblem]:
    """Return what pods cannot do of the fields outside of a template."""
    if isinstance(new, Checkpoint) and old is None:
        return [FieldProblem("spec", _NO_SNAPSHOTS)]
    if isinstance(new, TemplateBuild) and old is None:
        return [FieldProblem("spec", _NO_BUILDS)]
    if not isinstance(new, Sandbox):
        return []
    spec, before = new.spec, old.spec if isinstance(old, Sandbox) else None
    found: list[FieldProblem] = []
    if spec.restore_from and (before is None or before.restore_from != spec.restore_from):
        found.append(FieldProblem("spec.restoreFrom", _NO_SNAPSHOTS))
    is_new = before is None or before.pause_strategy is not spec.pause_strategy
    if is_new and spec.pause_strategy is PauseStrategy.HIBERNATE:
        found.append(FieldProblem("spec.pauseStrategy", _NO_MEMORY.message))
    return found


def _running_problems(new: Sandbox, old: Sandbox) -> list[FieldProblem]:
    """Return what one machine cannot change of a sandbox that exists."""
    changes = {
        "image": old.spec.image != new.spec.image,
        "resources": old.spec.resources != new.spec.resources,
    }
    return [
        FieldProblem(
            f"spec.{field}",
            "one machine cannot change it in place; create a sandbox with the other value",
        )
        for field, is_changed in changes.items()
        if is_changed
    ]


def support_check(
    runtime: str, *, allowed_paths: tuple[str, ...] | None = None, cluster: str | None = None
) -> Callable[[Resource | None, Resource], Sequence[str]]:
    """Return the check of an API: it raises `InvalidError` for what the runtime cannot do."""

    def check(old: Resource | None, new: Resource) -> Sequence[str]:
        if found := problems(runtime, new, old, allowed_paths=allowed_paths, cluster=cluster):
            text = "; ".join(str(item) for item in found)
            name = new.metadata.name or new.metadata.generate_name
            raise InvalidError(
                f"{new.KIND} {name!r} cannot run on the runtime {runtime!r}: {text}", problems=found
            )
        return ()

    return check
