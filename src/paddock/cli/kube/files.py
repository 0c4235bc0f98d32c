"""Generates files of `deploy/` from the manifests: the chart's RBAC rules and kustomize's files.

A test fails if they are out of date; `python -m paddock.cli.kube.files deploy` writes them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from paddock.cli.kube.manifests import manifests, monitor, node
from paddock.cli.kube.options import KubeOptions, Manifest, labels
from paddock.cli.kube.rights import CLUSTER_RULES, OWN_RULES
from paddock.cli.kube.webhook import WEBHOOK_CONTAINER, WEBHOOK_VOLUME, issued, webhook
from paddock.resources.registry import KINDS
from paddock.resources.schema.crds import file_name

_BASE = KubeOptions()


def write_deploy(directory: Path) -> list[Path]:
    """Write the generated files of `deploy/`; return their paths."""
    files: dict[Path, list[Manifest]] = {
        directory / "crds/kustomization.yaml": [
            _kustomization([file_name(info) for info in KINDS])
        ],
        directory / "helm/paddock/files/rbac.yaml": [
            {"ClusterRole": CLUSTER_RULES, "Role": OWN_RULES}
        ],
        directory / "kustomize/base/paddock.yaml": manifests(_BASE),
        directory / "kustomize/base/kustomization.yaml": [
            _kustomization(["../../crds", "paddock.yaml"])
        ],
    }
    for name, (objects, patches) in _components().items():
        target = directory / "kustomize/components" / name
        files[target / f"{name}.yaml"] = objects
        files[target / "kustomization.yaml"] = [
            {
                "apiVersion": "kustomize.config.k8s.io/v1alpha1",
                "kind": "Component",
                "resources": [f"{name}.yaml"],
                **({"patches": patches} if patches else {}),
            }
        ]
    for path, documents in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("---\n".join(_dump(document) for document in documents))
    return [*files]


def _kustomization(resources: list[str]) -> Manifest:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    }


def _components() -> Mapping[str, tuple[list[Manifest], list[Manifest]]]:
    """Return the kustomize components: their objects, and their patches of the base."""
    api = labels("api")
    has_all = KubeOptions(has_webhook=True, monitoring="monitoring")
    return {
        "node": (node(_BASE), []),
        "webhook": (
            [*webhook(_BASE.namespace, api, ""), *issued(_BASE.namespace, api)],
            [_webhook_patch(), *_policy_patches(KubeOptions(has_webhook=True))],
        ),
        "monitor": ([monitor(has_all)], _policy_patches(KubeOptions(monitoring="monitoring"))),
    }


def _webhook_patch() -> Manifest:
    pod = {
        "containers": [{"name": "api", **WEBHOOK_CONTAINER}],
        "volumes": [WEBHOOK_VOLUME],
    }
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "paddock-api"},
        "spec": {"template": {"spec": pod}},
    }
    return {"patch": _dump(body), "target": {"kind": "Deployment", "name": "paddock-api"}}


def _policy_patches(options: KubeOptions) -> list[Manifest]:
    """Return patches that add rules to the base's NetworkPolicies, so that components combine."""
    base = _ingress(_BASE)
    patches: list[Manifest] = []
    for name, rules in _ingress(options).items():
        added = [
            {"op": "add", "path": "/spec/ingress/-", "value": rule}
            for rule in rules
            if rule not in base[name]
        ]
        if added:
            target = {"kind": "NetworkPolicy", "name": name}
            patches.append({"patch": _dump(added), "target": target})
    return patches


def _ingress(options: KubeOptions) -> dict[str, list[Manifest]]:
    return {
        item["metadata"]["name"]: item["spec"]["ingress"]
        for item in manifests(options)
        if item["kind"] == "NetworkPolicy"
    }


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, for readability."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True."""
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)  # pyright: ignore[reportUnknownMemberType]


_Dumper.add_representer(str, _block)


def _dump(document: Manifest | list[Manifest]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100)


if __name__ == "__main__":
    for written in write_deploy(Path(sys.argv[1])):
        sys.stdout.write(f"{written}\n")
