"""Instance types: built in, from the settings, and how a member's resources are resolved."""

import pytest

from paddock.controllers.env.instance_types import (
    DEFAULT_CPU_MILLIS,
    DEFAULT_MEMORY_BYTES,
    INSTANCE_TYPES,
    footprint,
    load_instance_types,
    multiplied,
    resources_of,
)
from paddock.kit.errors import InvalidError
from paddock.resources.kinds.env import EnvDefaults, MemberConfig
from paddock.resources.kinds.template import Resources

TEMPLATE = Resources(cpu="3", memory="3Gi")
INLINE = Resources(cpu="7", memory="7Gi")
SMALL = INSTANCE_TYPES["small"]
LARGE = INSTANCE_TYPES["large"]


@pytest.mark.parametrize("setting", ["", " ", ",", " , "])
def test_without_a_setting_there_are_the_built_in_types(setting: str) -> None:
    assert load_instance_types(setting) == INSTANCE_TYPES


def test_a_setting_adds_and_replaces_types() -> None:
    found = load_instance_types("huge=32/128Gi, small = 2/1Gi")
    assert found["huge"] == Resources(cpu="32", memory="128Gi")
    assert found["small"] == Resources(cpu="2", memory="1Gi")
    assert found["large"] == LARGE


@pytest.mark.parametrize("setting", ["huge", "huge=32", "=1/1Gi", "huge=x/1Gi", "huge=1/y"])
def test_a_wrong_setting_is_invalid(setting: str) -> None:
    with pytest.raises(InvalidError):
        load_instance_types(setting)


@pytest.mark.parametrize(
    ("config", "defaults", "found"),
    [
        pytest.param(MemberConfig(), EnvDefaults(), TEMPLATE, id="template"),
        pytest.param(MemberConfig(), EnvDefaults(instance_type="small"), SMALL, id="default"),
        pytest.param(
            MemberConfig(instance_type="large"),
            EnvDefaults(instance_type="small"),
            LARGE,
            id="member before default",
        ),
        pytest.param(
            MemberConfig(inline_resources=INLINE, instance_type="large"),
            EnvDefaults(),
            INLINE,
            id="inline before type",
        ),
    ],
)
def test_the_nearest_setting_wins(
    config: MemberConfig, defaults: EnvDefaults, found: Resources
) -> None:
    assert resources_of(config, defaults, TEMPLATE) == found


def test_an_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(InvalidError, match="unknown instance type 'mini'; choose large, medium"):
        resources_of(MemberConfig(instance_type="mini"), EnvDefaults(), TEMPLATE)


@pytest.mark.parametrize(
    ("times", "found"),
    [
        (1, Resources(cpu="500m", memory="256Mi", pids=10)),
        (3, Resources(cpu="1500m", memory=str(3 * 256 << 20), pids=30)),
    ],
)
def test_multiples_keep_what_is_unlimited(times: int, found: Resources) -> None:
    after = multiplied(Resources(cpu="500m", memory="256Mi", pids=10), times)
    assert after == found
    assert after.disk is None


def test_footprint_has_defaults_for_what_is_not_limited() -> None:
    assert footprint(SMALL) == (1000, 512 << 20)
    assert footprint(Resources()) == (DEFAULT_CPU_MILLIS, DEFAULT_MEMORY_BYTES)
