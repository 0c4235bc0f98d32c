"""Rules between fields: each once in Python and, where the API server can check it, once in CEL.

Both forms share path and message, so that users read the same text in both places. Limits of single
fields are in `constraints`. `validation` runs the rules, `openapi` writes them into schemas.
`tests/on_cluster` compares the two forms on a real API server.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from paddock.resources.kinds.batch import BatchSandbox, BatchSandboxSpec
from paddock.resources.kinds.checkpoint import CheckpointSpec
from paddock.resources.kinds.claim import (
    InplaceUpdate,
    SandboxClaim,
    SandboxClaimSpec,
    UpdatedResources,
)
from paddock.resources.kinds.env import (
    MemberConfig,
    SandboxEnv,
    SandboxEnvSpec,
    ScalePolicy,
    ScalingGroup,
)
from paddock.resources.kinds.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import SandboxSpec
from paddock.resources.kinds.template import (
    NetworkPolicy,
    Probe,
    SandboxTemplate,
    SandboxTemplateSpec,
    Volume,
)
from paddock.resources.kinds.template_build import TemplateBuildSpec
from paddock.resources.schema import formats


class Rule(Struct, frozen=True):
    """A condition on the fields of one struct."""

    path: str
    """Path of the invalid field, relative to the struct."""
    message: str
    holds: Callable[[Any], bool]
    cel: str | None = None
    is_costly: bool = False
    """Whether the rule checks every item of a list. The API server rejects such a rule where the
    struct itself is an item of a list or mapping, because of its estimated cost."""


class Transition(Struct, frozen=True):
    """A condition on the old and the new value of a struct."""

    path: str
    message: str
    holds: Callable[[Any, Any], bool]
    cel: str


def _distinct(values: list[Any]) -> bool:
    return len(values) == len(set(values))


def _fixed(field: str, name: str, *, absent: str | None = None) -> Transition:
    """Return the rule that a field is immutable. `absent` is the CEL literal of its default."""
    if absent is None:
        cel = f"self.{field} == oldSelf.{field}"
    else:
        new = f"(has(self.{field}) ? self.{field} : {absent})"
        cel = f"{new} == {new.replace('self.', 'oldSelf.')}"
    return Transition(
        field,
        "is immutable; create a new object instead",
        lambda old, new: getattr(old, name) == getattr(new, name),
        cel,
    )


def _fixed_once_set(field: str, name: str) -> Transition:
    """Return the rule that a field is immutable once it is set."""
    return Transition(
        field,
        "is immutable once set",
        lambda old, new: not getattr(old, name) or getattr(old, name) == getattr(new, name),
        f"!has(oldSelf.{field}) || oldSelf.{field} == '' "
        f"|| (has(self.{field}) && self.{field} == oldSelf.{field})",
    )


def _domains_need_closed_internet(policy: NetworkPolicy) -> bool:
    is_closed = not policy.allow_internet_access or any(
        item in ("0.0.0.0/0", "::/0") for item in policy.deny_out
    )
    return is_closed or all(formats.is_network(item) for item in policy.allow_out)


def _volumes_have_sources(spec: SandboxTemplateSpec) -> bool:
    claimed: set[Any] = set()
    for item in spec.volume_claim_templates:
        metadata = item.get("metadata")
        if isinstance(metadata, Mapping):
            claimed.add(metadata.get("name"))  # pyright: ignore[reportUnknownMemberType]
    return all(
        volume.host_path or volume.claim_name or volume.name in claimed for volume in spec.volumes
    )


def _groups_exist(spec: SandboxEnvSpec) -> bool:
    known = {"default", *spec.autoscaling.groups}
    return all(
        member.config.scaling_group in known
        for cluster in spec.clusters.values()
        for member in cluster.members.values()
    )


def _at_most(low: int | None, high: int | None) -> bool:
    return low is None or high is None or low <= high


_ONE_TEMPLATE = Rule(
    "templateRef",
    "only one of template and templateRef may be set",
    lambda spec: spec.template is None or spec.template_ref is None,
    "!(has(self.template) && has(self.templateRef))",
)
_NAME_IS_A_LABEL = Rule(
    "metadata.name",
    "must be no more than 63 characters, because it is used as a label value",
    lambda obj: len(obj.metadata.name) <= formats.MAX_LABEL,
)
_PORT = "(has({0}.protocol) ? {0}.protocol : 'TCP')"

RULES: Mapping[type[Struct], tuple[Rule, ...]] = {
    SandboxTemplate: (_NAME_IS_A_LABEL,),
    SandboxTemplateSpec: (
        Rule(
            "ports",
            "the combination of port and protocol must be unique",
            lambda spec: _distinct([(port.port, port.protocol) for port in spec.ports]),
            "!has(self.ports) || self.ports.all(p, self.ports.exists_one(q, q.port == p.port && "
            f"{_PORT.format('q')} == {_PORT.format('p')}))",
            is_costly=True,
        ),
        Rule(
            "volumes",
            "names of volumes must be unique",
            lambda spec: _distinct([volume.name for volume in spec.volumes]),
            "!has(self.volumes) || self.volumes.all(v, self.volumes.exists_one(w, "
            "w.name == v.name))",
            is_costly=True,
        ),
        Rule(
            "volumes",
            "mount paths of volumes must be unique",
            lambda spec: _distinct([volume.mount_path for volume in spec.volumes]),
        ),
        Rule(
            "volumes",
            "every volume needs hostPath, claimName or a volumeClaimTemplate with the same name",
            _volumes_have_sources,
        ),
        Rule(
            "aliases",
            "aliases must be unique",
            lambda spec: _distinct(list(spec.aliases)),
        ),
    ),
    Volume: (
        Rule(
            "claimName",
            "only one of hostPath and claimName may be set",
            lambda volume: volume.host_path is None or volume.claim_name is None,
            "!(has(self.hostPath) && has(self.claimName))",
        ),
    ),
    NetworkPolicy: (
        Rule(
            "allowOut",
            "domains are only allowed if all other traffic is denied: "
            "set allowInternetAccess to false, or deny 0.0.0.0/0",
            _domains_need_closed_internet,
            "!has(self.allowOut) "
            "|| (has(self.allowInternetAccess) && !self.allowInternetAccess) "
            "|| (has(self.denyOut) && self.denyOut.exists(d, d == '0.0.0.0/0' || d == '::/0')) "
            "|| self.allowOut.all(a, a.matches('^[0-9.]+(/[0-9]+)?$') || a.contains(':'))",
            is_costly=True,
        ),
    ),
    Probe: (
        Rule(
            "timeoutSeconds",
            "must not be longer than periodSeconds",
            lambda probe: probe.timeout_seconds <= probe.period_seconds,
            "(has(self.timeoutSeconds) ? self.timeoutSeconds : 5) "
            "<= (has(self.periodSeconds) ? self.periodSeconds : 30)",
        ),
    ),
    SandboxSpec: (
        _ONE_TEMPLATE,
        Rule(
            "template",
            "one of template, templateRef and restoreFrom is required",
            lambda spec: bool(spec.template or spec.template_ref or spec.restore_from),
            "has(self.template) || has(self.templateRef) || has(self.restoreFrom)",
        ),
    ),
    Capacity: (
        Rule(
            "bufferMin",
            "must not be greater than bufferMax",
            lambda band: band.buffer_min <= band.buffer_max,
            "self.bufferMin <= self.bufferMax",
        ),
        Rule(
            "poolMin",
            "must not be greater than poolMax",
            lambda band: band.pool_min <= band.pool_max,
            "!has(self.poolMin) || self.poolMin <= self.poolMax",
        ),
        Rule(
            "bufferMax",
            "must not be greater than poolMax",
            lambda band: band.buffer_max <= band.pool_max,
            "self.bufferMax <= self.poolMax",
        ),
    ),
    SandboxPoolSpec: (
        _ONE_TEMPLATE,
        Rule(
            "replicas",
            "only one of replicas and capacity may be set",
            lambda spec: spec.replicas is None or spec.capacity is None,
            "!(has(self.replicas) && has(self.capacity))",
        ),
    ),
    SandboxPool: (
        _NAME_IS_A_LABEL,
        Rule(
            "spec.template",
            "one of template and templateRef is required",
            lambda pool: bool(pool.spec.template or pool.spec.template_ref),
            "has(self.spec.template) || has(self.spec.templateRef)",
        ),
        Rule(
            "spec.replicas",
            "one of replicas and capacity is required",
            lambda pool: pool.spec.replicas is not None or pool.spec.capacity is not None,
            "has(self.spec.replicas) || has(self.spec.capacity)",
        ),
    ),
    SandboxClaim: (_NAME_IS_A_LABEL,),
    InplaceUpdate: (
        Rule(
            "image",
            "one of image and resources is required",
            lambda update: update.image is not None or update.resources is not None,
            "has(self.image) || has(self.resources)",
        ),
    ),
    UpdatedResources: (
        Rule(
            "cpu",
            "one of cpu and memory is required",
            lambda size: size.cpu is not None or size.memory is not None,
            "has(self.cpu) || has(self.memory)",
        ),
    ),
    CheckpointSpec: (
        Rule(
            "persistentContents",
            "contents must be unique",
            lambda spec: _distinct(list(spec.persistent_contents)),
            "!has(self.persistentContents) || self.persistentContents.size() < 2 "
            "|| self.persistentContents[0] != self.persistentContents[1]",
        ),
    ),
    BatchSandbox: (_NAME_IS_A_LABEL,),
    BatchSandboxSpec: (
        Rule(
            "template",
            "is required if poolRef is empty",
            lambda spec: bool(spec.pool_ref) or spec.template is not None,
            "(has(self.poolRef) && self.poolRef != '') || has(self.template)",
        ),
        Rule(
            "template",
            "must not be set if poolRef is the name of a pool; use poolRef '*' to match pools",
            lambda spec: spec.pool_ref in ("", "*") or spec.template is None,
            "!has(self.poolRef) || self.poolRef == '' || self.poolRef == '*' "
            "|| !has(self.template)",
        ),
        Rule(
            "shardPatches",
            "may only be set if poolRef is empty: sandboxes of a pool already exist",
            lambda spec: not spec.pool_ref or not spec.shard_patches,
            "!has(self.shardPatches) || self.shardPatches.size() == 0 "
            "|| !has(self.poolRef) || self.poolRef == ''",
        ),
        Rule(
            "shardTaskPatches",
            "requires taskTemplate",
            lambda spec: not spec.shard_task_patches or spec.task_template is not None,
            "!has(self.shardTaskPatches) || self.shardTaskPatches.size() == 0 "
            "|| has(self.taskTemplate)",
        ),
        Rule(
            "minAvailable",
            "must not be greater than replicas",
            lambda spec: spec.replicas == 0 or _at_most(spec.min_available, spec.replicas),
            "!has(self.minAvailable) || !has(self.replicas) || self.replicas == 0 "
            "|| self.minAvailable <= self.replicas",
        ),
    ),
    MemberConfig: (
        Rule(
            "minReplicas",
            "must not be greater than maxReplicas",
            lambda config: _at_most(config.min_replicas, config.max_replicas),
            "!has(self.minReplicas) || !has(self.maxReplicas) "
            "|| self.minReplicas <= self.maxReplicas",
        ),
        Rule(
            "inlineResources",
            "only one of inlineResources and instanceType may be set",
            lambda config: config.inline_resources is None or config.instance_type is None,
            "!(has(self.inlineResources) && has(self.instanceType))",
        ),
    ),
    ScalingGroup: (
        Rule(
            "minReplicas",
            "must not be greater than maxReplicas",
            lambda group: _at_most(group.min_replicas, group.max_replicas),
            "!has(self.minReplicas) || !has(self.maxReplicas) "
            "|| self.minReplicas <= self.maxReplicas",
        ),
        Rule(
            "maxReplicas",
            "is required if scaleUpPolicy is Aggressive",
            lambda group: (
                group.scale_up_policy is not ScalePolicy.AGGRESSIVE
                or group.max_replicas is not None
            ),
            "!has(self.scaleUpPolicy) || self.scaleUpPolicy != 'Aggressive' "
            "|| has(self.maxReplicas)",
        ),
    ),
    SandboxEnv: (_NAME_IS_A_LABEL,),
    SandboxEnvSpec: (
        Rule(
            "autoscaling.groups",
            "a member refers to a scaling group that does not exist",
            _groups_exist,
        ),
    ),
}

NAMES_LABEL: frozenset[type[Struct]] = frozenset(
    kind for kind, rules in RULES.items() if _NAME_IS_A_LABEL in rules
)
"""Kinds whose name is used as a label value. Schemas limit its length without CEL."""

TRANSITIONS: Mapping[type[Struct], tuple[Transition, ...]] = {
    SandboxSpec: (
        _fixed_once_set("restoreFrom", "restore_from"),
        Transition(
            "claim.sandboxId",
            "is immutable while the sandbox is claimed",
            lambda old, new: (
                old.claim is None
                or new.claim is None
                or old.claim.sandbox_id == new.claim.sandbox_id
            ),
            "!has(oldSelf.claim) || !has(self.claim) "
            "|| self.claim.sandboxId == oldSelf.claim.sandboxId",
        ),
    ),
    SandboxClaimSpec: (
        _fixed("templateName", "template_name"),
        _fixed("replicas", "replicas", absent="1"),
        Transition(
            "inplaceUpdate",
            "is immutable; create a new object instead",
            lambda old, new: old.inplace_update == new.inplace_update,
            "has(self.inplaceUpdate) ? has(oldSelf.inplaceUpdate) "
            "&& self.inplaceUpdate == oldSelf.inplaceUpdate : !has(oldSelf.inplaceUpdate)",
        ),
    ),
    CheckpointSpec: (
        _fixed("sandboxName", "sandbox_name"),
        _fixed_once_set("sandboxUid", "sandbox_uid"),
        _fixed_once_set("checkpointId", "checkpoint_id"),
        _fixed("keepRunning", "keep_running", absent="true"),
    ),
    BatchSandboxSpec: (_fixed("poolRef", "pool_ref", absent="''"),),
    TemplateBuildSpec: (_fixed("templateName", "template_name"),),
}
