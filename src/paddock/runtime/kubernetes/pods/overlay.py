"""Merge a template's `podTemplate` over the rendered pod, and validate it.

The merge is `resources.strategic_merge`. A user who may write templates need not have the right to
create pods, so fields that give access to the node are rejected unless the operator's settings
allow them.
"""

from collections.abc import Mapping
from typing import Any, cast

from paddock.kit.errors import FieldProblem, InvalidError
from paddock.resources import strategic_merge
from paddock.runtime.kubernetes.names import ENVD, TOOLS

_RESERVED = ("restartPolicy", "shareProcessNamespace", "serviceAccountName", "serviceAccount")
_ALSO_RESERVED = ("automountServiceAccountToken", "nodeName", "ephemeralContainers")
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_SAFE_CAPABILITIES = frozenset({"NET_BIND_SERVICE"})


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge one mapping over another; `None` removes. A template has no directives."""
    return strategic_merge.merge(base, over, has_directives=False)


def validate_pod_template(template: Mapping[str, Any], *, allow_host: bool) -> None:
    """Validate a pod template. Raises `InvalidError` with every field that it may not set."""
    problems = [
        FieldProblem(f"spec.podTemplate.{path}", fault)
        for path, fault in _forbidden_fields(template, allow_host=allow_host)
    ]
    if problems:
        raise InvalidError(
            "podTemplate sets fields that are not allowed: " + "; ".join(map(str, problems)),
            problems=problems,
            hint="remove these fields; an operator may allow access to the host by settings",
        )


def _forbidden_fields(template: Mapping[str, Any], *, allow_host: bool) -> list[tuple[str, str]]:
    found = [
        (name, "is not a field of a pod template")
        for name in template
        if name not in ("metadata", "spec")
    ]
    spec = _mapping(template.get("spec"))
    found += [
        (f"spec.{name}", "is set by Paddock")
        for name in (*_RESERVED, *_ALSO_RESERVED)
        if name in spec
    ]
    if not allow_host:
        found += [(f"spec.{name}", "gives access to the node") for name in _HOST if spec.get(name)]
        for place, volume in enumerate(_items(spec.get("volumes"))):
            if "hostPath" in volume:
                found.append((f"spec.volumes[{place}].hostPath", "gives access to the node"))
    for kind in ("containers", "initContainers"):
        for place, container in enumerate(_items(spec.get(kind))):
            path = f"spec.{kind}[{place}]"
            found += _forbidden_container_fields(container, path, allow_host=allow_host)
    return found


def _forbidden_container_fields(
    container: Mapping[str, Any], path: str, *, allow_host: bool
) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if container.get("name") in (ENVD, TOOLS):
        found += [
            (f"{path}.{name}", "is set by Paddock")
            for name in container
            if name not in ("name", "resources")
        ]
    security = _mapping(container.get("securityContext"))
    if allow_host:
        return found
    for name in ("privileged", "allowPrivilegeEscalation"):
        if security.get(name):
            found.append((f"{path}.securityContext.{name}", "gives access to the node"))
    if security.get("procMount", "Default") != "Default":
        found.append((f"{path}.securityContext.procMount", "gives access to the node"))
    added: Any = _mapping(security.get("capabilities")).get("add") or ()
    for capability in added:
        if capability not in _SAFE_CAPABILITIES:
            found.append(
                (f"{path}.securityContext.capabilities.add", f"{capability} is not allowed")
            )
    return found


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _items(value: object) -> list[Mapping[str, Any]]:
    items = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    return [_mapping(item) for item in items]
