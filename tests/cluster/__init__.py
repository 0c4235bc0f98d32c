"""A real Kubernetes control plane for tests: etcd, API server and friends on loopback.

`cluster` starts and stops it, `certificates` makes its keys, `users` says who may do what,
`binaries` finds or builds its programs, `definitions` installs our kinds, `info` is what clients
know, `fixtures` shares one cluster among pytest workers. `kubelet` and `podrunner` run pods as
processes of this machine; `node`, `node_init` and `node_images` are a node with a real kubelet.
Tests of the harness itself are `test_*.py` here; tests of Paddock live with their layers.
"""
