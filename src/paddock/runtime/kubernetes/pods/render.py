"""Render the pod and volume claims of a sandbox: pure functions of its blueprint.

The main container runs the template's image and only sleeps; it is not root and has neither
capabilities nor a service-account token. envd is a sidecar that enters the main container's mount
namespace, so that any image works, and then drops the capabilities needed for that. Commands are
children of envd, so both containers share one limit, the pod's.
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
from paddock.runtime.kubernetes.pods.overlay import merge, validate_pod_template
from paddock.runtime.port import Blueprint, Limits

_ENTRY_CAPABILITIES = ("SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE")
"""Needed to enter the main container; dropped permanently afterwards."""
_SERVING_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")


class PodSettings(Struct, frozen=True, kw_only=True):
    """The operator's settings for all pods."""

    agent_image: str
    """The image with envd and its tools."""
    system_namespace: str = "paddock-system"
    """The namespace from which pods of sandboxes accept connections."""
    namespace: str = ""
    """The namespace of sandboxes; empty means all namespaces."""
    image_pull_policy: str = "IfNotPresent"
    user_id: int = 1000
    has_pod_limits: bool = True
    """Set limits on the pod (Kubernetes 1.34 and newer) instead of on both containers."""
    allow_host: bool = False
    """Allow templates to access the node: host paths, host network, privileged containers."""
    grace_seconds: int = 1


class SidecarConfig(Struct, frozen=True, kw_only=True):
    """The sidecar's configuration; contains no secrets."""

    uid: str
    control_hash: str
    """Hash of the token that control requests must carry."""
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


def owner_reference(blueprint: Blueprint) -> OwnerReference:
    """Return the owner reference by which objects are deleted with their Sandbox."""
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
    """Render the pod of a sandbox. Raises `InvalidError` for a template that is not allowed."""
    overlay = blueprint.pod_template or {}
    validate_pod_template(overlay, allow_host=settings.allow_host)
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
    merged = merge(own, overlay)
    metadata = merged["metadata"]
    return PodManifest(
        metadata=ObjectMeta(
            name=blueprint.name,
            namespace=blueprint.namespace,
            # Templates must not change the identity.
            labels={**metadata.get("labels", {}), **own["metadata"]["labels"]},
            annotations={**metadata.get("annotations", {}), **own["metadata"]["annotations"]},
            owner_references=(owner_reference(blueprint),),
        ),
        spec=merged["spec"],
    )


def _image(blueprint: Blueprint) -> str:
    """Return the reference to the image, with the digest to which the template pins it."""
    if not blueprint.image_digest or "@" in blueprint.image:
        return blueprint.image
    return f"{blueprint.image}@{blueprint.image_digest}"


def _pull_secrets(blueprint: Blueprint) -> dict[str, Any]:
    secrets = [{"name": name} for name in blueprint.image_pull_secrets]
    return {"imagePullSecrets": secrets} if secrets else {}


def _spec(blueprint: Blueprint, settings: PodSettings, control_hash: str) -> dict[str, Any]:
    limits = requests_and_limits(blueprint.limits)
    volumes, mounts = _volumes(blueprint, settings)
    claims = claim_names(blueprint)
    volumes += [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}}
        for name, claim in claims.items()
    ]
    if claims and not _mounts_any(blueprint.pod_template or {}, claims):
        # A claim that the template does not mount is mounted at the working directory.
        home = blueprint.workdir or f"/home/{blueprint.user}"
        mounts.append({"name": next(iter(claims)), "mountPath": home})
    main: dict[str, Any] = {
        "name": names.MAIN,
        "image": _image(blueprint),
        "imagePullPolicy": blueprint.image_pull_policy.value,
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
        **_pull_secrets(blueprint),
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
    config = SidecarConfig(
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
        "env": [{"name": names.CONFIG, "value": msgspec.json.encode(config).decode()}],
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
            "capabilities": {
                "drop": ["ALL"],
                "add": [*_ENTRY_CAPABILITIES, *_SERVING_CAPABILITIES],
            },
        },
    }


def requests_and_limits(limits: Limits) -> dict[str, dict[str, str]]:
    """Return the resource requests and limits of a pod."""
    # The scheduler places by requests. A sandbox is mostly idle: it requests a tenth of its CPU.
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
    # The kubelet would expand `$(NAME)`; `$$(` escapes it.
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
                hint="use a volume claim; an operator may allow host paths by settings",
            )
        mounts.append({"name": name, "mountPath": mount.path, "readOnly": mount.read_only})
    return volumes, mounts


def claim_names(blueprint: Blueprint) -> dict[str, str]:
    """Return the names of a sandbox's volume claims by the names of their templates."""
    found: dict[str, str] = {}
    for number, template in enumerate(blueprint.volume_claim_templates):
        metadata: Any = template.get("metadata") or {}
        name = str(metadata.get("name") or f"claim-{number}")
        found[name] = f"{name}-{blueprint.name}"
    return found


def volume_claims(blueprint: Blueprint) -> tuple[VolumeClaimManifest, ...]:
    """Render the volume claims of a sandbox."""
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
                    owner_references=(owner_reference(blueprint),),
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
