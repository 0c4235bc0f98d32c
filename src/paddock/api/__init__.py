"""HTTP for programs: e2b, kube, health and metrics. Status codes live here and nowhere below."""
