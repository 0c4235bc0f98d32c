"""Limits of single fields, in one table that validation and schemas share.

So the API server and Paddock reject the same values. Rules between fields are in `rules`. Types
have no limits: stored objects must decode even after a limit was tightened.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from paddock.resources.kinds.batch import (
    BatchSandboxSpec,
    EnvVar,
    Hook,
    Process,
    TaskSpec,
)
from paddock.resources.kinds.builtin import LeaseSpec, Secret
from paddock.resources.kinds.checkpoint import CheckpointSpec
from paddock.resources.kinds.claim import InplaceUpdate, SandboxClaimSpec, UpdatedResources
from paddock.resources.kinds.env import (
    Autoscaling,
    EnvCluster,
    EnvDefaults,
    EnvMember,
    EnvOverrides,
    Forecast,
    MemberConfig,
    MemberMetadata,
    SandboxEnvSpec,
    ScalingGroup,
    ScheduledFloor,
)
from paddock.resources.kinds.pool import (
    Capacity,
    RecycleStrategy,
    SandboxPoolSpec,
    ScaleStrategy,
    UpdateStrategy,
)
from paddock.resources.kinds.sandbox import ClaimIdentity, IdlePause, SandboxSpec, WakeOnTraffic
from paddock.resources.kinds.template import (
    NetworkPolicy,
    Outbound,
    Port,
    Probe,
    Resources,
    SandboxTemplateSpec,
    TemplateRef,
    Volume,
)
from paddock.resources.kinds.template_build import BuildStep, TemplateBuildSpec
from paddock.resources.schema import formats
from paddock.resources.schema.formats import Check


class FieldLimit(Struct, frozen=True, kw_only=True):
    """Limits of one field. Everything except the checks is in the OpenAPI schema too."""

    minimum: float | None = None
    maximum: float | None = None
    is_above: bool = False
    """Whether the minimum is exclusive."""
    pattern: str | None = None
    meaning: str = ""
    """Description of the pattern, for messages."""
    choices: tuple[str, ...] = ()
    min_length: int | None = None
    max_length: int | None = None
    min_items: int | None = None
    max_items: int | None = None
    max_properties: int | None = None
    items: "FieldLimit | None" = None
    """Limits of each element of a list, or of each value of a mapping."""
    check: Check | None = None
    """Check that a pattern cannot express."""
    key_check: Check | None = None
    """Check of each key of a mapping."""


DAY = 86_400
YEAR = 366 * DAY
MANY = 1_000_000
"""Upper limit of counts. Protects against typos and overflow."""

_COUNT = FieldLimit(minimum=0, maximum=MANY)
_SIZE = FieldLimit(minimum=1, maximum=MANY)
_SECONDS = FieldLimit(minimum=1, maximum=YEAR)
_SECONDS_OR_NONE = FieldLimit(minimum=0, maximum=YEAR)
_SHORT = FieldLimit(minimum=1, maximum=DAY)
_PRIORITY = FieldLimit(minimum=-MANY, maximum=MANY)
_QUANTITY = FieldLimit(
    pattern=formats.QUANTITY, meaning="a quantity such as 2, 500m or 512Mi", max_length=32
)
_SOME = FieldLimit(
    pattern=formats.POSITIVE_QUANTITY,
    meaning="a quantity greater than zero, such as 2, 500m or 512Mi",
    max_length=32,
)
_IMAGE = FieldLimit(min_length=1, max_length=512)
_NAME = FieldLimit(
    pattern=formats.DNS_SUBDOMAIN,
    meaning="a valid name: lower case letters, digits, '-' and '.'",
    min_length=1,
    max_length=formats.MAX_NAME,
)
_NAMESPACE = FieldLimit(
    pattern=formats.DNS_LABEL,
    meaning="a valid namespace: lower case letters, digits and '-'",
    max_length=formats.MAX_LABEL,
)
_PERCENT_OR_COUNT = FieldLimit(
    minimum=1,
    maximum=MANY,
    pattern=formats.PERCENTAGE,
    meaning="a number of at least 1, or a percentage from 1% to 100%",
    max_length=4,
)
_VARIABLES = FieldLimit(
    max_properties=512, key_check=formats.env_name, items=FieldLimit(max_length=131_072)
)
_LABELS = FieldLimit(
    max_properties=64,
    key_check=formats.qualified_name,
    items=FieldLimit(max_length=63, check=formats.label_value),
)
_ANNOTATIONS = FieldLimit(
    max_properties=256, key_check=formats.qualified_name, items=FieldLimit(max_length=262_144)
)
_COMMAND = FieldLimit(min_items=1, max_items=256, items=FieldLimit(max_length=131_072))
_ABSOLUTE = FieldLimit(pattern=formats.ABSOLUTE_PATH, meaning="an absolute path", max_length=4096)
_TEXT = FieldLimit(max_length=1024)
_LONG_TEXT = FieldLimit(max_length=131_072)

LIMITS: Mapping[type[Struct], Mapping[str, FieldLimit]] = {
    Port: {
        "port": FieldLimit(minimum=1, maximum=65535),
        "name": FieldLimit(max_length=63),
        "protocol": FieldLimit(choices=("TCP", "UDP")),
    },
    Resources: {
        "cpu": _QUANTITY,
        "memory": _QUANTITY,
        "disk": _QUANTITY,
        "pids": FieldLimit(minimum=1, maximum=4_194_304),
        **dict.fromkeys(
            (
                *("ingress_bandwidth", "egress_bandwidth"),
                *("io_read_bandwidth", "io_write_bandwidth"),
            ),
            _QUANTITY,
        ),
        **dict.fromkeys(
            ("io_read_iops", "io_write_iops"), FieldLimit(minimum=1, maximum=1_000_000_000)
        ),
    },
    Volume: {
        "name": FieldLimit(
            pattern=formats.DNS_LABEL,
            meaning="a valid name: lower case letters, digits and '-'",
            min_length=1,
            max_length=63,
        ),
        "mount_path": _ABSOLUTE,
        "host_path": _ABSOLUTE,
        "claim_name": _NAME,
    },
    NetworkPolicy: {
        "allow_out": FieldLimit(
            max_items=128, items=FieldLimit(max_length=253, check=formats.network_or_domain)
        ),
        "deny_out": FieldLimit(
            max_items=128, items=FieldLimit(max_length=253, check=formats.network)
        ),
        "dns_servers": FieldLimit(
            max_items=8, items=FieldLimit(max_length=64, check=formats.address)
        ),
        "mask_request_host": FieldLimit(
            pattern=formats.HOST_NAME,
            meaning="a host name, optionally with ${PORT}",
            max_length=253,
        ),
    },
    Outbound: {
        "http_proxy": FieldLimit(max_length=2048, check=formats.proxy_url),
        "https_proxy": FieldLimit(max_length=2048, check=formats.proxy_url),
        "no_proxy": FieldLimit(
            max_items=128, items=FieldLimit(max_length=253, check=formats.proxy_exception)
        ),
        "ca_certificates": FieldLimit(
            max_length=formats.MAX_CERTIFICATES, check=formats.certificates
        ),
        "pip_index": FieldLimit(max_length=2048, check=formats.web_url),
        "npm_registry": FieldLimit(max_length=2048, check=formats.web_url),
        "apt_mirror": FieldLimit(max_length=2048, check=formats.web_url),
    },
    Probe: {
        "command": _LONG_TEXT,
        "period_seconds": _SHORT,
        "timeout_seconds": _SHORT,
        "failure_threshold": FieldLimit(minimum=1, maximum=1000),
    },
    TemplateRef: {"name": _NAME, "namespace": _NAMESPACE},
    SandboxTemplateSpec: {
        "image": _IMAGE,
        "image_pull_secrets": FieldLimit(max_items=16, items=_NAME),
        "image_digest": FieldLimit(
            pattern=r"^sha256:[0-9a-f]{64}$", meaning="sha256: and 64 hexadecimal digits"
        ),
        "restore_from": FieldLimit(min_length=1, max_length=253),
        "env": _VARIABLES,
        "user": FieldLimit(
            pattern=formats.USER_NAME,
            meaning="the name of a user, or a number",
            min_length=1,
            max_length=64,
        ),
        "workdir": _ABSOLUTE,
        "start_command": _LONG_TEXT,
        "ready_command": _LONG_TEXT,
        "ready_timeout_seconds": _SHORT,
        "ports": FieldLimit(max_items=32),
        "volumes": FieldLimit(max_items=32),
        "volume_claim_templates": FieldLimit(max_items=32),
        "aliases": FieldLimit(
            max_items=32,
            items=FieldLimit(
                pattern=formats.ALIAS,
                meaning="a name such as team/name:tag",
                min_length=1,
                max_length=253,
            ),
        ),
        "description": FieldLimit(max_length=4096),
    },
    WakeOnTraffic: {"timeout_seconds": _SECONDS},
    IdlePause: {
        "after_seconds": _SECONDS,
        "cpu_percent_below": FieldLimit(minimum=0, maximum=10_000),
    },
    ClaimIdentity: {
        "sandbox_id": FieldLimit(
            pattern=formats.SANDBOX_ID,
            meaning="a valid id: lower case letters and digits",
            max_length=63,
        ),
        "owner": _TEXT,
        "lock": FieldLimit(min_length=1, max_length=1024),
        "timeout_seconds": _SECONDS_OR_NONE,
    },
    SandboxSpec: {
        "restore_from": FieldLimit(min_length=1, max_length=253),
        "image": _IMAGE,
        "paused_retention_seconds": _SECONDS_OR_NONE,
    },
    Capacity: {
        "buffer_min": _COUNT,
        "buffer_max": _COUNT,
        "pool_min": _COUNT,
        "pool_max": _COUNT,
    },
    ScaleStrategy: {"max_unavailable": _PERCENT_OR_COUNT},
    UpdateStrategy: {"max_unavailable": _PERCENT_OR_COUNT},
    RecycleStrategy: {"max_recycles": _COUNT, "timeout_seconds": _SHORT},
    SandboxPoolSpec: {
        "replicas": _COUNT,
        "max_idle_age_seconds": _SECONDS,
        "labels": _LABELS,
        "annotations": _ANNOTATIONS,
        "algorithm": FieldLimit(choices=("packed", "spread")),
        "eviction_handler": FieldLimit(min_length=1, max_length=253),
    },
    UpdatedResources: {"cpu": _SOME, "memory": _SOME},
    InplaceUpdate: {"image": _IMAGE},
    SandboxClaimSpec: {
        "template_name": _NAME,
        "replicas": _SIZE,
        "claim_timeout_seconds": _SHORT,
        "wait_ready_timeout_seconds": _SHORT,
        "ttl_seconds_after_completed": FieldLimit(minimum=-1, maximum=YEAR),
        "labels": _LABELS,
        "annotations": _ANNOTATIONS,
        "env_vars": _VARIABLES,
        "priority": _PRIORITY,
    },
    CheckpointSpec: {
        "sandbox_name": _NAME,
        "persistent_contents": FieldLimit(min_items=1, max_items=2),
        "ttl_seconds_after_finished": _SECONDS_OR_NONE,
        "names": FieldLimit(
            max_items=32,
            items=FieldLimit(
                pattern=formats.ALIAS,
                meaning="a name such as team/name:tag",
                min_length=1,
                max_length=253,
            ),
        ),
    },
    BuildStep: {
        "type": FieldLimit(
            pattern=r"^[A-Z]{1,32}$", meaning="an instruction in upper case, such as RUN"
        ),
        "args": FieldLimit(max_items=1024, items=_LONG_TEXT),
        "files_hash": FieldLimit(
            pattern=r"^([0-9a-f]{64})?$", meaning="a SHA-256 hash in hexadecimal digits, or empty"
        ),
    },
    TemplateBuildSpec: {
        "template_name": _NAME,
        "tags": FieldLimit(
            max_items=64,
            items=FieldLimit(
                pattern=r"^[a-z0-9_.-]+$",
                meaning="a tag: lower case letters, digits, '.', '_' or '-'",
                min_length=1,
                max_length=128,
            ),
        ),
        "canceled": _TEXT,
        "from_image": FieldLimit(max_length=512),
        "from_template": FieldLimit(max_length=512),
        "steps": FieldLimit(max_items=1024),
        "start_command": _LONG_TEXT,
        "ready_command": _LONG_TEXT,
        "owner": _TEXT,
    },
    EnvVar: {
        "name": FieldLimit(min_length=1, max_length=1024, check=formats.env_name),
        "value": _LONG_TEXT,
    },
    Hook: {"command": _COMMAND, "timeout_seconds": _SHORT},
    Process: {
        "command": _COMMAND,
        "args": FieldLimit(max_items=1024, items=_LONG_TEXT),
        "env": FieldLimit(max_items=512),
        "working_dir": _ABSOLUTE,
    },
    TaskSpec: {
        "timeout_seconds": _SECONDS,
        "max_attempts": FieldLimit(minimum=1, maximum=1000),
        "backoff_seconds": FieldLimit(minimum=0, maximum=DAY),
        "grace_seconds": FieldLimit(minimum=0, maximum=DAY),
    },
    BatchSandboxSpec: {
        "replicas": FieldLimit(minimum=0, maximum=100_000),
        "pool_ref": FieldLimit(
            pattern=r"^(\*|([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?)$",
            meaning="the name of a pool, '*' or empty",
            max_length=formats.MAX_NAME,
        ),
        "shard_patches": FieldLimit(max_items=100_000),
        "shard_task_patches": FieldLimit(max_items=100_000),
        "priority": _PRIORITY,
        "min_available": FieldLimit(minimum=1, maximum=100_000),
        "assign_profile": FieldLimit(min_length=1, max_length=253),
    },
    EnvDefaults: {"multiplier": FieldLimit(minimum=1, maximum=1000)},
    MemberConfig: {
        "labels": _LABELS,
        "annotations": _ANNOTATIONS,
        "multiplier": FieldLimit(minimum=1, maximum=1000),
        "scaling_group": FieldLimit(min_length=1, max_length=63),
        "min_replicas": _COUNT,
        "max_replicas": _COUNT,
        "priority": _PRIORITY,
        "scale_up_priority": _PRIORITY,
        "scale_down_priority": _PRIORITY,
    },
    MemberMetadata: {"labels": _LABELS, "annotations": _ANNOTATIONS},
    EnvMember: {"replicas": _COUNT},
    EnvCluster: {"members": FieldLimit(max_properties=32, key_check=formats.dns_label)},
    ScheduledFloor: {
        "cron": FieldLimit(min_length=9, max_length=128, check=formats.cron),
        "duration_seconds": FieldLimit(minimum=60, maximum=31 * DAY),
        "min_replicas": _COUNT,
    },
    Forecast: {
        "window_seconds": FieldLimit(minimum=10, maximum=DAY),
        "lead_seconds": FieldLimit(minimum=0, maximum=DAY),
    },
    ScalingGroup: {
        "min_replicas": _COUNT,
        "max_replicas": _COUNT,
        "cooldown_seconds": _SECONDS_OR_NONE,
        "saturation_cooldown_seconds": _SECONDS_OR_NONE,
        "idle_threshold_seconds": _SECONDS_OR_NONE,
        "idle_zero_quiet_window_seconds": _SECONDS_OR_NONE,
        "stabilization_seconds": _SECONDS_OR_NONE,
        "idle_timeout_seconds": _SECONDS_OR_NONE,
        "schedules": FieldLimit(max_items=64),
    },
    Autoscaling: {"groups": FieldLimit(max_properties=64, key_check=formats.dns_label)},
    EnvOverrides: {
        "image": _IMAGE,
        "env": _VARIABLES,
        "default_startup_timeout_seconds": _SECONDS,
        "default_idle_timeout_seconds": _SECONDS,
    },
    SandboxEnvSpec: {"clusters": FieldLimit(max_properties=16, key_check=formats.dns_subdomain)},
    LeaseSpec: {"lease_duration_seconds": FieldLimit(minimum=1)},
    Secret: {
        "data": FieldLimit(
            key_check=formats.secret_key, items=FieldLimit(check=formats.base64_text)
        ),
    },
}


def limit_of(cls: type[Any], field: str) -> FieldLimit | None:
    """Return the limits of a field of a struct, or `None`."""
    found = LIMITS.get(cls)
    return found.get(field) if found else None
