"""Invalid objects and updates with the path of the field; `tests/on_cluster` uses them too."""

from typing import Any, NamedTuple

_TEMPLATE = {"image": "base"}
_TASK = {"spec": {"process": {"command": ["true"]}}}


class Bad(NamedTuple):
    """An object that must be rejected."""

    why: str
    kind: str
    spec: dict[str, Any]
    path: str
    by_server: bool = True
    """Whether an API server with the CRDs rejects it too, with the same path."""
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
    _template("port out of range", {"ports": [{"port": 70000}]}, "spec.ports[0].port"),
    _template("duplicate port", {"ports": [{"port": 80}, {"port": 80}]}, "spec.ports"),
    _template(
        "unknown protocol",
        {"ports": [{"port": 80, "protocol": "ICMP"}]},
        "spec.ports[0].protocol",
    ),
    _template("invalid quantity", {"resources": {"memory": "lots"}}, "spec.resources.memory"),
    _template("zero pids", {"resources": {"pids": 0}}, "spec.resources.pids"),
    _template("relative workdir", {"workdir": "home"}, "spec.workdir"),
    _template("empty image", {"image": ""}, "spec.image"),
    _template("zero ready timeout", {"readyTimeoutSeconds": 0}, "spec.readyTimeoutSeconds"),
    _template(
        "volume with two sources",
        {"volumes": [{"name": "v", "mountPath": "/v", "hostPath": "/a", "claimName": "b"}]},
        "spec.volumes[0].claimName",
    ),
    _template(
        "volume without source",
        {"volumes": [{"name": "v", "mountPath": "/v"}]},
        "spec.volumes",
        by_server=False,
    ),
    _template(
        "duplicate volume name",
        {
            "volumes": [
                {"name": "v", "mountPath": "/a", "claimName": "a"},
                {"name": "v", "mountPath": "/b", "claimName": "b"},
            ]
        },
        "spec.volumes",
    ),
    _template(
        "domain with open internet access",
        {"network": {"allowOut": ["example.com"]}},
        "spec.network.allowOut",
    ),
    _template(
        "domain in denyOut",
        {"network": {"denyOut": ["example.com"]}},
        "spec.network.denyOut[0]",
        by_server=False,
    ),
    _template(
        "DNS server that is not an address",
        {"network": {"dnsServers": ["dns.example"]}},
        "spec.network.dnsServers[0]",
        by_server=False,
    ),
    _template(
        "probe timeout longer than its period",
        {"probe": {"periodSeconds": 2, "timeoutSeconds": 3}},
        "spec.probe.timeoutSeconds",
    ),
    _template("invalid variable name", {"env": {"1A": "x"}}, "spec.env", by_server=False),
    _template("unknown pause strategy", {"pauseStrategy": "Nap"}, "spec.pauseStrategy"),
    Bad("no template", "Sandbox", {"paused": False}, "spec.template"),
    Bad(
        "template and templateRef",
        "Sandbox",
        {"template": _TEMPLATE, "templateRef": {"name": "a"}},
        "spec.templateRef",
    ),
    Bad(
        "zero wake timeout",
        "Sandbox",
        {"template": _TEMPLATE, "wakeOnTraffic": {"enabled": True, "timeoutSeconds": 0}},
        "spec.wakeOnTraffic.timeoutSeconds",
    ),
    Bad(
        "zero idle time",
        "Sandbox",
        {"template": _TEMPLATE, "idlePause": {"afterSeconds": 0}},
        "spec.idlePause.afterSeconds",
    ),
    Bad(
        "upper-case sandbox id",
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
        "invalid time",
        "Sandbox",
        {"template": _TEMPLATE, "shutdownTime": "tomorrow"},
        "spec.shutdownTime",
    ),
    _pool("negative replicas", {"replicas": -1}, "spec.replicas"),
    _pool("neither replicas nor capacity", {}, "spec.replicas"),
    _pool("both replicas and capacity", {"replicas": 1, **_capacity(1, 1, 1, 1)}, "spec.replicas"),
    _pool("bufferMin above bufferMax", _capacity(3, 2, 0, 9), "spec.capacity.bufferMin"),
    _pool("poolMin above poolMax", _capacity(1, 2, 9, 8), "spec.capacity.poolMin"),
    _pool("bufferMax above poolMax", _capacity(1, 9, 0, 8), "spec.capacity.bufferMax"),
    _pool(
        "invalid percentage",
        {"replicas": 1, "scaleStrategy": {"maxUnavailable": "many"}},
        "spec.scaleStrategy.maxUnavailable",
    ),
    _pool(
        "percentage above 100",
        {"replicas": 1, "updateStrategy": {"maxUnavailable": "120%"}},
        "spec.updateStrategy.maxUnavailable",
    ),
    _pool(
        "zero maxUnavailable",
        {"replicas": 1, "updateStrategy": {"maxUnavailable": 0}},
        "spec.updateStrategy.maxUnavailable",
    ),
    _pool("unknown algorithm", {"replicas": 1, "algorithm": "best"}, "spec.algorithm"),
    _pool(
        "invalid label value", {"replicas": 1, "labels": {"a": "b c"}}, "spec.labels.a", False
    ),
    Bad("template and templateRef", "SandboxPool",
        {"replicas": 1, "template": _TEMPLATE, "templateRef": {"name": "a"}}, "spec.templateRef"),
    Bad("no template", "SandboxPool", {"replicas": 1}, "spec.template"),
    Bad("name longer than a label", "SandboxPool",
        {"replicas": 1, "template": _TEMPLATE}, "metadata.name", name="a" * 64),
    Bad("invalid name", "Sandbox", {"template": _TEMPLATE}, "metadata.name", name="A_b"),
    Bad("name too long", "Sandbox", {"template": _TEMPLATE}, "metadata.name", name="a" * 300),
    Bad("empty templateName", "SandboxClaim", {"templateName": ""}, "spec.templateName"),
    Bad("zero replicas", "SandboxClaim", {"templateName": "a", "replicas": 0}, "spec.replicas"),
    Bad("zero claim timeout", "SandboxClaim",
        {"templateName": "a", "claimTimeoutSeconds": 0}, "spec.claimTimeoutSeconds"),
    _update("empty inplaceUpdate", {}, "spec.inplaceUpdate.image"),
    _update("empty image", {"image": ""}, "spec.inplaceUpdate.image"),
    _update("empty resources", {"resources": {}}, "spec.inplaceUpdate.resources.cpu"),
    _update("zero memory", {"resources": {"memory": "0Mi"}},
            "spec.inplaceUpdate.resources.memory"),
    _update("invalid quantity", {"resources": {"cpu": "many"}}, "spec.inplaceUpdate.resources.cpu"),
    Bad("empty sandboxName", "Checkpoint", {"sandboxName": ""}, "spec.sandboxName"),
    Bad("no contents", "Checkpoint",
        {"sandboxName": "a", "persistentContents": []}, "spec.persistentContents"),
    Bad("duplicate content", "Checkpoint",
        {"sandboxName": "a", "persistentContents": ["memory", "memory"]},
        "spec.persistentContents"),
    Bad("empty templateName", "TemplateBuild", {"templateName": ""}, "spec.templateName"),
    Bad("instruction in lower case", "TemplateBuild",
        {"templateName": "a", "steps": [{"type": "run"}]}, "spec.steps[0].type"),
    Bad("hash of files", "TemplateBuild",
        {"templateName": "a", "steps": [{"type": "COPY", "filesHash": "zz"}]},
        "spec.steps[0].filesHash"),
    Bad("tag in upper case", "TemplateBuild",
        {"templateName": "a", "tags": ["V1"]}, "spec.tags[0]"),
    Bad("no pool and no template", "BatchSandbox", {"replicas": 1}, "spec.template"),
    Bad("pool name and template", "BatchSandbox",
        {"poolRef": "a", "template": _TEMPLATE}, "spec.template"),
    Bad("shardPatches with a pool", "BatchSandbox",
        {"poolRef": "a", "shardPatches": [{"user": "root"}]}, "spec.shardPatches"),
    Bad("shardTaskPatches without a task", "BatchSandbox",
        {"poolRef": "a", "shardTaskPatches": [{}]}, "spec.shardTaskPatches"),
    Bad("minAvailable above replicas", "BatchSandbox",
        {"poolRef": "a", "replicas": 2, "minAvailable": 3}, "spec.minAvailable"),
    Bad("empty command", "BatchSandbox",
        {"poolRef": "a", "taskTemplate": {"spec": {"process": {"command": []}}}},
        "spec.taskTemplate.spec.process.command"),
    Bad("zero attempts", "BatchSandbox",
        {"poolRef": "a", "taskTemplate": {"spec": {**_TASK["spec"], "maxAttempts": 0}}},
        "spec.taskTemplate.spec.maxAttempts"),
    Bad("empty variable name", "BatchSandbox",
        {"poolRef": "a", "taskTemplate": {"spec": {"process": {
            "command": ["true"], "env": [{"name": ""}]}}}},
        "spec.taskTemplate.spec.process.env[0].name"),
    Bad("empty template name", "SandboxEnv", {"templateRef": {"name": ""}},
        "spec.templateRef.name"),
    _env("Aggressive without maxReplicas", _group(scaleUpPolicy="Aggressive"),
         "spec.autoscaling.groups.default.maxReplicas"),
    _env("group minReplicas above maxReplicas", _group(minReplicas=2, maxReplicas=1),
         "spec.autoscaling.groups.default.minReplicas"),
    _env("member minReplicas above maxReplicas", _member({"minReplicas": 2, "maxReplicas": 1}),
         "spec.clusters.local.members.small.config.minReplicas"),
    _env("instanceType and inlineResources",
         _member({"instanceType": "a", "inlineResources": {"cpu": "1"}}),
         "spec.clusters.local.members.small.config.inlineResources"),
    _env("unknown scaling group", _member({"scalingGroup": "x"}), "spec.autoscaling.groups", False),
    _env("invalid cron expression",
         _group(schedules=[{"cron": "every morning", "durationSeconds": 60, "minReplicas": 1}]),
         "spec.autoscaling.groups.default.schedules[0].cron", False),
    _env("window too short",
         _group(schedules=[{"cron": "0 7 * * *", "durationSeconds": 1, "minReplicas": 1}]),
         "spec.autoscaling.groups.default.schedules[0].durationSeconds"),
)  # fmt: skip


class BadChange(NamedTuple):
    """An update that must be rejected."""

    why: str
    kind: str
    before: dict[str, Any]
    after: dict[str, Any]
    path: str


_CLAIM = {"owner": "t", "lock": "l", "claimTime": "2030-01-01T00:00:00Z"}
BAD_CHANGES: tuple[BadChange, ...] = (
    BadChange("replicas changed", "SandboxClaim",
              {"templateName": "a"}, {"templateName": "a", "replicas": 2}, "spec.replicas"),
    BadChange("templateName changed", "SandboxClaim",
              {"templateName": "a"}, {"templateName": "b"}, "spec.templateName"),
    BadChange("inplaceUpdate changed", "SandboxClaim",
              {"templateName": "a", "inplaceUpdate": {"image": "b"}},
              {"templateName": "a", "inplaceUpdate": {"image": "c"}}, "spec.inplaceUpdate"),
    BadChange("inplaceUpdate added", "SandboxClaim",
              {"templateName": "a"}, {"templateName": "a", "inplaceUpdate": {"image": "c"}},
              "spec.inplaceUpdate"),
    BadChange("sandboxName changed", "Checkpoint",
              {"sandboxName": "a"}, {"sandboxName": "b"}, "spec.sandboxName"),
    BadChange("sandboxUid changed", "Checkpoint",
              {"sandboxName": "a", "sandboxUid": "1"}, {"sandboxName": "a", "sandboxUid": "2"},
              "spec.sandboxUid"),
    BadChange("templateName changed", "TemplateBuild",
              {"templateName": "a"}, {"templateName": "b"}, "spec.templateName"),
    BadChange("poolRef changed", "BatchSandbox",
              {"poolRef": "a"}, {"poolRef": "b"}, "spec.poolRef"),
    BadChange("restoreFrom changed", "Sandbox",
              {"restoreFrom": "a"}, {"restoreFrom": "b"}, "spec.restoreFrom"),
    BadChange("sandboxId changed", "Sandbox",
              {"template": _TEMPLATE, "claim": {"sandboxId": "a", **_CLAIM}},
              {"template": _TEMPLATE, "claim": {"sandboxId": "b", **_CLAIM}},
              "spec.claim.sandboxId"),
)  # fmt: skip
