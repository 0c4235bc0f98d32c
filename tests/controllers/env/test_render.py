"""A member rendered as a pool keeps its size without further writes."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from paddock.controllers.env.instance_types import load_instance_types, multiplied, resources_of
from paddock.controllers.env.render import (
    capacity_of,
    drift,
    pool_name,
    render,
    requested_size,
    size_of,
)
from paddock.controllers.pool.plan import Counts, plan
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.resources.kinds.env import EnvDefaults, EnvMember, MemberConfig
from paddock.resources.kinds.pool import Capacity, SandboxPoolSpec
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec
from tests.controllers.env.make import environment, member

NOW = datetime(2030, 1, 1, tzinfo=UTC)
TEMPLATE = SandboxTemplateSpec()


def settled(spec: SandboxPoolSpec, counts: Counts) -> Counts:
    """Apply the pool's plan until it has no more actions."""
    for _ in range(100):
        step = plan(spec, counts, now=NOW)
        acts = step.create or step.delete_creating or step.delete_available
        if not acts and not counts.creating_new:
            return counts
        counts = structs.replace(
            counts,
            creating_new=0,
            available_new=counts.available_new
            + counts.creating_new
            - step.delete_creating
            - step.delete_available
            + step.create,
        )
    raise AssertionError("it never settles")


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_a_pool_settles_at_its_size_and_claims_do_not_move_it(
    size: int, available: int, creating: int, allocated: int
) -> None:
    spec = SandboxPoolSpec(template=TEMPLATE, capacity=capacity_of(size))
    counts = Counts(available_new=available, creating_new=creating, allocated=allocated)
    rest = settled(spec, counts)
    assert rest.available + rest.allocated == max(size, allocated)
    if rest.available:
        claimed = structs.replace(
            rest, available_new=rest.available_new - 1, allocated=rest.allocated + 1
        )
        assert settled(spec, claimed) == claimed
    if rest.allocated > 0:
        ended = structs.replace(rest, allocated=rest.allocated - 1)
        again = settled(spec, ended)
        assert again.available + again.allocated == max(size, ended.allocated)


sizes = st.integers(0, 50)
members = st.builds(
    EnvMember,
    replicas=st.one_of(st.none(), sizes),
    spec=st.one_of(
        st.none(),
        st.builds(SandboxPoolSpec, replicas=sizes),
        st.builds(
            SandboxPoolSpec,
            capacity=st.builds(
                lambda low, high: Capacity(
                    buffer_min=low, buffer_max=low + high, pool_max=low + high
                ),
                sizes,
                sizes,
            ),
        ),
    ),
    config=st.builds(
        lambda low, more, labels: MemberConfig(
            min_replicas=low, max_replicas=None if more is None else low + more, labels=labels
        ),
        sizes,
        st.one_of(st.none(), sizes),
        st.dictionaries(st.sampled_from("abc"), st.text("xyz", max_size=3)),
    ),
)


@given(members)
def test_rendering_is_stable_and_within_the_members_limits(one: EnvMember) -> None:
    env = environment({"one": one})
    size = requested_size(one)
    assert size >= one.config.min_replicas
    assert one.config.max_replicas is None or size <= one.config.max_replicas
    made = render(env, "one", one, TEMPLATE, size=size)
    assert made == render(env, "one", one, TEMPLATE, size=size)
    assert size_of(made) == size
    assert drift(made, made) is None
    other = render(env, "one", one, TEMPLATE, size=size + 1)
    found = drift(made, other)
    assert found is not None
    assert found.parts == ("replicas",)
    assert drift(found.pool, other) is None


def test_names_of_pools() -> None:
    assert pool_name("agents", "small") == "agents-small"
    assert pool_name("agents", "agents") == "agents"
    assert pool_name("agents", "agents-small") == "agents-small"
    assert pool_name("agents", "agentsmall") == "agents-agentsmall"


def test_resources_come_from_the_member_then_the_environment_then_the_template() -> None:
    template = Resources(cpu="3")
    inline = Resources(memory="1Gi")
    nothing = EnvDefaults()
    named = EnvDefaults(instance_type="large", multiplier=2)
    assert resources_of(MemberConfig(), nothing, template) == template
    assert resources_of(MemberConfig(), named, template).cpu == "8000m"
    assert (
        resources_of(MemberConfig(instance_type="nano", multiplier=1), named, template).cpu
        == "500m"
    )
    assert resources_of(MemberConfig(inline_resources=inline), nothing, template) == inline
    assert multiplied(Resources(cpu="500m", pids=10), 3) == Resources(cpu="1500m", pids=30)
    with pytest.raises(InvalidError, match="nano"):
        resources_of(MemberConfig(instance_type="huge"), nothing, template)


def test_an_operator_can_add_instance_types() -> None:
    instance_types = load_instance_types("huge=32/128Gi, small=250m/128Mi")
    assert instance_types["huge"] == Resources(cpu="32", memory="128Gi")
    assert instance_types["small"] == Resources(cpu="250m", memory="128Mi")
    assert instance_types["large"] == load_instance_types("")["large"]
    made = render(
        environment({}),
        "one",
        member(instance_type="huge"),
        TEMPLATE,
        size=1,
        instance_types=instance_types,
    )
    assert made.spec.template is not None
    assert made.spec.template.resources == instance_types["huge"]
    for text in ("huge", "huge=32", "=1/1Gi", "huge=many/1Gi"):
        with pytest.raises(InvalidError, match="instance_types"):
            load_instance_types(text)


def test_a_member_that_cannot_be_rendered_reports_why() -> None:
    env = environment({})
    with pytest.raises(NotFoundError, match="base"):
        render(env, "one", member(1), None, size=1)
    with pytest.raises(InvalidError, match="maxReplicas"):
        render(env, "one", member(1, min_replicas=3, max_replicas=2), TEMPLATE, size=1)
    with pytest.raises(InvalidError, match="63"):
        render(env, "m" * 60, member(1), TEMPLATE, size=1)
