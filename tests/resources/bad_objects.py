"""Objects that must be refused, with the field to blame; used here and on a real API server."""

from typing import Any, NamedTuple

_TEMPLATE = {"image": "base"}
_TASK = {"spec": {"process": {"command": ["true"]}}}


class Bad(NamedTuple):
    """One object that must be refused."""

    why: str
    kind: str
    spec: dict[str, Any]
    path: str
    by_server: bool = True
    """Whether an API server with our CRDs refuses it too, at the same path."""
    name: str = "bad"

    @property
    def document(self) -> dict[str, Any]:
        return {
            "apiVersion": "paddock.dev/v1alpha1",
            "kind": self.kind,
            "metadata": {"name": self.name, "namespace": "default"},
            "spec": self.spec,
        }


def _template(why: str, spec: dict[str, Any], path: str, by_server: bool = True) -> Bad:
    return Bad(why, "SandboxTemplate", spec, path, by_server)


def _pool(why: str, spec: dict[str, Any], path: str, by_server: bool = True) -> Bad:
    return Bad(why, "SandboxPool", {"template": _TEMPLATE, **spec}, path, by_server)


def _capacity(low: int, high: int, least: int, most: int) -> dict[str, Any]:
    return {"capacity": {"bufferMin": low, "bufferMax": high, "poolMin": least, "poolMax": most}}


def _env(why: str, spec: dict[str, Any], path: str, by_server: bool = True) -> Bad:
    return Bad(why, "SandboxEnv", {"templateRef": {"name": "python"}, **spec}, path, by_server)


def _update(why: str, update: dict[str, Any], path: str) -> Bad:
    return Bad(why, "SandboxClaim", {"templateName": "a", "inplaceUpdate": update}, path)


def _member(config: dict[str, Any]) -> dict[str, Any]:
    return {"clusters": {"local": {"members": {"small": {"config": config}}}}}


def _group(**group: Any) -> dict[str, Any]:
    return {"autoscaling": {"groups": {"default": group}}}


BAD: tuple[Bad, ...] = (
    _template("a port out of range", {"ports": [{"port": 70000}]}, "spec.ports[0].port"),
    _template("a port twice", {"ports": [{"port": 80}, {"port": 80}]}, "spec.ports"),
    _template(
        "an unknown protocol",
        {"ports": [{"port": 80, "protocol": "ICMP"}]},
        "spec.ports[0].protocol",
    ),
    _template("no quantity", {"resources": {"memory": "lots"}}, "spec.resources.memory"),
    _template("no processes", {"resources": {"pids": 0}}, "spec.resources.pids"),
    _template("a relative directory", {"workdir": "home"}, "spec.workdir"),
    _template("no image", {"image": ""}, "spec.image"),
    _template("no time to get ready", {"readyTimeoutSeconds": 0}, "spec.readyTimeoutSeconds"),
    _template(
        "a volume from two places",
        {"volumes": [{"name": "v", "mountPath": "/v", "hostPath": "/a", "claimName": "b"}]},
        "spec.volumes[0].claimName",
    ),
    _template(
        "a volume from nowhere",
        {"volumes": [{"name": "v", "mountPath": "/v"}]},
        "spec.volumes",
        by_server=False,
    ),
    _template(
        "a volume's name twice",
        {
            "volumes": [
                {"name": "v", "mountPath": "/a", "claimName": "a"},
                {"name": "v", "mountPath": "/b", "claimName": "b"},
            ]
        },
        "spec.volumes",
    ),
    _template(
        "domains although everything is allowed",
        {"network": {"allowOut": ["example.com"]}},
        "spec.network.allowOut",
    ),
    _template(
        "a domain to deny",
        {"network": {"denyOut": ["example.com"]}},
        "spec.network.denyOut[0]",
        by_server=False,
    ),
    _template(
        "a name server that is a name",
        {"network": {"dnsServers": ["dns.example"]}},
        "spec.network.dnsServers[0]",
        by_server=False,
    ),
    _template(
        "a probe that outlasts its period",
        {"probe": {"periodSeconds": 2, "timeoutSeconds": 3}},
        "spec.probe.timeoutSeconds",
    ),
    _template("a variable's name", {"env": {"1A": "x"}}, "spec.env", by_server=False),
    _template("an unknown strategy", {"pauseStrategy": "Nap"}, "spec.pauseStrategy"),
    Bad("nothing to be made of", "Sandbox", {"paused": False}, "spec.template"),
    Bad(
        "made of two things",
        "Sandbox",
        {"template": _TEMPLATE, "templateRef": {"name": "a"}},
        "spec.templateRef",
    ),
    Bad(
        "woken for no time",
        "Sandbox",
        {"template": _TEMPLATE, "wakeOnTraffic": {"enabled": True, "timeoutSeconds": 0}},
        "spec.wakeOnTraffic.timeoutSeconds",
    ),
    Bad(
        "idle at once",
        "Sandbox",
        {"template": _TEMPLATE, "idlePause": {"afterSeconds": 0}},
        "spec.idlePause.afterSeconds",
    ),
    Bad(
        "a public id with capitals",
        "Sandbox",
        {
            "template": _TEMPLATE,
            "claim": {
                "sandboxId": "ABC",
                "owner": "t",
                "lock": "l",
                "claimTime": "2030-01-01T00:00:00Z",
            },
        },
        "spec.claim.sandboxId",
    ),
    Bad(
        "a moment that is none",
        "Sandbox",
        {"template": _TEMPLATE, "shutdownTime": "tomorrow"},
        "spec.shutdownTime",
    ),
    _pool("a negative number", {"replicas": -1}, "spec.replicas"),
    _pool("neither replicas nor capacity", {}, "spec.replicas"),
    _pool("both replicas and capacity", {"replicas": 1, **_capacity(1, 1, 1, 1)}, "spec.replicas"),
    _pool("an upside-down buffer", _capacity(3, 2, 0, 9), "spec.capacity.bufferMin"),
    _pool("an upside-down pool", _capacity(1, 2, 9, 8), "spec.capacity.poolMin"),
    _pool("a buffer above the pool", _capacity(1, 9, 0, 8), "spec.capacity.bufferMax"),
    _pool(
        "no percentage",
        {"replicas": 1, "scaleStrategy": {"maxUnavailable": "many"}},
        "spec.scaleStrategy.maxUnavailable",
    ),
    _pool(
        "more than everything",
        {"replicas": 1, "updateStrategy": {"maxUnavailable": "120%"}},
        "spec.updateStrategy.maxUnavailable",
    ),
    _pool(
        "nothing at a time",
        {"replicas": 1, "updateStrategy": {"maxUnavailable": 0}},
        "spec.updateStrategy.maxUnavailable",
    ),
    _pool("an unknown algorithm", {"replicas": 1, "algorithm": "best"}, "spec.algorithm"),
    _pool(
        "a label that is none", {"replicas": 1, "labels": {"a": "b c"}}, "spec.labels.a", False
    ),
    Bad("two templates", "SandboxPool",
        {"replicas": 1, "template": _TEMPLATE, "templateRef": {"name": "a"}}, "spec.templateRef"),
    Bad("no template", "SandboxPool", {"replicas": 1}, "spec.template"),
    Bad("a name that fits into no label", "SandboxPool",
        {"replicas": 1, "template": _TEMPLATE}, "metadata.name", name="a" * 64),
    Bad("a name that is none", "Sandbox", {"template": _TEMPLATE}, "metadata.name", name="A_b"),
    Bad("a name without end", "Sandbox", {"template": _TEMPLATE}, "metadata.name", name="a" * 300),
    Bad("nothing to claim", "SandboxClaim", {"templateName": ""}, "spec.templateName"),
    Bad("a claim of none", "SandboxClaim", {"templateName": "a", "replicas": 0}, "spec.replicas"),
    Bad("no time to claim", "SandboxClaim",
        {"templateName": "a", "claimTimeoutSeconds": 0}, "spec.claimTimeoutSeconds"),
    _update("an update of nothing", {}, "spec.inplaceUpdate.image"),
    _update("an image without a name", {"image": ""}, "spec.inplaceUpdate.image"),
    _update("a size of nothing", {"resources": {}}, "spec.inplaceUpdate.resources.cpu"),
    _update("no memory", {"resources": {"memory": "0Mi"}},
            "spec.inplaceUpdate.resources.memory"),
    _update("a garbled size", {"resources": {"cpu": "many"}}, "spec.inplaceUpdate.resources.cpu"),
    Bad("a checkpoint of nothing", "Checkpoint", {"sandboxName": ""}, "spec.sandboxName"),
    Bad("a checkpoint without content", "Checkpoint",
        {"sandboxName": "a", "persistentContents": []}, "spec.persistentContents"),
    Bad("the same content twice", "Checkpoint",
        {"sandboxName": "a", "persistentContents": ["memory", "memory"]},
        "spec.persistentContents"),
    Bad("a batch of nothing", "BatchSandbox", {"replicas": 1}, "spec.template"),
    Bad("a pool's name and a template", "BatchSandbox",
        {"poolRef": "a", "template": _TEMPLATE}, "spec.template"),
    Bad("patches for a pool's sandboxes", "BatchSandbox",
        {"poolRef": "a", "shardPatches": [{"user": "root"}]}, "spec.shardPatches"),
    Bad("patches for no task", "BatchSandbox",
        {"poolRef": "a", "shardTaskPatches": [{}]}, "spec.shardTaskPatches"),
    Bad("more available than there are", "BatchSandbox",
        {"poolRef": "a", "replicas": 2, "minAvailable": 3}, "spec.minAvailable"),
    Bad("a task without command", "BatchSandbox",
        {"poolRef": "a", "taskTemplate": {"spec": {"process": {"command": []}}}},
        "spec.taskTemplate.spec.process.command"),
    Bad("a task that is never tried", "BatchSandbox",
        {"poolRef": "a", "taskTemplate": {"spec": {**_TASK["spec"], "maxAttempts": 0}}},
        "spec.taskTemplate.spec.maxAttempts"),
    Bad("a variable without name", "BatchSandbox",
        {"poolRef": "a", "taskTemplate": {"spec": {"process": {
            "command": ["true"], "env": [{"name": ""}]}}}},
        "spec.taskTemplate.spec.process.env[0].name"),
    Bad("an environment of nothing", "SandboxEnv", {"templateRef": {"name": ""}},
        "spec.templateRef.name"),
    _env("bold without bound", _group(scaleUpPolicy="Aggressive"),
         "spec.autoscaling.groups.default.maxReplicas"),
    _env("an upside-down group", _group(minReplicas=2, maxReplicas=1),
         "spec.autoscaling.groups.default.minReplicas"),
    _env("an upside-down member", _member({"minReplicas": 2, "maxReplicas": 1}),
         "spec.clusters.local.members.small.config.minReplicas"),
    _env("two shapes", _member({"instanceType": "a", "inlineResources": {"cpu": "1"}}),
         "spec.clusters.local.members.small.config.inlineResources"),
    _env("an unknown group", _member({"scalingGroup": "x"}), "spec.autoscaling.groups", False),
    _env("no cron",
         _group(schedules=[{"cron": "every morning", "durationSeconds": 60, "minReplicas": 1}]),
         "spec.autoscaling.groups.default.schedules[0].cron", False),
    _env("too short a window",
         _group(schedules=[{"cron": "0 7 * * *", "durationSeconds": 1, "minReplicas": 1}]),
         "spec.autoscaling.groups.default.schedules[0].durationSeconds"),
)  # fmt: skip


class BadChange(NamedTuple):
    """One change that must be refused."""

    why: str
    kind: str
    before: dict[str, Any]
    after: dict[str, Any]
    path: str


_CLAIM = {"owner": "t", "lock": "l", "claimTime": "2030-01-01T00:00:00Z"}
BAD_CHANGES: tuple[BadChange, ...] = (
    BadChange("another number", "SandboxClaim",
              {"templateName": "a"}, {"templateName": "a", "replicas": 2}, "spec.replicas"),
    BadChange("another source", "SandboxClaim",
              {"templateName": "a"}, {"templateName": "b"}, "spec.templateName"),
    BadChange("another image", "SandboxClaim",
              {"templateName": "a", "inplaceUpdate": {"image": "b"}},
              {"templateName": "a", "inplaceUpdate": {"image": "c"}}, "spec.inplaceUpdate"),
    BadChange("an image after all", "SandboxClaim",
              {"templateName": "a"}, {"templateName": "a", "inplaceUpdate": {"image": "c"}},
              "spec.inplaceUpdate"),
    BadChange("another sandbox", "Checkpoint",
              {"sandboxName": "a"}, {"sandboxName": "b"}, "spec.sandboxName"),
    BadChange("a namesake", "Checkpoint",
              {"sandboxName": "a", "sandboxUid": "1"}, {"sandboxName": "a", "sandboxUid": "2"},
              "spec.sandboxUid"),
    BadChange("another pool", "BatchSandbox", {"poolRef": "a"}, {"poolRef": "b"}, "spec.poolRef"),
    BadChange("another origin", "Sandbox",
              {"restoreFrom": "a"}, {"restoreFrom": "b"}, "spec.restoreFrom"),
    BadChange("another identity", "Sandbox",
              {"template": _TEMPLATE, "claim": {"sandboxId": "a", **_CLAIM}},
              {"template": _TEMPLATE, "claim": {"sandboxId": "b", **_CLAIM}},
              "spec.claim.sandboxId"),
)  # fmt: skip
