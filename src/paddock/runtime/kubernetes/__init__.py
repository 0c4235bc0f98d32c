"""The `kubernetes` driver: one pod per sandbox.

`render` says what a pod looks like, `overlay` merges a template's own wishes over it, `network`
turns egress policies into NetworkPolicies, `reading` says what a pod's status means; all are pure.
`driver` acts, `envds` speaks to the daemons, `sidecar` is the daemon's program inside a pod.
"""
