"""`paddock kube`: Paddock on a cluster."""
