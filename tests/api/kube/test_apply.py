"""Server-side apply: field ownership, conflicts and removal."""

import contextlib
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.api.kube.body import apply as server_side
from paddock.api.kube.body.apply import (
    ANNOTATION,
    ApplyConflictError,
    apply,
    managed_fields,
    read_owners,
    write_owners,
)

names = st.sampled_from(["a", "b", "c"])
values = st.recursive(
    st.one_of(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=2)),
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3),
    max_leaves=8,
)
wanted = st.fixed_dictionaries({"spec": st.dictionaries(names, values, max_size=3)})


@given(wanted)
def test_apply_is_idempotent(config):
    first = apply({}, config, manager="me", owners={}, force=False)
    second = apply(first.document, config, manager="me", owners=first.owners, force=False)
    assert second == first


@given(wanted, wanted)
def test_a_later_apply_removes_fields_that_it_no_longer_sets(before, after):
    first = apply({}, before, manager="me", owners={}, force=False)
    second = apply(first.document, after, manager="me", owners=first.owners, force=False)
    fresh = apply({}, after, manager="me", owners={}, force=False)
    assert second.document.get("spec", {}) == fresh.document.get("spec", {})
    assert second.owners == fresh.owners


@given(wanted, wanted)
def test_force_takes_over_fields_of_other_managers(one, other):
    first = apply({}, one, manager="one", owners={}, force=False)
    second = apply(first.document, other, manager="other", owners=first.owners, force=True)
    for path in second.owners.get("other", ()):
        assert server_side.at(second.document, path) == server_side.at(other, path)


@given(wanted, wanted)
def test_inputs_are_not_changed_and_disagreement_is_a_conflict(one, other):
    first = apply({}, one, manager="one", owners={}, force=False)
    live, config = copy.deepcopy(first.document), copy.deepcopy(other)
    with contextlib.suppress(ApplyConflictError):
        apply(live, config, manager="other", owners=first.owners, force=False)
    assert (live, config) == (first.document, other)


def test_managers_of_different_fields_do_not_conflict():
    first = apply({}, {"spec": {"a": 1}}, manager="one", owners={}, force=False)
    second = apply(
        first.document, {"spec": {"b": 2}}, manager="two", owners=first.owners, force=False
    )
    assert second.document == {"spec": {"a": 1, "b": 2}}
    gone = apply(second.document, {"spec": {}}, manager="one", owners=second.owners, force=False)
    assert gone.document == {"spec": {"b": 2}}


def _members(**members):
    return {"spec": {"clusters": {"local": {"members": members}}}}


def test_a_map_item_without_set_fields_is_removed_as_a_whole():
    both = _members(a={"config": {"priority": 1}}, b={"config": {"priority": 2}})
    first = apply({}, both, manager="me", owners={}, force=False)
    # Fields written by controllers and defaults belong to the item.
    live = _members(
        a={"config": {"priority": 1, "group": "default"}, "replicas": 3},
        b={"config": {"priority": 2, "group": "default"}, "replicas": 4},
    )
    one = _members(b={"config": {"priority": 2}})
    left = apply(live, one, manager="me", owners=first.owners, force=False)
    assert left.document == _members(
        b={"config": {"priority": 2, "group": "default"}, "replicas": 4}
    )
    bare = apply(live, _members(a={}, b={}), manager="me", owners=first.owners, force=False)
    assert bare.document == _members(a={"replicas": 3}, b={"replicas": 4})


def test_a_map_item_owned_by_another_manager_stays():
    first = apply({}, _members(a={"priority": 1}), manager="me", owners={}, force=False)
    theirs = apply(
        first.document, _members(a={"size": 3}), manager="they", owners=first.owners, force=False
    )
    left = apply(theirs.document, _members(), manager="me", owners=theirs.owners, force=False)
    assert left.document == _members(a={"size": 3})


def test_a_conflict_names_the_field_and_the_other_manager():
    first = apply({}, {"spec": {"a": 1}}, manager="one", owners={}, force=False)
    with pytest.raises(ApplyConflictError, match=r'spec\.a: conflict with "one"'):
        apply(first.document, {"spec": {"a": 2}}, manager="two", owners=first.owners, force=False)


def test_a_shared_field_stays_when_one_manager_drops_it():
    first = apply({}, {"spec": {"a": 1}}, manager="one", owners={}, force=False)
    both = apply(
        first.document, {"spec": {"a": 1}}, manager="two", owners=first.owners, force=False
    )
    left = apply(both.document, {"spec": {}}, manager="one", owners=both.owners, force=False)
    assert left.document["spec"] == {"a": 1}
    assert set(left.owners) == {"two"}


@given(wanted)
def test_ownership_round_trips_through_the_annotation(config):
    owners = apply({}, config, manager="me", owners={}, force=False).owners
    assert read_owners({ANNOTATION: write_owners(owners)}) == owners
    assert read_owners({ANNOTATION: "{broken"}) == {}


def test_ownership_is_returned_as_managed_fields():
    owners = {"me": frozenset({("spec", "a", "b"), ("spec", "c")})}
    assert managed_fields(owners, "v1") == [
        {
            "manager": "me",
            "operation": "Apply",
            "apiVersion": "v1",
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:spec": {"f:a": {"f:b": {}}, "f:c": {}}},
        }
    ]
