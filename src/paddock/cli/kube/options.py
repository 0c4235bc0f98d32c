"""Options of an installation on a cluster, and the metadata of its objects."""

from typing import Any

from msgspec import Struct

Manifest = dict[str, Any]
PART_OF = "app.kubernetes.io/part-of=paddock"
"""Selects the objects of an installation."""


class KubeOptions(Struct, frozen=True, kw_only=True):
    """Options of an installation."""

    image: str = "paddock"
    namespace: str = "paddock-system"
    replicas: int = 2
    has_node: bool = True
    """Whether an agent per node freezes pods; without it, pods pause only by Stop."""
    pool_size: int = 2
    default_image: str = "debian:13"
    secret: str = "paddock"  # noqa: S105 - an object's name
    """Name of the Secret with seed, token and api-key."""
    has_webhook: bool = False
    """Whether an admission webhook checks applied resources."""
    ca_bundle: str = ""
    """Base64 of the webhook's certificate; empty: cert-manager fills it in."""
    monitoring: str = ""
    """Namespace whose pods may read metrics; empty: none."""
    tls_secret: str = ""
    """Secret of type `kubernetes.io/tls` with which gateways serve TLS; empty: no TLS."""
    tls_image: str = "envoyproxy/envoy:v1.40.0"
    """Image of the Envoy that serves TLS."""


def labels(component: str | None = None) -> dict[str, str]:
    """Return the labels of Paddock's own objects."""
    found = {"app.kubernetes.io/name": "paddock", "app.kubernetes.io/part-of": "paddock"}
    return found if component is None else {**found, "app.kubernetes.io/component": component}


def meta(options: KubeOptions, name: str, component: str | None = None) -> Manifest:
    """Return the metadata of one of Paddock's own objects."""
    return {"name": name, "namespace": options.namespace, "labels": labels(component)}
