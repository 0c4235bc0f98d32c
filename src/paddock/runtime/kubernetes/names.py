"""Names shared by the driver and the sidecar: labels, annotations, ports, containers."""

LABEL_UID = "paddock.dev/sandbox-uid"
"""On every object of a sandbox. Only the owner reference proves ownership, not this label."""
LABEL_EGRESS = "paddock.dev/egress"
"""The NetworkPolicy that selects a pod."""
LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGER = "paddock"
LABEL_COMPONENT = "app.kubernetes.io/component"
COMPONENT_NODE = "node"

ANNOTATION_INCARNATION = "paddock.dev/incarnation"
ANNOTATION_STOPPED = "paddock.dev/stopped"
"""On a volume claim: the incarnation that was stopped last and whose files the claim holds."""
ANNOTATION_FROZEN = "paddock.dev/frozen"
ANNOTATION_REPLACED = "paddock.dev/replaced"
"""The main container whose image was replaced: the kubelet's id and the sidecar's id of it."""

MAIN = "sandbox"
"""The container with the file system of the sandbox."""
ENVD = "envd"
TOOLS = "tools"

ENVD_PORT = 49983
CONTROL_PORT = 49984
"""The sidecar's port for the control plane; requires the sandbox's control token."""
NODE_PORT = 49985

TOOLS_DIRECTORY = "/.paddock"
HOLD = f"{TOOLS_DIRECTORY}/hold"
STATE_DIRECTORY = "/run/paddock-envd"
HOLD_IN_IMAGE = "/usr/lib/paddock/hold"
MARK = "PADDOCK_SANDBOX_UID"
"""Environment variable that marks the processes of the main container."""
MAIN_HEADER = "Paddock-Main"
"""Header of a `/ready` response: the id of the main container that the sidecar has entered."""
CONFIG = "PADDOCK_SIDECAR"
"""Environment variable with the sidecar's configuration as JSON."""
STATUS_NEVER_READY = 422
"""Status of a `/ready` response if the sandbox can never become ready; the body has the reason."""
