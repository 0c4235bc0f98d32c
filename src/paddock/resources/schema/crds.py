"""CustomResourceDefinitions, written from the structs.

    python -m paddock.resources.schema.crds --write deploy/crds

A test fails when `deploy/crds` and the structs differ.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from paddock.resources.meta import GROUP, VERSION
from paddock.resources.registry import KINDS, Column, KindInfo
from paddock.resources.schema.openapi import schema_of_kind

FINGERPRINT = f"{GROUP}/definition"
"""Annotation by which somebody who upgrades sees whether a cluster has the definitions of now."""

_HEADER = (
    "# Written by `python -m paddock.resources.schema.crds --write deploy/crds`; do not edit.\n"
)


def crd(info: KindInfo) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind."""
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema_of_kind(info.cls)},
        "subresources": _subresources(info),
        "additionalPrinterColumns": [_column(column) for column in info.columns],
    }
    if info.selectable:
        version["selectableFields"] = [{"jsonPath": path} for path in info.selectable]
    spec: dict[str, Any] = {
        "group": GROUP,
        "scope": "Namespaced" if info.cls.NAMESPACED else "Cluster",
        "names": {
            "kind": info.kind,
            "listKind": f"{info.kind}List",
            "plural": info.cls.PLURAL,
            "singular": info.singular,
            "shortNames": list(info.short_names),
            "categories": list(info.categories),
        },
        "versions": [version],
    }
    fingerprint = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{info.cls.PLURAL}.{GROUP}",
            "annotations": {FINGERPRINT: fingerprint},
        },
        "spec": spec,
    }


def render(info: KindInfo) -> str:
    """Return the definition as YAML, the same text every time."""
    return _HEADER + yaml.safe_dump(crd(info), sort_keys=False, width=100, allow_unicode=True)


def file_name(info: KindInfo) -> str:
    """Name the file that holds a kind's definition."""
    return f"{GROUP}_{info.cls.PLURAL}.yaml"


def write(directory: Path) -> list[Path]:
    """Write every definition, and remove files of kinds that are no more."""
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / file_name(info) for info in KINDS]
    for path, info in zip(written, KINDS, strict=True):
        path.write_text(render(info))
    for stale in set(directory.glob(f"{GROUP}_*.yaml")) - set(written):
        stale.unlink()
    return written


def main(arguments: list[str] | None = None) -> int:
    """Write the definitions to a directory, or all of them to standard output."""
    parser = argparse.ArgumentParser(prog="paddock.resources.schema.crds", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="DIRECTORY")
    directory: Path | None = parser.parse_args(arguments).write
    if directory is None:
        sys.stdout.write("---\n".join(render(info) for info in KINDS))
    else:
        write(directory)
    return 0


def _subresources(info: KindInfo) -> dict[str, Any]:
    found: dict[str, Any] = {"status": {}}
    if info.scale:
        found["scale"] = {
            "specReplicasPath": info.scale.spec_path,
            "statusReplicasPath": info.scale.status_path,
        }
        if info.scale.selector_path:
            found["scale"]["labelSelectorPath"] = info.scale.selector_path
    return found


def _column(column: Column) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": column.name,
        "type": column.type,
        "jsonPath": column.path,
    }
    if column.priority:
        found["priority"] = column.priority
    return found


if __name__ == "__main__":
    raise SystemExit(main())
