"""The Store on any Kubernetes API server.

`access` says where the server is and who we are, `client` speaks HTTP to it, `paths`, `bodies` and
`answers` know what is said, `watching` reads event streams, `selection` narrows by fields,
`statuses` translates refusals, and `backend` puts them together as the Store port asks.
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
