"""Generates files of `deploy/` from the manifests: the chart's RBAC rules and kustomize's files.

A test fails if they are out of date; `python -m paddock.cli.kube.files deploy` writes them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from paddock.cli.kube.manifests import manifests, monitor, node
from paddock.cli.kube.network import service
from paddock.cli.kube.options import KubeOptions, Manifest, labels
from paddock.cli.kube.rights import CLUSTER_RULES, OWN_RULES
from paddock.cli.kube.tls import (
    TLS_ENVIRONMENT,
    TLS_NAME,
    envoy_files,
    tls_configuration,
    tls_container,
    tls_volumes,
)
from paddock.cli.kube.webhook import WEBHOOK_CONTAINER, WEBHOOK_VOLUME, issued, webhook
from paddock.resources.registry import KINDS
from paddock.resources.schema.crds import file_name

_BASE = KubeOptions()
_WITH_TLS = KubeOptions(tls_secret=TLS_NAME)


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
        if objects:
            files[target / f"{name}.yaml"] = objects
        files[target / "kustomization.yaml"] = [
            {
                "apiVersion": "kustomize.config.k8s.io/v1alpha1",
                "kind": "Component",
                **({"resources": [f"{name}.yaml"]} if objects else {}),
                **({"patches": patches} if patches else {}),
            }
        ]
    texts = {path: "---\n".join(map(_dump, documents)) for path, documents in files.items()}
    for name, text in envoy_files().items():
        texts[directory / "helm/paddock/files" / name] = text
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [*texts]


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
        "no-node": ([], [_deletion(item) for item in node(_BASE)]),
        "tls": ([tls_configuration(_WITH_TLS)], _tls_patches()),
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


def _deletion(item: Manifest) -> Manifest:
    """Return a patch that removes an object of the base."""
    name = item["metadata"]["name"]
    body = {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "metadata": {"name": name},
        "$patch": "delete",
    }
    return {"patch": _dump(body), "target": {"kind": item["kind"], "name": name}}


def _tls_patches() -> list[Manifest]:
    """Return the patches of the gateways: Envoy beside each, and its port instead of theirs."""
    pod = {
        "containers": [{"name": "gateway", "env": TLS_ENVIRONMENT}, tls_container(_WITH_TLS)],
        "volumes": tls_volumes(_WITH_TLS),
    }
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "paddock-gateway"},
        "spec": {"template": {"spec": pod}},
    }
    served = service(_WITH_TLS, "gateway", "paddock", 3000, outside=80)["spec"]["ports"]
    allowed = _ingress(_WITH_TLS)["paddock-gateway"][0]
    ports = [{"op": "replace", "path": "/spec/ports", "value": served}]
    ingress = [{"op": "replace", "path": "/spec/ingress/0", "value": allowed}]
    return [
        {"patch": _dump(body), "target": {"kind": "Deployment", "name": "paddock-gateway"}},
        {"patch": _dump(ports), "target": {"kind": "Service", "name": "paddock"}},
        {
            "patch": _dump(ingress),
            "target": {"kind": "NetworkPolicy", "name": "paddock-gateway"},
        },
    ]


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
