"""Resources are immutable in every part, whichever way they were created."""

import copy
import pickle
from typing import Any

import msgspec
import pytest
import yaml
from msgspec import structs

from paddock.resources import codec
from paddock.resources.frozen import EMPTY, FrozenDict, FrozenList, freeze
from paddock.resources.kinds.pods import (
    NetworkPolicyManifest,
    Pod,
    PodManifest,
    VolumeClaim,
    VolumeClaimManifest,
)
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta, Resource
from paddock.resources.registry import ALL
from paddock.store.interning import Interner
from paddock.store.kubernetes import responses
from tests.resources.mutation import FREE_FORM, accepted_changes, document, mappings, thawed

POD_KINDS = (NetworkPolicyManifest, Pod, PodManifest, VolumeClaim, VolumeClaimManifest)
KINDS: tuple[type[Resource], ...] = (*(info.cls for info in ALL), *POD_KINDS)


def as_json(kind: type[Resource]) -> bytes:
    return msgspec.json.encode(document(kind))


def interned(kind: type[Resource]) -> Resource:
    obj, interner = codec.decode(kind, as_json(kind)), Interner()
    interner.share(codec.decode(kind, as_json(kind)))
    interner.share(obj)
    return obj


WAYS = {
    "constructed": lambda kind: thawed(codec.decode(kind, as_json(kind))),
    "decoded from JSON": lambda kind: codec.decode(kind, as_json(kind)),
    "decoded from YAML": lambda kind: codec.from_builtins(
        kind, yaml.safe_load(yaml.safe_dump(document(kind)))
    ),
    "interned": interned,
    "pickled": lambda kind: pickle.loads(pickle.dumps(codec.decode(kind, as_json(kind)))),
    "copied": lambda kind: copy.deepcopy(codec.decode(kind, as_json(kind))),
    "read by Kubernetes' codec": lambda kind: responses.read_object(kind, as_json(kind)),
    "listed by Kubernetes' codec": lambda kind: responses.read_list(
        kind, b'{"items":[' + as_json(kind) + b"]}"
    )[0][0],
    "watched by Kubernetes' codec": lambda kind: responses.read_event(
        kind, b'{"type":"ADDED","object":' + as_json(kind) + b"}"
    )[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_part_of_an_object_can_be_changed(kind: type[Resource], way: str):
    obj = WAYS[way](kind)
    before = codec.encode(obj)
    assert mappings(obj) >= 2, "labels and annotations at least"
    assert list(accepted_changes(obj)) == []
    assert codec.encode(obj) == before


def test_the_mutation_helper_finds_mutable_parts():
    spec = structs.replace(SandboxTemplateSpec())
    structs.force_setattr(spec, "env", {"A": "1"})
    structs.force_setattr(spec, "pod_template", {"a": [1]})
    assert list(accepted_changes(spec)) == [".env", ".pod_template", ".pod_template[a]"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_replaced_part_is_frozen_too(kind: type[Resource]):
    obj = codec.decode(kind, as_json(kind))
    for part in (getattr(obj, name) for name in obj.__struct_fields__):
        if isinstance(part, msgspec.Struct):
            plain = {name: thawed(getattr(part, name)) for name in part.__struct_fields__}
            new = structs.replace(part, **plain)
            assert new == part
            assert list(accepted_changes(new)) == []


def test_later_changes_of_the_arguments_have_no_effect():
    labels, pod = {"a": "b"}, {"spec": {"containers": [{"name": "x"}]}}
    obj = SandboxTemplate(
        metadata=ObjectMeta(labels=labels), spec=SandboxTemplateSpec(pod_template=pod)
    )
    labels["a"] = "changed"
    pod["spec"]["containers"].append({"name": "y"})
    assert obj.metadata.labels == {"a": "b"}
    assert obj.spec.pod_template == {"spec": {"containers": [{"name": "x"}]}}


def test_a_frozen_mapping_behaves_as_a_dict():
    frozen = FrozenDict(a="1")
    assert frozen == {"a": "1"}
    assert {**frozen, "b": "2"} == {"a": "1", "b": "2"}
    assert frozen | {"b": "2"} == {"a": "1", "b": "2"}
    assert {"b": "2"} | frozen == {"b": "2", "a": "1"}
    for plain in (frozen | {}, frozen.copy(), dict(frozen)):
        plain["b"] = "2"
    assert copy.copy(frozen) is frozen
    assert copy.deepcopy(frozen) is frozen
    assert pickle.loads(pickle.dumps(frozen)) == frozen
    assert msgspec.json.encode(frozen) == b'{"a":"1"}'
    assert isinstance(msgspec.to_builtins(frozen), dict)


def test_errors_explain_how_to_change_a_frozen_value():
    with pytest.raises(TypeError, match=r"FrozenDict is immutable: .* build a new one"):
        FrozenDict(a="1")["a"] = "2"
    with pytest.raises(TypeError, match="FrozenList is immutable"):
        FrozenList([1]).append(2)


@pytest.mark.parametrize("plain", [{}, {"metadata": {}}, {"metadata": {"labels": {}}}])
def test_empty_mappings_are_one_object_and_are_not_encoded(plain: dict[str, Any]):
    obj = codec.from_builtins(SandboxTemplate, plain)
    assert obj.metadata.labels is obj.metadata.annotations is obj.spec.env is EMPTY
    assert b"labels" not in codec.encode(obj)


def test_freezing_a_frozen_value_returns_it_unchanged():
    frozen = freeze(FREE_FORM)
    assert freeze(frozen) is frozen
    assert frozen == FREE_FORM
    patches = (frozen, frozen)
    assert freeze(patches) is patches
    assert freeze(({},)) == ({},)
