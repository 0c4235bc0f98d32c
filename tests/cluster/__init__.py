"""A real Kubernetes control plane for tests: etcd, API server and controllers on loopback.

`control_plane` starts and stops it, `certificates` creates its keys, `users` defines users and
rights, `binaries` finds or builds its programs, `definitions` installs the CRDs, `info` describes a
cluster to clients, `fixtures` shares one cluster among pytest workers. `kubelet` and `pod_runner`
run pods as processes of this machine; `node` is a node with a real kubelet. `test_*.py` here test
the harness itself; tests of Paddock are with their layers.
"""
