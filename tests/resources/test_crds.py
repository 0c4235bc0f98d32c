"""CRDs in deploy/crds match the structs and have structural schemas."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddock.resources.registry import KINDS, KindInfo
from paddock.resources.schema import crds
from paddock.resources.schema.constraints import LIMITS
from paddock.resources.schema.openapi import schema_of_kind
from paddock.resources.schema.rules import RULES, TRANSITIONS

DIRECTORY = Path(__file__).parents[2] / "deploy" / "crds"

each_kind = pytest.mark.parametrize("info", KINDS, ids=lambda info: info.kind)


@each_kind
def test_definitions_on_disk_are_current(info: KindInfo):
    on_disk = (DIRECTORY / crds.file_name(info)).read_text()
    assert on_disk == crds.render(info), (
        "run: python -m paddock.resources.schema.crds --write deploy/crds"
    )


def test_no_stale_definition_is_on_disk():
    listed = {path.name for path in DIRECTORY.glob("*.yaml")} - {"kustomization.yaml"}
    assert listed == {crds.file_name(info) for info in KINDS}


def test_writing_removes_definitions_of_unknown_kinds(tmp_path: Path):
    stale = tmp_path / "paddock.dev_dinosaurs.yaml"
    stale.touch()
    crds.main(["--write", str(tmp_path)])
    assert not stale.exists()
    assert len(list(tmp_path.iterdir())) == len(KINDS)


def test_a_changed_definition_has_another_fingerprint():
    info = KINDS[0]
    other = structs.replace(info, short_names=("other",))
    fingerprints = {
        crds.crd(given)["metadata"]["annotations"][crds.FINGERPRINT] for given in (info, other)
    }
    assert len(fingerprints) == 2
    assert crds.crd(info) == crds.crd(info)


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for child in schema.get("properties", {}).values():
        yield from nodes(child)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name])


@each_kind
def test_schemas_are_structural(info: KindInfo):
    for node in nodes(schema_of_kind(info.cls)):
        assert "type" in node or node.get("x-kubernetes-int-or-string")
        if node.get("type") == "array":
            assert node["x-kubernetes-list-type"] == "atomic"
        assert "$ref" not in node


@each_kind
def test_paths_of_columns_rules_and_selectable_fields_exist(info: KindInfo):
    schema = schema_of_kind(info.cls)
    for path in (*(column.path for column in info.columns), *info.selectable):
        if not path.startswith(".metadata"):
            assert resolve(schema, path), path
    for node in nodes(schema):
        for rule in node.get("x-kubernetes-validations", ()):
            assert resolve(node, rule["fieldPath"]), rule


def resolve(schema: dict[str, Any], path: str) -> dict[str, Any] | None:
    for name in path.lstrip(".").split("."):
        schema = schema.get("properties", {}).get(name, {})
    return schema or None


def test_descriptions_come_from_docstrings():
    sandbox = schema_of_kind(next(info.cls for info in KINDS if info.kind == "Sandbox"))
    spec = sandbox["properties"]["spec"]["properties"]
    assert "Time at which the sandbox shuts down" in spec["shutdownTime"]["description"]
    assert "milliseconds" in spec["pauseStrategy"]["description"]


def test_limits_and_rules_refer_to_existing_fields():
    for cls, limits in LIMITS.items():
        assert set(limits) <= set(cls.__struct_fields__), cls
    for cls in {**RULES, **TRANSITIONS}:
        assert cls.__struct_fields__
