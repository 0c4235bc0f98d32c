"""Strategic merge of documents and structs: objects, lists by key, directives, bad patches."""

import copy
from typing import Any

import pytest

from paddock.kit.errors import InvalidError
from paddock.resources.frozen import freeze
from paddock.resources.kinds.template import Port, SandboxTemplateSpec
from paddock.resources.strategic_merge import merge, merged

PORTS = [{"port": 80, "name": "a"}, {"port": 81}]


@pytest.mark.parametrize(
    ("base", "patch", "expected"),
    [
        pytest.param({"a": 1}, {}, {"a": 1}, id="empty patch"),
        pytest.param({"a": 1}, {"b": 2}, {"a": 1, "b": 2}, id="a new field"),
        pytest.param({"a": 1}, {"a": None}, {}, id="null removes"),
        pytest.param({}, {"a": None}, {}, id="null for an absent field"),
        pytest.param({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}, id="objects"),
        pytest.param({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}, id="object over a number"),
        pytest.param({"a": {"b": 1}}, {"a": 2}, {"a": 2}, id="number over an object"),
        pytest.param(None, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}, id="no base"),
        pytest.param({"args": [1, 2]}, {"args": [3]}, {"args": [3]}, id="other lists are replaced"),
        pytest.param(
            {"ports": PORTS},
            {"ports": [{"port": 81, "name": "b"}, {"port": 82}]},
            {"ports": [PORTS[0], {"port": 81, "name": "b"}, {"port": 82}]},
            id="ports by port",
        ),
        pytest.param(
            {"ports": [{"containerPort": 80}]},
            {"ports": [{"containerPort": 80, "name": "x"}, {"containerPort": 81}]},
            {"ports": [{"containerPort": 80, "name": "x"}, {"containerPort": 81}]},
            id="a container's ports by containerPort",
        ),
        pytest.param(
            {"ports": []},
            {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
            {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
            id="two new ports with the same number",
        ),
        pytest.param(
            {"env": []},
            {"env": [{"name": "a", "value": "1"}, {"name": "a", "value": "2"}]},
            {"env": [{"name": "a", "value": "2"}]},
            id="two new items with the same key: the later one is merged into the first",
        ),
        pytest.param(
            {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},
            {"ports": [{"port": 53, "name": "dns"}]},
            {
                "ports": [
                    {"port": 53, "protocol": "UDP", "name": "dns"},
                    {"port": 53, "protocol": "TCP"},
                ]
            },
            id="two existing items with the same key: the first is patched",
        ),
        pytest.param(
            {"volumes": [{"name": "a"}, {"anonymous": 1}]},
            {"volumes": [{"name": "a", "$patch": "delete"}]},
            {"volumes": [{"anonymous": 1}]},
            id="an item is deleted",
        ),
        pytest.param(
            {"volumes": [{"name": "a"}]},
            {"volumes": [{"$patch": "replace"}, {"name": "b"}]},
            {"volumes": [{"name": "b"}]},
            id="a list is replaced",
        ),
        pytest.param(
            {"env": ["A=1"]}, {"env": [{"name": "A"}]}, {"env": [{"name": "A"}]}, id="mixed items"
        ),
        pytest.param(
            {"finalizers": ["x"]},
            {"finalizers": ["y", "x"]},
            {"finalizers": ["x", "y"]},
            id="a set is extended",
        ),
        pytest.param(
            {"a": {"b": 1}}, {"a": {"$patch": "replace", "c": 2}}, {"a": {"c": 2}}, id="replace"
        ),
        pytest.param({"a": {"b": 1}}, {"a": {"$patch": "delete"}}, {"a": {}}, id="delete"),
        pytest.param(
            {"a": {"b": 1}}, {"a": {"$patch": "merge", "c": 2}}, {"a": {"b": 1, "c": 2}}, id="merge"
        ),
        pytest.param(
            {"a": {"b": 1, "c": 2}}, {"a": {"$retainKeys": ["b"]}}, {"a": {"b": 1}}, id="retainKeys"
        ),
        pytest.param(
            {"finalizers": ["x", "y"]},
            {"$deleteFromPrimitiveList/finalizers": ["x"]},
            {"finalizers": ["y"]},
            id="deleteFromPrimitiveList",
        ),
        pytest.param(
            {"ports": PORTS},
            {"$setElementOrder/ports": [{"port": 81}]},
            {"ports": PORTS},
            id="setElementOrder is ignored",
        ),
    ],
)
def test_a_patch_is_merged(base: Any, patch: dict[str, Any], expected: dict[str, Any]):
    before = copy.deepcopy((base, patch))
    result = merge(base, patch)
    assert result == expected
    assert merge(freeze(base), freeze(patch)) == expected
    result.clear()
    assert (base, patch) == before


def test_the_result_is_a_plain_copy():
    result = merge(freeze({"a": {"b": [1]}}), freeze({"c": {"d": [{"e": 1}]}}))
    result["a"]["b"].append(2)
    result["c"]["d"][0]["e"] = 2
    assert result == {"a": {"b": [1, 2]}, "c": {"d": [{"e": 2}]}}


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        pytest.param({"a": {"$patch": "explode"}}, "a", id="unknown value of $patch"),
        pytest.param({"a": {"$explode": 1}}, "a", id="unknown directive"),
        pytest.param({"a": {"ports": [{}]}}, "a.ports[0].port", id="item without key"),
        pytest.param(
            {"env": [{"name": "a"}, {"b": 1}]}, "env[1].name", id="second item without key"
        ),
        pytest.param({"env": [{"name": {"x": 1}}]}, "env[0].name", id="key is an object"),
        pytest.param(
            {"containers": [{"name": "a", "ports": [{"containerPort": 1}, {"name": "b"}]}]},
            "containers[0].ports[1].containerPort",
            id="port of a container without its number",
        ),
    ],
)
def test_an_invalid_patch_is_rejected_with_its_path(patch: dict[str, Any], path: str):
    with pytest.raises(InvalidError, match="the patch cannot be applied") as caught:
        merge({"a": {}}, patch)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_without_directives_names_may_begin_with_a_dollar():
    patch = {"spec": {"$patch": "replace", "x": 1}, "volumes": [{"name": "a", "$patch": "delete"}]}
    base = {"spec": {"y": 2}, "volumes": [{"name": "a"}]}
    assert merge(base, patch, has_directives=False) == {
        "spec": {"y": 2, "$patch": "replace", "x": 1},
        "volumes": [{"name": "a", "$patch": "delete"}],
    }


def test_a_patch_is_merged_into_a_struct():
    base = SandboxTemplateSpec(image="a", env={"A": "1"}, ports=(Port(port=80, name="x"),))
    patch = {"env": {"B": "2"}, "ports": [{"port": 80, "name": "y"}, {"port": 81}], "image": None}
    assert merged(base, patch, where="here") == SandboxTemplateSpec(
        env={"A": "1", "B": "2"}, ports=(Port(port=80, name="y"), Port(port=81))
    )
    assert base.env == {"A": "1"}


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ({"image": 1}, "Expected `str"),
        ({"imaeg": "x"}, "unknown field imaeg"),
        ({"ports": [{"name": "x"}]}, r"ports\[0\].port"),
        ({"env": {"$patch": "explode"}}, r"is not a \$patch directive"),
    ],
)
def test_a_patch_that_does_not_fit_the_struct_is_rejected(patch: dict[str, Any], why: str):
    with pytest.raises(InvalidError, match=f"here cannot be merged: .*{why}"):
        merged(SandboxTemplateSpec(), patch, where="here")
