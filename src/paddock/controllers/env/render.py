"""Renders a member of an environment as a SandboxPool. Pure, so drift is plain inequality.

A member's size counts running and idle sandboxes. It is rendered as a capacity whose poolMin and
poolMax are that size, with an open buffer: the pool fills what is not claimed, and a claim moves a
sandbox from idle to running without a change of the pool.
"""

from collections.abc import Mapping

from msgspec import Struct, structs

from paddock.controllers.env.instance_types import INSTANCE_TYPES, resources_of
from paddock.kit.errors import FieldProblem, InvalidError, NotFoundError
from paddock.resources.kinds.env import (
    LABEL_ENV,
    LABEL_GROUP,
    LABEL_MEMBER,
    EnvMember,
    EnvOverrides,
    SandboxEnv,
)
from paddock.resources.kinds.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import NetworkPolicy, Resources, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, owner_reference
from paddock.resources.network.ceiling import intersect

ANNOTATION_RENDERED = "paddock.dev/rendered"
"""Names of the labels and annotations that the environment set, so it can remove them."""
MAX_NAME = 63


class Drift(Struct, frozen=True):
    """How a pool differs from its rendered version."""

    pool: SandboxPool
    """The desired pool."""
    parts: tuple[str, ...]
    """Names of the parts that differ."""


def pool_name(env: str, member: str) -> str:
    """Return the name of a member's pool, prefixed with the environment's if needed."""
    if member == env or member.startswith(f"{env}-"):
        return member
    return f"{env}-{member}"


def capacity_of(size: int) -> Capacity:
    """Return the capacity that keeps a pool at a size, however many are claimed."""
    return Capacity(buffer_min=0, buffer_max=size, pool_min=size, pool_max=size)


def size_of(pool: SandboxPool) -> int:
    """Return the size of a rendered pool; of any other pool, its target."""
    if pool.spec.capacity is not None:
        return pool.spec.capacity.pool_max
    return (pool.spec.replicas or 0) + pool.status.allocated


def resized(pool: SandboxPool, size: int) -> SandboxPool:
    """Return a rendered pool with another size."""
    return structs.replace(pool, spec=structs.replace(pool.spec, capacity=capacity_of(size)))


def clamped(member: EnvMember, size: int) -> int:
    """Clamp a size to the member's limits."""
    config = member.config
    size = max(size, config.min_replicas)
    return size if config.max_replicas is None else min(size, config.max_replicas)


def requested_size(member: EnvMember) -> int:
    """Return the size that a member's spec requests."""
    if member.replicas is not None:
        return clamped(member, member.replicas)
    frozen = member.spec
    if frozen is not None and frozen.replicas is not None:
        return clamped(member, frozen.replicas)
    if frozen is not None and frozen.capacity is not None:
        return clamped(member, max(frozen.capacity.pool_min, frozen.capacity.buffer_min))
    return clamped(member, 0)


def render(
    env: SandboxEnv,
    name: str,
    member: EnvMember,
    template: SandboxTemplateSpec | None,
    *,
    size: int,
    instance_types: Mapping[str, Resources] = INSTANCE_TYPES,
) -> SandboxPool:
    """Return the pool of one member. Raises `InvalidError` or `NotFoundError`."""
    labels = {
        **member.metadata.labels,
        LABEL_ENV: env.metadata.name,
        LABEL_MEMBER: name,
        LABEL_GROUP: member.config.scaling_group,
    }
    annotations = dict(member.metadata.annotations)
    annotations[ANNOTATION_RENDERED] = ",".join(sorted((*labels, *annotations)))
    return SandboxPool(
        metadata=ObjectMeta(
            name=_checked(pool_name(env.metadata.name, name)),
            namespace=env.metadata.namespace,
            labels=labels,
            annotations=annotations,
            owner_references=(owner_reference(env),),
        ),
        spec=_spec(env, name, member, template, size, instance_types),
    )


def _checked(name: str) -> str:
    if len(name) > MAX_NAME:
        problem = FieldProblem(
            "metadata.name", f"the pool name {name!r} has more than {MAX_NAME} characters"
        )
        raise InvalidError(str(problem), problems=[problem], hint="choose a shorter member name")
    return name


def _spec(
    env: SandboxEnv,
    name: str,
    member: EnvMember,
    template: SandboxTemplateSpec | None,
    size: int,
    instance_types: Mapping[str, Resources],
) -> SandboxPoolSpec:
    config, overrides = member.config, env.spec.overrides
    if config.max_replicas is not None and config.min_replicas > config.max_replicas:
        problem = FieldProblem("config.minReplicas", "must not be greater than maxReplicas")
        raise InvalidError(str(problem), problems=[problem])
    frozen = member.spec or SandboxPoolSpec()
    base = frozen.template or template
    if base is None:
        reference = frozen.template_ref or env.spec.template_ref
        raise NotFoundError(f"SandboxTemplate {reference.name} was not found")
    idle_age = overrides.default_idle_timeout_seconds
    return structs.replace(
        frozen,
        template=_template(base, env, member, overrides, instance_types),
        template_ref=None,
        replicas=None,
        capacity=capacity_of(size),
        update_strategy=config.update_strategy
        or overrides.update_strategy
        or frozen.update_strategy,
        max_idle_age_seconds=frozen.max_idle_age_seconds if idle_age is None else idle_age,
        labels={
            **frozen.labels,
            **config.labels,
            LABEL_ENV: env.metadata.name,
            LABEL_MEMBER: name,
        },
        annotations={**frozen.annotations, **config.annotations},
    )


def _template(
    base: SandboxTemplateSpec,
    env: SandboxEnv,
    member: EnvMember,
    overrides: EnvOverrides,
    instance_types: Mapping[str, Resources],
) -> SandboxTemplateSpec:
    startup = overrides.default_startup_timeout_seconds
    return structs.replace(
        base,
        image=overrides.image or base.image,
        env={**base.env, **overrides.env},
        network=_network(base, env, overrides),
        ready_timeout_seconds=base.ready_timeout_seconds if startup is None else startup,
        resources=resources_of(
            member.config, env.spec.defaults, base.resources, instance_types=instance_types
        ),
        # Clients name the environment, never the templates of its pools.
        aliases=(),
    )


def _network(base: SandboxTemplateSpec, env: SandboxEnv, overrides: EnvOverrides) -> NetworkPolicy:
    """Return the policy of the pools; it does not exceed that of another team's template."""
    own = overrides.network_policy
    if own is None:
        return base.network
    home = env.spec.template_ref.namespace
    is_foreign = home is not None and home != env.metadata.namespace
    return intersect(own, base.network) if is_foreign else own


def drift(pool: SandboxPool, wanted: SandboxPool) -> Drift | None:
    """Return the corrected pool if it drifted; labels that others added stay."""
    ours = set(pool.metadata.annotations.get(ANNOTATION_RENDERED, "").split(","))
    labels = _merged(pool.metadata.labels, wanted.metadata.labels, ours)
    annotations = _merged(pool.metadata.annotations, wanted.metadata.annotations, ours)
    owners = wanted.metadata.owner_references
    parts = (
        ("labels", labels != pool.metadata.labels),
        ("annotations", annotations != pool.metadata.annotations),
        ("owner", owners != pool.metadata.owner_references),
        ("replicas", pool.spec.capacity != wanted.spec.capacity or pool.spec.replicas is not None),
        ("template", pool.spec.template != wanted.spec.template or pool.spec.template_ref),
        ("spec", _rest(pool.spec) != _rest(wanted.spec)),
    )
    found = tuple(name for name, differs in parts if differs)
    if not found:
        return None
    metadata = structs.replace(
        pool.metadata, labels=labels, annotations=annotations, owner_references=owners
    )
    return Drift(structs.replace(pool, metadata=metadata, spec=wanted.spec), found)


def _merged(
    current: Mapping[str, str], wanted: Mapping[str, str], ours: set[str]
) -> Mapping[str, str]:
    kept = {key: value for key, value in current.items() if key not in ours}
    return {**kept, **wanted}


def _rest(spec: SandboxPoolSpec) -> SandboxPoolSpec:
    return structs.replace(spec, template=None, template_ref=None, capacity=None, replicas=None)
