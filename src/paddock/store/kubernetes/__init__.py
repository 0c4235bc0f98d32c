"""The Store on any Kubernetes API server.

`access` and `credentials` read server address and identity, `client` sends HTTP requests, `paths`,
`bodies` and `responses` encode and decode them, `watching` reads event streams, `selection` filters
by fields, `statuses` converts error responses, and `backend` implements the Store port.
"""

from paddock.store.kubernetes.access import Access, load_access, load_in_cluster, load_kubeconfig
from paddock.store.kubernetes.backend import KubernetesStore
from paddock.store.kubernetes.client import ClientSettings, KubernetesClient

__all__ = [
    "Access",
    "ClientSettings",
    "KubernetesClient",
    "KubernetesStore",
    "load_access",
    "load_in_cluster",
    "load_kubeconfig",
]
