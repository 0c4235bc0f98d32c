"""`paddock kube`: manage Paddock on a cluster."""
