"""Patches follow their RFCs and never change their inputs."""

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.api.kube.body.patches import json_patch, merge_patch, strategic_patch
from paddock.kit.errors import InvalidError

names = st.sampled_from(["a", "b", "c", "spec", "~", "/", ""])
scalars = st.one_of(st.integers(-3, 3), st.booleans(), st.sampled_from(["", "x", "y"]))
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=12,
)
objects = st.dictionaries(names, documents, max_size=4)
with_nulls = st.recursive(
    st.one_of(st.none(), scalars),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=12,
)
garbage_operations = st.lists(
    st.one_of(
        with_nulls,
        st.fixed_dictionaries(
            {},
            optional={
                "op": st.sampled_from(["add", "remove", "replace", "move", "copy", "test", "?", 1]),
                "path": st.one_of(
                    st.sampled_from(["", "/a", "/a/0", "/a/-", "/b/c", "a", "/~1", "/a/01"]),
                    with_nulls,
                ),
                "from": st.one_of(st.sampled_from(["", "/a", "/a/b"]), with_nulls),
                "value": with_nulls,
            },
        ),
    ),
    max_size=4,
)


def difference(old: Any, new: Any) -> Any:
    """Return the merge patch that turns one document into another."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    changes: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        if name not in old or old[name] != value or type(old[name]) is not type(value):
            changes[name] = difference(old.get(name), value)
    return changes


# The examples of RFC 7386, appendix A.
@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patches_follow_the_rfc(target: Any, patch: Any, result: Any):
    assert merge_patch(target, patch) == result


@given(objects, objects)
def test_a_merge_patch_made_from_two_objects_turns_one_into_the_other(old, new):
    assert merge_patch(old, difference(old, new)) == new


@given(objects, with_nulls)
def test_merge_patches_are_idempotent_and_do_not_change_their_inputs(target, patch):
    before, patch_before = copy.deepcopy(target), copy.deepcopy(patch)
    once = merge_patch(target, patch)
    assert merge_patch(once, patch) == once
    assert (target, patch) == (before, patch_before)


# After the examples of RFC 6902, appendix A.
@pytest.mark.parametrize(
    ("target", "operations", "result"),
    [
        ({"foo": "bar"}, [{"op": "add", "path": "/baz", "value": "q"}], {"foo": "bar", "baz": "q"}),
        ({"f": ["a", "c"]}, [{"op": "add", "path": "/f/1", "value": "b"}], {"f": ["a", "b", "c"]}),
        ({"f": ["a"]}, [{"op": "add", "path": "/f/-", "value": ["b"]}], {"f": ["a", ["b"]]}),
        ({"a": 1, "b": 2}, [{"op": "remove", "path": "/a"}], {"b": 2}),
        ({"f": [1, 2, 3]}, [{"op": "remove", "path": "/f/1"}], {"f": [1, 3]}),
        ({"a": 1}, [{"op": "replace", "path": "/a", "value": 2}], {"a": 2}),
        (
            {"a": {"x": 1}, "b": {}},
            [{"op": "move", "from": "/a/x", "path": "/b/y"}],
            {"a": {}, "b": {"y": 1}},
        ),
        ({"f": [1, 2]}, [{"op": "move", "from": "/f/0", "path": "/f/1"}], {"f": [2, 1]}),
        ({"a": [1]}, [{"op": "copy", "from": "/a", "path": "/b"}], {"a": [1], "b": [1]}),
        ({"a/b": 1, "m~n": 2}, [{"op": "test", "path": "/a~1b", "value": 1}], None),
        ({"a": 1}, [{"op": "replace", "path": "", "value": {"b": 2}}], {"b": 2}),
        ({"a": None}, [{"op": "test", "path": "/a", "value": None}], None),
    ],
)
def test_json_patches_follow_the_rfc(target: Any, operations: Any, result: Any):
    assert json_patch(target, operations) == (target if result is None else result)


@pytest.mark.parametrize(
    ("target", "operations", "path"),
    [
        ({"a": 1}, {"op": "add"}, ""),
        ({"a": 1}, [{"op": "swap", "path": "/a"}], "[0].op"),
        ({"a": 1}, [{"op": "add", "path": "/b"}], "[0].value"),
        ({"a": 1}, [{"op": "add", "path": "b", "value": 1}], "[0].path"),
        ({"a": 1}, [{"op": "add", "path": "/x/y", "value": 1}], "[0].path"),
        ({"a": 1}, [{"op": "remove", "path": "/b"}], "[0].path"),
        ({"a": [1]}, [{"op": "remove", "path": "/a/1"}], "[0].path"),
        ({"a": [1]}, [{"op": "add", "path": "/a/01", "value": 1}], "[0].path"),
        ({"a": 1}, [{"op": "test", "path": "/a", "value": True}], "[0].path"),
        ({"a": {}}, [{"op": "move", "from": "/a", "path": "/a/b"}], "[0].path"),
        ({"a": 1}, [{"op": "test", "path": "/a", "value": 1}, 7], "[1]"),
    ],
)
def test_a_failed_json_patch_names_the_path(target: Any, operations: Any, path: str):
    with pytest.raises(InvalidError) as caught:
        json_patch(target, operations)
    assert caught.value.problems[0].path == path


@given(objects, st.one_of(garbage_operations, with_nulls))
def test_json_patches_are_atomic(target, operations):
    before = copy.deepcopy(target)
    with contextlib.suppress(InvalidError):
        json_patch(target, operations)
    assert target == before


def test_strategic_patches_merge_some_lists_by_key():
    target = {
        "metadata": {"finalizers": ["x"]},
        "spec": {"ports": [{"port": 80, "name": "a"}, {"port": 81}], "args": [1, 2]},
    }
    patch = {
        "metadata": {"finalizers": ["y"]},
        "spec": {
            "ports": [{"port": 80, "name": "b"}, {"port": 81, "$patch": "delete"}, {"port": 82}],
            "args": [3],
            "$setElementOrder/ports": [{"port": 80}],
        },
    }
    assert strategic_patch(target, patch) == {
        "metadata": {"finalizers": ["x", "y"]},
        "spec": {"ports": [{"port": 80, "name": "b"}, {"port": 82}], "args": [3]},
    }


def test_a_strategic_patch_follows_its_directives():
    target = {"a": {"x": 1, "y": 2}, "b": {"z": 3}, "finalizers": ["p", "q"]}
    assert strategic_patch(target, {"a": {"$patch": "replace", "w": 0}})["a"] == {"w": 0}
    assert strategic_patch(target, {"a": {"$retainKeys": ["x"]}})["a"] == {"x": 1}
    assert strategic_patch(target, {"b": None}) == {k: target[k] for k in ("a", "finalizers")}
    assert strategic_patch(target, {"$deleteFromPrimitiveList/finalizers": ["p"]})[
        "finalizers"
    ] == ["q"]
    with pytest.raises(InvalidError, match="directive"):
        strategic_patch(target, {"a": {"$patch": "explode"}})


@given(objects, with_nulls)
def test_a_strategic_patch_is_applied_or_refused(target, patch):
    before = copy.deepcopy(target)
    with contextlib.suppress(InvalidError):
        strategic_patch(target, patch)
    assert target == before


def test_copies_in_a_json_patch_are_bounded():
    doubling = [{"op": "copy", "from": "", "path": f"/{number}"} for number in range(60)]
    with pytest.raises(InvalidError, match="copies at most"):
        json_patch({"a": "b"}, doubling)


def test_no_patch_exceeds_the_nesting_limit():
    """The limit is far below the stack depth: every client must be able to read stored objects."""
    deep = {}
    for _ in range(150):
        deep = {"a": deep}
    json_patch(deep, [{"op": "add", "path": "/a" * 150, "value": 1}])
    with pytest.raises(InvalidError, match="200 levels"):
        json_patch(deep, [{"op": "add", "path": "/a" * 150, "value": deep}])


def test_copies_cannot_exceed_the_nesting_limit():
    nesting = [{"op": "copy", "from": "", "path": "/a" * 2**number} for number in range(1, 20)]
    with pytest.raises(InvalidError, match="nested too deeply"):
        json_patch({"a": {}}, nesting)
