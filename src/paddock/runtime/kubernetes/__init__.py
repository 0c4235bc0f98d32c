"""The `kubernetes` driver: one pod per sandbox.

`pods` renders, creates, watches and changes pods; `network` turns egress policies into
NetworkPolicies; `sidecar` is the program of the envd container. `driver` implements the Runtime
port, `envd_client` calls the envds, `node_agents` and `freezer` freeze pods.
"""
