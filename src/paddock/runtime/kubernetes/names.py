"""Names that both sides of the driver use: labels, annotations, ports, containers."""

LABEL_UID = "paddock.dev/sandbox-uid"
"""On everything made for one sandbox. Ownership is proven by owner reference, not by this."""
LABEL_EGRESS = "paddock.dev/egress"
"""Which NetworkPolicy selects a pod."""
LABEL_MANAGED = "app.kubernetes.io/managed-by"
MANAGER = "paddock"
LABEL_COMPONENT = "app.kubernetes.io/component"
COMPONENT_NODE = "node"

ANNOTATION_INCARNATION = "paddock.dev/incarnation"
ANNOTATION_STOPPED = "paddock.dev/stopped"
"""On a volume claim: the incarnation that was stopped last. Its files are waiting there."""
ANNOTATION_FROZEN = "paddock.dev/frozen"
ANNOTATION_REPLACED = "paddock.dev/replaced"
"""The main container whose image was replaced, as the kubelet and as the sidecar knew it."""

MAIN = "sandbox"
"""The container in which a sandbox's programs run."""
ENVD = "envd"
TOOLS = "tools"

ENVD_PORT = 49983
CONTROL_PORT = 49984
"""Where the sidecar takes orders; asks for the sandbox's control token."""
NODE_PORT = 49985

TOOLS_DIRECTORY = "/.paddock"
HOLD = f"{TOOLS_DIRECTORY}/hold"
STATE_DIRECTORY = "/run/paddock-envd"
HOLD_IN_IMAGE = "/usr/lib/paddock/hold"
MARK = "PADDOCK_SANDBOX_UID"
"""Variable by which the sidecar tells the main container's processes from others."""
MAIN_HEADER = "Paddock-Main"
"""In the sidecar's answer whether it is ready: the life of the main container that it is in."""
CONFIG = "PADDOCK_SIDECAR"
"""Variable with the sidecar's orders, JSON."""
