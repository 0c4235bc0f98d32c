"""What a sandbox's pod looks like: a pure function of its blueprint.

The main container is the template's image and only holds still; it is not root, has no
capabilities and no service-account token. envd is a sidecar that enters the main container's
mount namespace, so that any image will do, and drops what it needed for that. Both count against
one limit, the pod's, because commands are envd's children.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.pods import PodManifest, VolumeClaimManifest
from paddock.resources.meta import API_VERSION, ObjectMeta, OwnerReference
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.network.policy_render import policy_name
from paddock.runtime.kubernetes.pods.overlay import merge, refuse_dangers
from paddock.runtime.port import Blueprint, Limits

_ENTERING = ("SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE")
"""To join the main container; dropped for good once inside."""
_SERVING = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")


class PodSettings(Struct, frozen=True, kw_only=True):
    """What an operator decides for all pods."""

    agent_image: str
    """The image with envd and its tools."""
    system_namespace: str = "paddock-system"
    """From where sandboxes may be spoken to."""
    namespace: str = ""
    """Where sandboxes are; empty: anywhere."""
    image_pull_policy: str = "IfNotPresent"
    user_id: int = 1000
    has_pod_limits: bool = True
    """Limit pods as a whole (Kubernetes 1.34 and newer); else both containers alike."""
    allow_host: bool = False
    """Let templates reach into the node: host paths, host network, privileged containers."""
    grace_seconds: int = 1


class SidecarOrders(Struct, frozen=True, kw_only=True):
    """What the sidecar is told at its start; nothing in it is secret."""

    uid: str
    control_hash: str
    """Hash of the token that orders must carry."""
    user: str = "user"
    user_id: int = 1000
    workdir: str | None = None
    env: Mapping[str, str] = {}
    start_command: str | None = None
    ready_command: str | None = None
    cpu_count: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    host: str = "0.0.0.0"  # noqa: S104 - inside a pod
    port: int = names.ENVD_PORT
    control_port: int = names.CONTROL_PORT


def owner(blueprint: Blueprint) -> OwnerReference:
    """Tie what is made to its Sandbox: it goes when that goes."""
    return OwnerReference(
        api_version=API_VERSION,
        kind="Sandbox",
        name=blueprint.name,
        uid=blueprint.uid,
        controller=True,
        block_owner_deletion=False,
    )


def render(
    blueprint: Blueprint, settings: PodSettings, *, control_hash: str, incarnation: int = 1
) -> PodManifest:
    """Say what the pod of a sandbox looks like; `InvalidError` for what no pod can be."""
    wishes = blueprint.pod_template or {}
    refuse_dangers(wishes, allow_host=settings.allow_host)
    egress = policy_name(blueprint.egress, settings.system_namespace)
    own: dict[str, Any] = {
        "metadata": {
            "labels": {
                **blueprint.labels,
                names.LABEL_MANAGED: names.MANAGER,
                names.LABEL_UID: blueprint.uid,
                names.LABEL_EGRESS: egress,
            },
            "annotations": {names.ANNOTATION_INCARNATION: str(incarnation)},
        },
        "spec": _spec(blueprint, settings, control_hash),
    }
    merged = merge(own, wishes)
    metadata = merged["metadata"]
    return PodManifest(
        metadata=ObjectMeta(
            name=blueprint.name,
            namespace=blueprint.namespace,
            # Identity is not the template's to change.
            labels={**metadata.get("labels", {}), **own["metadata"]["labels"]},
            annotations={**metadata.get("annotations", {}), **own["metadata"]["annotations"]},
            owner_references=(owner(blueprint),),
        ),
        spec=merged["spec"],
    )


def _spec(blueprint: Blueprint, settings: PodSettings, control_hash: str) -> dict[str, Any]:
    limits = requests_and_limits(blueprint.limits)
    volumes, mounts = _volumes(blueprint, settings)
    claims = claim_names(blueprint)
    volumes += [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}}
        for name, claim in claims.items()
    ]
    if claims and not _mounts_any(blueprint.pod_template or {}, claims):
        # Somebody who asks for one volume and says no more wants the files to be there.
        home = blueprint.workdir or f"/home/{blueprint.user}"
        mounts.append({"name": next(iter(claims)), "mountPath": home})
    main: dict[str, Any] = {
        "name": names.MAIN,
        "image": blueprint.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [names.HOLD],
        "env": [{"name": names.MARK, "value": blueprint.uid}, *_variables(blueprint.env)],
        "volumeMounts": [
            {"name": "paddock-tools", "mountPath": names.TOOLS_DIRECTORY, "readOnly": True},
            *mounts,
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user_id,
            "runAsGroup": settings.user_id,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    envd = _envd(blueprint, settings, control_hash)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "securityContext": {
            "fsGroup": settings.user_id,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_tools(settings), envd],
        "containers": [main],
        "volumes": [
            {"name": "paddock-tools", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
            {"name": "paddock-state", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
            *volumes,
        ],
    }
    if blueprint.hostname:
        spec["hostname"] = blueprint.hostname[:63].rstrip("-.")
    if limits["limits"] and settings.has_pod_limits:
        spec["resources"] = limits
    elif limits["limits"]:
        main["resources"] = envd["resources"] = limits
    if blueprint.limits.disk_bytes:
        disk = {"ephemeral-storage": str(blueprint.limits.disk_bytes)}
        main["resources"] = merge(main.get("resources", {}), {"limits": disk})
    return spec


def _tools(settings: PodSettings) -> dict[str, Any]:
    return {
        "name": names.TOOLS,
        "image": settings.agent_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [names.HOLD_IN_IMAGE, "--install", names.HOLD],
        "volumeMounts": [{"name": "paddock-tools", "mountPath": names.TOOLS_DIRECTORY}],
        "securityContext": {
            "runAsUser": settings.user_id,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _envd(blueprint: Blueprint, settings: PodSettings, control_hash: str) -> dict[str, Any]:
    limits = blueprint.limits
    orders = SidecarOrders(
        uid=blueprint.uid,
        control_hash=control_hash,
        user=blueprint.user,
        user_id=settings.user_id,
        workdir=blueprint.workdir,
        env=blueprint.env,
        start_command=blueprint.start_command,
        ready_command=blueprint.ready_command,
        cpu_count=limits.cpu_millis / 1000 if limits.cpu_millis else None,
        memory_bytes=limits.memory_bytes,
        disk_bytes=limits.disk_bytes,
    )
    return {
        "name": names.ENVD,
        "image": settings.agent_image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "command": ["python", "-m", "paddock.runtime.kubernetes.sidecar"],
        "env": [{"name": names.CONFIG, "value": msgspec.json.encode(orders).decode()}],
        "ports": [
            {"name": "envd", "containerPort": names.ENVD_PORT},
            {"name": "control", "containerPort": names.CONTROL_PORT},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": names.CONTROL_PORT},
            "periodSeconds": 5,
            "timeoutSeconds": 2,
        },
        "volumeMounts": [
            {"name": "paddock-tools", "mountPath": names.TOOLS_DIRECTORY},
            {"name": "paddock-state", "mountPath": names.STATE_DIRECTORY},
        ],
        "securityContext": {
            "runAsUser": 0,
            "runAsNonRoot": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": [*_ENTERING, *_SERVING]},
        },
    }


def requests_and_limits(limits: Limits) -> dict[str, dict[str, str]]:
    """Say what a pod may use, and what it asks the scheduler for."""
    # The scheduler places by requests: a sandbox mostly idles, so it asks for a tenth.
    return {"requests": _requests(limits), "limits": _limits(limits)}


def _limits(limits: Limits) -> dict[str, str]:
    found: dict[str, str] = {}
    if limits.cpu_millis:
        found["cpu"] = f"{limits.cpu_millis}m"
    if limits.memory_bytes:
        found["memory"] = str(limits.memory_bytes)
    return found


def _requests(limits: Limits) -> dict[str, str]:
    found: dict[str, str] = {}
    if limits.cpu_millis:
        found["cpu"] = f"{max(limits.cpu_millis // 10, 1)}m"
    if limits.memory_bytes:
        found["memory"] = str(max(limits.memory_bytes // 4, min(limits.memory_bytes, 64 << 20)))
    return found


def _variables(env: Mapping[str, str]) -> list[dict[str, str]]:
    # `$(NAME)` would be replaced by the kubelet; a dollar sign is written twice to stay one.
    return [{"name": name, "value": text.replace("$(", "$$(")} for name, text in env.items()]


def _volumes(
    blueprint: Blueprint, settings: PodSettings
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for number, mount in enumerate(blueprint.mounts):
        name = f"volume-{number}"
        kind, colon, rest = mount.source.partition(":")
        if kind == "volume" and colon:
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": rest}})
        elif settings.allow_host:
            volumes.append({"name": name, "hostPath": {"path": mount.source}})
        else:
            raise InvalidError(
                f"spec.volumes: {mount.source} is a directory of the node",
                hint="name a claim; an operator may allow host paths by settings",
            )
        mounts.append({"name": name, "mountPath": mount.path, "readOnly": mount.read_only})
    return volumes, mounts


def claim_names(blueprint: Blueprint) -> dict[str, str]:
    """Give the volume claims of a sandbox: its templates' names, and the claims' own."""
    found: dict[str, str] = {}
    for number, template in enumerate(blueprint.volume_claim_templates):
        metadata: Any = template.get("metadata") or {}
        name = str(metadata.get("name") or f"claim-{number}")
        found[name] = f"{name}-{blueprint.name}"
    return found


def volume_claims(blueprint: Blueprint) -> tuple[VolumeClaimManifest, ...]:
    """Say what volume claims a sandbox needs."""
    made: list[VolumeClaimManifest] = []
    claims = claim_names(blueprint).values()
    for template, name in zip(blueprint.volume_claim_templates, claims, strict=True):
        metadata: Any = template.get("metadata") or {}
        own = {names.LABEL_MANAGED: names.MANAGER, names.LABEL_UID: blueprint.uid}
        spec: Any = template.get("spec") or {}
        made.append(
            VolumeClaimManifest(
                metadata=ObjectMeta(
                    name=name,
                    namespace=blueprint.namespace,
                    labels={**metadata.get("labels", {}), **own},
                    annotations=metadata.get("annotations", {}),
                    owner_references=(owner(blueprint),),
                ),
                spec=spec,
            )
        )
    return tuple(made)


def _mounts_any(template: Mapping[str, Any], claims: Mapping[str, str]) -> bool:
    spec: Any = template.get("spec") or {}
    mounts = [
        mount.get("name")
        for container in spec.get("containers") or ()
        for mount in container.get("volumeMounts") or ()
    ]
    return any(name in claims for name in mounts)
